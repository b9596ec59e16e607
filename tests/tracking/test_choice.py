"""Which tracker is meant: a setting, then the environment, then the default; and what is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.errors import MissingExtraError
from rlpost.settings.commands import RunRequest
from rlpost.tracking.trackers import Tracker, chosen_tracker
from rlpost.train.run import build_tracking

KNOWN = "WANDB_PROJECT WANDB_ENTITY WANDB_MODE WANDB_DIR TRACKIO_DIR MLFLOW_TRACKING_URI MLFLOW_EXPERIMENT_NAME"
EXTRAS = ("tensorboard", "wandb", "trackio", "mlflow")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KNOWN.split():
        monkeypatch.delenv(name, raising=False)


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


def options(*words: str) -> dict[str, Any]:
    tracker = chosen(*words)
    assert tracker is not None
    assert f"tracking={tracker.name}" == words[0]
    return vars(tracker)


def test_nothing_is_tracked_by_default() -> None:
    assert chosen() is None


def test_without_a_word_nothing_leaves_the_run_folder(installed: object) -> None:
    assert options("tracking=tensorboard") == {}
    assert options("tracking=wandb") == {"project": "rlpost", "entity": None, "mode": "offline", "folder": None}
    assert options("tracking=trackio") == {"project": "rlpost", "folder": None}
    assert options("tracking=mlflow") == {"uri": None, "experiment": "rlpost"}


def test_the_environment_comes_before_the_defaults(
    installed: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in KNOWN.split():
        monkeypatch.setenv(name, name.lower())
    monkeypatch.setenv("WANDB_MODE", "online")
    here = str(tmp_path.resolve())
    assert options("tracking=wandb") == {
        "project": "wandb_project",
        "entity": "wandb_entity",
        "mode": "online",
        "folder": f"{here}/wandb_dir",
    }
    assert options("tracking=trackio")["folder"] == f"{here}/trackio_dir"
    assert options("tracking=mlflow") == {"uri": "mlflow_tracking_uri", "experiment": "mlflow_experiment_name"}


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


def test_wandb_that_is_disabled_need_not_be_installed(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed()
    assert chosen("tracking=wandb", "tracking.mode=disabled") is None
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert chosen("tracking=wandb") is None


def test_mlflow_needs_a_database_only_for_a_store_of_its_own(installed: Callable[..., None]) -> None:
    installed("mlflow")
    assert options("tracking=mlflow", "tracking.uri=http://server")["uri"] == "http://server"
    with pytest.raises(MissingExtraError, match="needs sqlalchemy"):
        chosen("tracking=mlflow")


def test_a_folder_of_that_name_is_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(MissingExtraError, match="needs trackio"):
        chosen("tracking=trackio")
