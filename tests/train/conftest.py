"""What all tests of trainings share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest


@pytest.fixture(scope="package", autouse=True)
def unfrozen_heap() -> Iterator[None]:
    """Looking through what all tests have left on the heap takes longer than a training of the tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlpost.train.run.frozen_heap", nullcontext)
        yield
