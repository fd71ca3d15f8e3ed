"""Formats whose codes are indices of a table of values: a family."""
