"""How a gradient becomes an update.

The gate between sampler and trainer: whether what samples is what learns.

What is done about symptoms that a run's own figures show.

Where a run is recorded beside its own metrics.jsonl.

A setting comes first, then the environment variable its tracker is known for, then rlpost's default.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlpost.settings.base import Settings, limited


class Schedule(Enum):
    """How the learning rate goes on after its warm-up; linear and cosine end at 0."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(frozen=True)
class UsualRates:
    """The lowest and the highest learning rate that a kind of training is known to be done with."""

    kind: str
    whole: tuple[float, float]  # of all weights
    adapter: tuple[float, float]  # of LoRA's A and B, which want about 10 times as much

    def question(self, lr: float, *, adapter: bool) -> str | None:
        """One line about a rate beyond them; None for one within."""
        low, high = self.adapter if adapter else self.whole
        if low <= lr <= high:
            return None
        return (
            f"optim.lr={lr:g} is unusually {'low' if lr < low else 'high'}: {self.kind} of "
            f"{'an adapter' if adapter else 'all weights'} is done with {low:g} to {high:g}"
        )


# From rewards: INTELLECT-2 trains 32B at 3e-7, TRL and verl at 1e-6, AReaL 1.5B at 1.7e-5, rlpost's default for 135M is
# 2e-5; adapters: verl 3e-6, TRL 1e-5, tinker 9B at 8e-5 and small models up to 5e-4. Ten times less than any of them
# moves nothing in a run's length, and ten times more has broken every model.
GRPO_RATES = UsualRates("GRPO", (1e-8, 1e-4), (1e-6, 1e-3))
# From demonstrations: 1e-6 (70B) to 5e-5 for most, 1e-3 for models of 100M and less; adapters 1e-5 to 1e-3.
SFT_RATES = UsualRates("fine-tuning", (1e-7, 1e-3), (1e-6, 5e-3))


@dataclass
class OptimSettings(Settings, group="optim"):
    """AdamW, its schedule and gradient clipping."""

    lr: float = limited(2e-5, above=0.0)  # learning rate after the warm-up; an adapter wants about 10 times as much
    weight_decay: float = limited(0.0, at_least=0.0)  # of matrices only, apart from the gradient
    beta1: float = limited(0.9, 0.0, 0.9999)  # decay of the gradient's running mean
    beta2: float = limited(0.999, 0.0, 0.99999)  # decay of the squared gradient's running mean
    eps: float = limited(1e-8, above=0.0)  # added to the root of the squared gradient's mean
    warmup_steps: int = limited(0, at_least=0)  # optimizer steps over which lr rises to its value
    schedule: Schedule = Schedule.linear  # of lr after the warm-up
    max_grad_norm: float = limited(1.0, above=0.0)  # a longer gradient is scaled down to it


@dataclass
class AdamW8bitSettings(OptimSettings):
    """AdamW of bitsandbytes (arXiv:2110.02861): running means in 8 bits, a quarter of the memory."""


class GateAlarm(Enum):
    """What is done where sampler and trainer no longer agree."""

    stop = "stop"
    correct = "correct"  # go on, with loss.sampler_correction=tis_token where none was on
    warn = "warn"


@dataclass
class GateSettings(Settings, group="gate"):
    """A fixed probe is scored by sampler and trainer; the bounds are learned from the run's own start."""

    enabled: bool = True  # whether sampler and trainer are compared at all
    every: int = limited(
        20, at_least=0
    )  # steps between two probes, and two looks at all weights; 0: at the start alone
    on_alarm: GateAlarm = GateAlarm.stop  # what is done where they no longer agree


class OnAlarm(Enum):
    """What a training does at the first sight of a symptom."""

    warn = "warn"
    checkpoint = "checkpoint"  # a warning, and a checkpoint of the step
    stop = "stop"  # with a checkpoint, and exit 4
    off = "off"


@dataclass
class DiagnosisSettings(Settings, group="diagnosis"):
    """Dead reward, length hacking, collapse and others, looked for after each step; `rlpost runs diagnose` as well."""

    on_alarm: OnAlarm = OnAlarm.warn  # what is done at the first sight of a symptom


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
