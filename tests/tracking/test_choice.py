"""Which tracker is meant: a setting, then the environment, then the default; and what is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.errors import MissingExtraError
from rlpost.settings.commands import RunRequest
from rlpost.tracking.trackers import Tracker, chosen_tracker
from rlpost.train.run import build_tracking

EXTRAS = ("tensorboard", "wandb", "trackio", "mlflow")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes it look as if exactly these packages of trackers were installed: all of them to begin with."""
    packages = {*EXTRAS, "sqlalchemy", "alembic"}
    original = importlib.util.find_spec

    def pretend(*present: str) -> None:
        def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
            if name not in packages:
                return original(name, package)
            return ModuleSpec(name, None, origin="somewhere.py") if name in present else None

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    pretend(*packages)
    return pretend


def chosen(*words: str) -> Tracker | None:
    return chosen_tracker(compose(TRAIN_GRPO, words).settings.tracking)


def test_nothing_is_tracked_by_default() -> None:
    assert chosen() is None


def test_the_deadline_is_every_trackers(installed: object, tmp_path: Path) -> None:
    for name in EXTRAS:
        composed = compose(TRAIN_GRPO, [f"tracking={name}", "tracking.timeout_seconds=7"])
        request = RunRequest(tmp_path, None, composed.overrides, [], composed.yaml)
        tracking = build_tracking(composed.settings.tracking, request)
        assert tracking is not None
        assert (tracking.name, tracking.timeout_seconds) == (name, 7.0)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_tracker_is_named_before_the_run(
    name: str,
    installed: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    installed()
    for more in ([], ["--dry-run"]):
        assert run(["train", "grpo", "model=tiny", "policy=transformers", f"tracking={name}", *more]) == 3
        assert f"'rlpost[{name}]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_that_name_is_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(MissingExtraError, match="needs trackio"):
        chosen("tracking=trackio")
