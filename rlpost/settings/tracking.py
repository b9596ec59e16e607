"""Where a run is recorded beside its own metrics.jsonl.

A setting comes first, then the environment variable its tracker is known for, then rlpost's default.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlpost.settings.checks import Settings, limited


class WandbMode(Enum):
    """Whether Weights & Biases is sent anything."""

    offline = "offline"
    online = "online"
    disabled = "disabled"  # nothing is tracked


@dataclass
class TrackingSettings(Settings, group="tracking"):
    """What every option of tracking is."""


@dataclass
class NoTrackingSettings(TrackingSettings):
    """The run folder alone."""


@dataclass
class TrackerSettings(TrackingSettings):
    """What every tracker has."""

    timeout_seconds: float = limited(60.0, above=0.0)  # longest wait for an answer of the tracker, then it is given up


@dataclass
class TensorBoardSettings(TrackerSettings):
    """Event files in RUN/tensorboard, for `tensorboard --logdir runs`."""


@dataclass
class WandbSettings(TrackerSettings):
    """Weights & Biases; offline in RUN/wandb unless asked, for `wandb sync` later."""

    project: str | None = None  # None: WANDB_PROJECT, else rlpost
    entity: str | None = None  # user or team; None: WANDB_ENTITY, else your own
    mode: WandbMode | None = None  # None: WANDB_MODE, else offline
    folder: str | None = None  # what gets a wandb/; None: WANDB_DIR, else the run's


@dataclass
class TrackioSettings(TrackerSettings):
    """trackio, in RUN/trackio; TRACKIO_SPACE_ID or TRACKIO_SERVER_URL send it elsewhere."""

    project: str = "rlpost"  # what its dashboard shows the run under
    folder: str | None = None  # of its database; None: TRACKIO_DIR, else RUN/trackio


@dataclass
class MLflowSettings(TrackerSettings):
    """MLflow, in RUN/mlflow/mlflow.db unless a server is named."""

    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else sqlite in the run's folder
    experiment: str | None = None  # None: MLFLOW_EXPERIMENT_NAME, else rlpost
