"""Files to begin with: what `rlpost env new` and `rlpost reward new` copy, the names in them replaced."""
