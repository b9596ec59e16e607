"""`rlpost doctor`: a whole training on a few rows, before time or money is spent on it."""
