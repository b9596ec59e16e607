"""Which tracker the settings ask for: settings first, then environment variables, then defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from rlpost.catalog import row_of
from rlpost.errors import ConfigError
from rlpost.extras import require
from rlpost.home import expanded
from rlpost.settings.tracking import (
    MLflowSettings,
    TensorBoardSettings,
    TrackerSettings,
    TrackingSettings,
    TrackioSettings,
    WandbMode,
    WandbSettings,
)

PROJECT = "rlpost"  # where neither a setting nor the environment names one


@dataclass(frozen=True)
class TrackerChoice:
    """A tracker still to be made: `factory` is `module:class`, `options` what the class takes."""

    name: str
    factory: str
    options: dict[str, Any]
    timeout_seconds: float


def chosen_tracker(settings: TrackingSettings) -> TrackerChoice | None:
    """The tracker that `settings` ask for, None for none.

    Raises MissingExtraError where its package is not installed, ConfigError for an environment
    variable that makes no sense. Imports no tracker.
    """
    row = row_of("tracking", type(settings))
    return row.build(settings) if row.builds else None


def tensorboard(settings: TensorBoardSettings) -> TrackerChoice:
    """Event files."""
    _require("tensorboard", "tensorboard")
    return _choice("tensorboard", "TensorBoardTracker", settings)


def wandb(settings: WandbSettings) -> TrackerChoice | None:
    """Weights & Biases; None where it is disabled."""
    mode = settings.mode.value if settings.mode else _wandb_mode()
    if mode == WandbMode.disabled.value:
        return None
    _require("wandb", "wandb")
    return _choice(
        "wandb",
        "WandbTracker",
        settings,
        project=settings.project or os.environ.get("WANDB_PROJECT") or PROJECT,
        entity=settings.entity or os.environ.get("WANDB_ENTITY"),
        mode=mode,
        folder=_absolute(settings.folder or os.environ.get("WANDB_DIR")),
    )


def trackio(settings: TrackioSettings) -> TrackerChoice:
    """trackio."""
    _require("trackio", "trackio")
    folder = _absolute(settings.folder or os.environ.get("TRACKIO_DIR"))
    return _choice("trackio", "TrackioTracker", settings, project=settings.project, folder=folder)


def mlflow(settings: MLflowSettings) -> TrackerChoice:
    """MLflow."""
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI")
    _require("mlflow", "mlflow", *(("sqlalchemy", "alembic") if uri is None else ()))
    experiment = settings.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
    return _choice("mlflow", "MLflowTracker", settings, uri=uri, experiment=experiment)


def _choice(name: str, tracker: str, settings: TrackerSettings, **options: Any) -> TrackerChoice:
    return TrackerChoice(name, f"rlpost.tracking.{name}:{tracker}", options, settings.timeout_seconds)


def _require(extra: str, *packages: str) -> None:
    for package in packages:
        require(package, extra, f"tracking={extra}")


def _wandb_mode() -> str:
    mode = os.environ.get("WANDB_MODE") or WandbMode.offline.value
    if mode not in WandbMode.__members__:
        raise ConfigError(f"WANDB_MODE={mode} is unknown: it is one of {', '.join(WandbMode.__members__)}")
    return mode


def _absolute(folder: str | None) -> str | None:
    return str(expanded(folder).resolve()) if folder else None
