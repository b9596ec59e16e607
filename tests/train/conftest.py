"""What all tests of trainings share."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_SFT
from tests.trainings import FOUR_SUMS, train_in


@pytest.fixture(scope="session")
def half_right(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    """A tiny model that was fine-tuned until it answers about half of four sums right: nobody may write to it."""
    folder = tmp_path_factory.mktemp("half-right")
    words = ["model=tiny", "model.autocast=none", *FOUR_SUMS, "minibatch_size=4", "steps=34", "eval.enabled=false"]
    assert train_in(TRAIN_SFT, folder, [*words, "optim.lr=1e-2", "optim.schedule=constant", "checkpoint.every=0"]) == 0
    return folder / "checkpoints/latest/model"
