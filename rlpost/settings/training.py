"""Optimizer, sampler gate, diagnosis, report and tracking."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import ClassVar

from rlpost.settings.base import Settings, doc


class Schedule(Enum):
    """The learning rate after its warm-up; linear and cosine end at 0."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(frozen=True)
class UsualRates:
    """The lowest and the highest learning rate in use for a kind of training."""

    kind: str
    whole: tuple[float, float]  # for full training
    adapter: tuple[float, float]  # for LoRA, which needs about 10 times as much

    def question(self, lr: float, *, adapter: bool) -> str | None:
        """One line about a rate outside the range; None for a rate inside."""
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
# From pairs: the paper trains with 1e-6, TRL 1e-6, Tulu 3 8B at 5e-7 and 70B at 2e-7, Zephyr at 5e-7; adapters 5e-6 up.
DPO_RATES = UsualRates("DPO", (1e-8, 1e-4), (1e-7, 1e-3))


# (most parameters, learning rate of all weights): for 135M rlpost's own; from rewards and pairs verl, TRL and prime-rl
# train 0.5B and more with about 1e-6, and from demonstrations with 1e-5
RatesBySize = tuple[tuple[float, float], ...]
RATES_OF_REWARDS: RatesBySize = ((2e8, 2e-5), (1e9, 2e-6), (inf, 1e-6))
RATES_OF_DEMONSTRATIONS: RatesBySize = ((1e9, 2e-5), (inf, 1e-5))

RATE = 2e-5  # learning rate of a model of 135M


@dataclass
class OptimSettings(Settings, group="optim"):
    """AdamW with warm-up, schedule and gradient clipping."""

    eight_bit: ClassVar[bool] = False  # whether its state is kept in 8 bits

    lr: float | None = doc(None, "learning rate after the warm-up; null: by the model's size, 10x for LoRA", above=0.0)
    weight_decay: float = doc(0.0, "decoupled (AdamW), on weight matrices only", at_least=0.0)
    beta1: float = doc(0.9, "decay of the gradient's running mean", 0.0, 0.9999)
    beta2: float = doc(0.999, "decay of the squared gradient's running mean", 0.0, 0.99999)
    eps: float = doc(1e-8, "added to the root of the squared gradient's mean", above=0.0)
    warmup_steps: int = doc(0, "optimizer steps over which lr rises to its value", at_least=0)
    schedule: Schedule = doc(Schedule.linear, "schedule of lr after the warm-up")
    max_grad_norm: float = doc(1.0, "clip the gradient to this norm", above=0.0)

    @property
    def rate(self) -> float:
        """`lr`, with the value of small models where it is open, as from Python."""
        return RATE if self.lr is None else self.lr


class AdamW8bitSettings(OptimSettings):
    """AdamW with its running means in 8 bits (bitsandbytes): a quarter of the optimizer's memory.

    arXiv:2110.02861.
    """

    eight_bit: ClassVar[bool] = True


class GateAlarm(Enum):
    """The action when sampler and trainer no longer agree."""

    stop = "stop"
    correct = "correct"  # go on, with loss.sampler_correction=tis_token unless a correction is on
    warn = "warn"


@dataclass
class GateSettings(Settings, group="gate"):
    """Sampler and trainer score a fixed probe; the bounds are calibrated at the start of the run."""

    enabled: bool = doc(True, "compare sampler and trainer")
    every: int = doc(20, "compare sampler and trainer every N steps; 0: at the start only", at_least=0)
    on_alarm: GateAlarm = doc(GateAlarm.stop, "what to do when they no longer agree")


class OnAlarm(Enum):
    """The action of a training when a symptom first shows."""

    warn = "warn"
    checkpoint = "checkpoint"  # warn, and save a checkpoint of the step
    stop = "stop"  # with a checkpoint, and exit 4
    off = "off"


@dataclass
class DiagnosisSettings(Settings, group="diagnosis"):
    """Looks for dead reward, length hacking, collapse and others after each step, as `rlpost runs show` does."""

    on_alarm: OnAlarm = doc(OnAlarm.warn, "what to do when a symptom first shows")


@dataclass
class ReportSettings(Settings, group="report"):
    """The HTML page about a finished run."""

    enabled: bool = doc(True, "write RUN/report.html at the end of the training")


class WandbMode(Enum):
    """Whether anything is sent to Weights & Biases."""

    offline = "offline"
    online = "online"
    disabled = "disabled"  # nothing is tracked


@dataclass
class TrackingSettings(Settings, group="tracking"):
    """Settings of every option of tracking.

    A setting comes first, then the tracker's own environment variable, then rlpost's default.
    """


class NoTrackingSettings(TrackingSettings):
    """No tracker: the run folder alone."""


@dataclass
class TrackerSettings(TrackingSettings):
    """Settings of every tracker."""

    timeout_seconds: float = doc(60.0, "seconds to wait for the tracker; then the run goes on without it", above=0.0)
    completions: int = doc(0, "logged per step as a table, from best to worst; 0: no texts are logged", at_least=0)


class TensorBoardSettings(TrackerSettings):
    """TensorBoard event files in the run's folder.

    They are in RUN/tensorboard, for `tensorboard --logdir runs`.
    """


@dataclass
class WandbSettings(TrackerSettings):
    """Weights & Biases, offline unless tracking.mode=online.

    Offline it is in RUN/wandb, for `wandb sync` later.
    """

    project: str | None = doc(None, "null: WANDB_PROJECT, else rlpost")
    entity: str | None = doc(None, "user or team; null: WANDB_ENTITY, else your own")
    mode: WandbMode | None = doc(None, "null: WANDB_MODE, else offline")
    folder: str | None = doc(None, "folder that holds wandb/; null: WANDB_DIR, else the run's")


@dataclass
class TrackioSettings(TrackerSettings):
    """trackio, local: trackio show.

    It is in RUN/trackio; TRACKIO_SPACE_ID or TRACKIO_SERVER_URL send it elsewhere.
    """

    project: str = doc("rlpost", "project in its dashboard")
    folder: str | None = doc(None, "folder of its database; null: TRACKIO_DIR, else RUN/trackio")


@dataclass
class MLflowSettings(TrackerSettings):
    """MLflow, in the run's folder or on a server.

    In the run's folder it is RUN/mlflow/mlflow.db.
    """

    uri: str | None = doc(None, "null: MLFLOW_TRACKING_URI, else sqlite in the run's folder")
    experiment: str | None = doc(None, "null: MLFLOW_EXPERIMENT_NAME, else rlpost")
