"""Products with compressed weights."""
