"""Whose tensors a file holds, and how they are stored: one module a project."""
