"""What an evaluation plays and measures: `rlpost eval`, and the one during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.checks import MISSING, Settings, limited
from rlpost.settings.code import CODE
from rlpost.settings.env import EnvSettings
from rlpost.settings.model import ModelSettings
from rlpost.settings.policy import DrawSettings, PolicySettings
from rlpost.settings.tools import ToolsSettings, check_turns


def samples_per_prompt(k: Sequence[int], samples: int | None) -> int:
    """Completions that are drawn for each prompt: `samples`, or where it is None the greatest of `k`."""
    return max(k) if samples is None else samples


@dataclass
class AttemptsSettings(Settings, group="eval"):
    """How often each prompt is answered, and what is made of it."""

    k: list[int] = field(default_factory=lambda: [1])  # pass@k, avg@k and maj@k for each of these
    samples: int | None = None  # completions a prompt; None: the greatest of eval.k

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.k:
            raise ConfigError("eval.k is empty: give at least one number of attempts, as in 'eval.k=[1,8]'")
        if min(self.k) < 1:
            raise ConfigError(f"eval.k={min(self.k)} is out of range: it must be at least 1")
        if len(set(self.k)) < len(self.k):
            raise ConfigError(f"eval.k={self.k} names a number twice: leave one of them out")
        if self.samples is not None and self.samples < max(self.k):
            raise ConfigError(
                f"eval.samples={self.samples} is fewer than the {max(self.k)} attempts that eval.k={self.k} asks for: "
                "raise it, or leave it out"
            )


@dataclass
class HeldOutSettings(Settings, group="eval"):
    """Evaluations during training, and what of them ends it: decided on half of the prompts, the other is reported."""

    enabled: bool = True  # false: no evaluation at all
    every: int = limited(0, at_least=0)  # steps; 0: before and after only
    limit: int | None = limited(None, at_least=1)  # prompts; None: env.eval_limit
    stop_at_accuracy: float | None = limited(None, 0.0, 1.0)  # lenient accuracy of an evaluation that ends training
    stop_at_reward: float | None = None  # reward of an evaluation that ends training
    patience: int | None = limited(None, at_least=1)  # evaluations in a row, none the best so far, that end training

    @property
    def stops(self) -> list[str]:
        """The keys that are set of those that end training early, as they are typed."""
        names = ("stop_at_accuracy", "stop_at_reward", "patience")
        return [f"eval.{name}" for name in names if getattr(self, name) is not None]

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in self.stops:
            if not self.enabled:
                raise ConfigError(f"{key} has nothing to go by while eval.enabled=false: take one of them out")
            if self.every == 0:
                raise ConfigError(
                    f"{key} needs evaluations between the first step and the last: add eval.every=10, say"
                )


@dataclass
class EvalDuringTrainingSettings(HeldOutSettings, AttemptsSettings):
    """Evaluation on held-out prompts: before the first step, after the last, and between.

    One completion a prompt is greedy; several are drawn as `sampling` says.
    """


@dataclass
class EvalSamplingSettings(DrawSettings):
    """How a completion of `rlpost eval` is drawn."""

    temperature: float | None = limited(None, at_least=0.0)  # 0: greedy; None: 0 for one completion, 1 for several


@dataclass
class EvalSettings(Settings):
    """`rlpost eval`."""

    uses_policy: ClassVar[bool] = True

    model: ModelSettings = MISSING  # what is scored
    env: EnvSettings = MISSING  # what is asked, and how replies are scored
    tools: ToolsSettings = field(default_factory=ToolsSettings)  # what the model may call while it answers
    policy: PolicySettings = MISSING  # what samples the completions
    sampling: EvalSamplingSettings = field(default_factory=EvalSamplingSettings)  # how a completion is drawn
    eval: AttemptsSettings = field(default_factory=AttemptsSettings)  # how often, and what is made of it
    plugin: list[str] = field(
        default_factory=list, metadata=CODE
    )  # Python files that register environments and rewards
    seed: int = limited(0, at_least=0)  # of sampling; the order of the prompts is that of env.seed

    def __post_init__(self) -> None:
        super().__post_init__()
        check_turns(self.env, self.tools)
        if isinstance(self.eval, AttemptsSettings) and isinstance(self.sampling, EvalSamplingSettings):
            count = samples_per_prompt(self.eval.k, self.eval.samples)
            if count > 1 and self.sampling.temperature == 0:
                raise ConfigError(
                    f"sampling.temperature=0 gives the same completion {count} times, and that says no more than one "
                    "sample a prompt: raise it, or leave it out"
                )
