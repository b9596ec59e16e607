"""Templates that `rlpost env new` and `rlpost reward new` copy, with the names in them replaced."""
