"""The names and arguments of other projects, for code that moves from them."""
