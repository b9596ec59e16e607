"""`rlpost doctor`: the whole road of a training on a few rows, before time or money is spent on it."""
