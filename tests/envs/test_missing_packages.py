"""Environments of packages that are not installed."""

from __future__ import annotations

import re

import pytest

from rlpost.catalog import EVAL
from rlpost.config.compose import compose
from rlpost.envs.build import build_env
from rlpost.errors import MissingExtraError


@pytest.mark.parametrize(
    ("env", "word", "extra"),
    [
        ("openenv", "url=ws://127.0.0.1:1", "openenv"),
        ("text_game", "id=FrozenLake-v1", "gymnasium"),
        ("textarena", "id=Dice-v0", "textarena"),
        ("reasoning_gym", "task=leg_counting", "reasoning-gym"),
        ("reasoning_core", "task=sums", "reasoning-core"),
    ],
)
def test_the_extra_that_is_missing_is_named(env: str, word: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: False)
    settings = compose(EVAL, [f"env={env}", f"env.{word}"]).settings
    with pytest.raises(MissingExtraError, match=re.escape(f"'rlpost[{extra}]'")):
        build_env(settings.env).start()
