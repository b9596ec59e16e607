"""The parts of a training as its run sees them: what all loops have, and how held-out prompts are answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from rlpost.collectors.sync import SyncCollector
from rlpost.envs.chat import DatasetChatEnv
from rlpost.model.packing import Reference
from rlpost.policies.base import Policy
from rlpost.record import Fact
from rlpost.screen import Screen
from rlpost.settings import SamplingSettings
from rlpost.train.facts import Seen
from rlpost.train.ranks import Ranks
from rlpost.train.resolve import Change
from rlpost.train.update import Objective

if TYPE_CHECKING:
    from rlpost.collectors.driver import GroupDriver

ObjectiveT = TypeVar("ObjectiveT", bound=Objective[Any])


class HeldOut(NamedTuple):
    """The result of an evaluation: its metrics, and a row for each completion or demonstration."""

    metrics: dict[str, float]
    table: list[dict[str, Any]]


@dataclass(kw_only=True)
class Parts(ABC, Generic[ObjectiveT]):
    """The parts of a training, and the four functions in which trainings differ."""

    settings: Any
    objective: ObjectiveT
    model_folder: Path
    tokenizer: Any
    model: PreTrainedModel
    reference: Reference | None  # None where the loss compares with none
    optimizer: torch.optim.Optimizer
    policy: Policy | None  # samples from the model; None: nothing does
    collector: SyncCollector | GroupDriver | None = None  # of the completions trained on; None: it trains on others
    eval_env: DatasetChatEnv  # whose held-out prompts `policy` answers
    notes: list[str]  # what a user should know of the data before training begins
    data: dict[str, str]  # the rows of each split: see `DatasetChatEnv.content`
    opened: ExitStack = field(default_factory=ExitStack)  # closes the policy, and the environments with their tools

    @abstractmethod
    def facts(self, changes: Sequence[Change], seen: Seen) -> list[Fact]:
        """The facts of this training: what `resolve` has changed, and what is `seen` beside the parts."""

    @abstractmethod
    def measure(self, ranks: Ranks, screen: Screen, when: str) -> HeldOut:
        """Evaluate on held-out data; `when` names the evaluation on a plain terminal."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state that resuming needs besides weights, optimizer and progress, JSON-compatible."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""

    @property
    def num_played(self) -> int:
        """How many held-out prompts an evaluation plays; 0 where no reply is scored."""
        limit = self.settings.eval.limit or self.settings.env.eval_limit
        return min(limit, self.eval_env.num_tasks) if self.policy is not None else 0

    def play_held_out(
        self, screen: Screen, sampling: SamplingSettings, *, samples: int = 1, k: Sequence[int] = (1,), what: str = ""
    ) -> HeldOut:
        """Answer the held-out prompts; where that can end training, half of them decide and the others are reported."""
        from rlpost.evaluation.play import halves, held_out_metrics, play
        from rlpost.evaluation.saved import sample_rows

        policy, stops = self.policy, bool(self.settings.eval.stops)
        assert policy is not None
        before = policy.tokens_sampled
        played = play(
            self.eval_env,
            policy,
            num_prompts=self.num_played,
            samples=samples,
            sampling=sampling,
            progress=lambda done, total: screen.phase("evaluating", what, done, total, policy.tokens_sampled - before),
        )
        metrics = held_out_metrics(played, k=k, temperature=sampling.temperature, some_decide=stops)
        return HeldOut(metrics, sample_rows(halves(played)[0] if stops else played))
