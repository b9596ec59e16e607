"""The nearest right word for one that is unknown: see `rlpost.nearest`."""

from rlpost.nearest import did_you_mean as did_you_mean
from rlpost.nearest import edit_distance as edit_distance
from rlpost.nearest import nearest as nearest
from rlpost.nearest import nearest_key as nearest_key
from rlpost.nearest import one_edit_apart as one_edit_apart
from rlpost.nearest import one_typo_away as one_typo_away
