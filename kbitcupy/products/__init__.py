"""Products with compressed weights: `functions` has what users call, and `routes` how a way is chosen."""
