"""Everything `rlpost train sft` can say, and the losses on demonstrations."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.checks import MISSING, Settings, limited
from rlpost.settings.cluster import NoClusterSettings
from rlpost.settings.commands import TrainingSettings
from rlpost.settings.env import EnvSettings
from rlpost.settings.evaluation import HeldOutSettings
from rlpost.settings.policy import PolicySettings


class SFTAggregation(Enum):
    """What the sum over a minibatch's trained tokens is divided by."""

    token_mean = "token_mean"  # all of them: each weighs the same
    sequence_mean = "sequence_mean"  # those of their sample, then the samples: each of these weighs the same


@dataclass
class DemonstrationLossSettings(Settings, group="loss"):
    """What every loss on demonstrations is."""

    variant: ClassVar[str]

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the log-probs of the starting model."""
        return False


@dataclass
class SFTLossSettings(DemonstrationLossSettings):
    """Cross entropy of the demonstrated replies, with an optional KL penalty to the starting model."""

    variant: ClassVar[str] = "sft"

    aggregation: SFTAggregation = SFTAggregation.token_mean  # what the sum over tokens is divided by
    kl_coef: float = limited(0.0, at_least=0.0)  # weight of the KL penalty (k3) to the starting model; 0: not loaded

    @property
    def needs_reference(self) -> bool:
        """See `DemonstrationLossSettings.needs_reference`."""
        return self.kl_coef > 0


@dataclass
class MinorSFTLossSettings(DemonstrationLossSettings):
    """MinorSFT (arXiv:2408.10642): a sample weighs less the further the model has left its reference for it."""

    variant: ClassVar[str] = "minor_sft"

    beta: float = limited(0.1, above=0.0)  # how fast a sample's weight falls with the distance to the reference

    @property
    def needs_reference(self) -> bool:
        """See `DemonstrationLossSettings.needs_reference`."""
        return True


@dataclass
class SFTEvalSettings(HeldOutSettings):
    """The loss on held-out rows: before the first step, after the last, and between; accuracy where asked for."""

    accuracy: bool = False  # also samples greedy replies to held-out prompts and scores them; starts the policy

    def __post_init__(self) -> None:
        if self.accuracy and not self.enabled:
            raise ConfigError("eval.accuracy=true measures nothing while eval.enabled=false: take one of them out")
        if self.stops and not self.accuracy:
            raise ConfigError(f"{self.stops[0]} needs replies to be scored: add eval.accuracy=true")
        super().__post_init__()


@dataclass
class SFTSettings(TrainingSettings):
    """`rlpost train sft`."""

    must_stay: ClassVar = ("seed", "minibatch_size")  # what a run that goes on cannot change

    env: EnvSettings = MISSING  # whose demonstrations are learned, or rows of your own
    policy: PolicySettings = MISSING  # what samples replies where eval.accuracy asks for them
    cluster: NoClusterSettings = MISSING  # pyright: ignore[reportIncompatibleVariableOverride]  # what trains it
    loss: DemonstrationLossSettings = MISSING  # what turns demonstrations into a gradient
    eval: SFTEvalSettings = field(default_factory=SFTEvalSettings)  # on held-out rows
    steps: int | None = limited(None, at_least=1)  # optimizer steps; None: as many as epochs has
    epochs: int | None = limited(None, at_least=1)  # times every sample is trained on; None: 1, unless steps says
    seed: int = 0  # of the order of the samples
    minibatch_size: int = limited(32, at_least=1)  # samples an optimizer step
    packing: bool = True  # several samples a row of the forward, none of which sees another; false: one each
    max_tokens: int = limited(1024, at_least=2)  # of a sample; one whose reply would be cut is a bad row
    max_bad_share: float = limited(0.1, 0.0, 1.0)  # of the rows; more that cannot be trained on are an error
    deterministic: bool = False  # bitwise equal runs; with eval.accuracy it needs policy=transformers

    @property
    def uses_policy(self) -> bool:
        """Whether completions are sampled at all: for the accuracy alone."""
        return self.eval.accuracy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"steps={self.steps} and epochs={self.epochs} both say when training ends: take one of them out"
            )
        self._check_split(self.eval.enabled)
