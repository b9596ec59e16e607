"""Rules that settings add to a step of GRPO: each acts before the step's updates, after them, or both.

Rules act in the order of `rules_of`. To add one: a class here or in a plugin's loop, and its line there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tensordict import TensorDict

from rlpost.envs.difficulty import WeighedRows
from rlpost.model.packing import Row
from rlpost.objectives.advantage import mask_overlong
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.settings import PolicyLossSettings
from rlpost.train.assemble import GRPOParts
from rlpost.train.progress import Progress
from rlpost.train.step import Step


class Rule:
    """Does nothing; a rule overrides one of the two methods, or both."""

    def before_updates(self, step: Step, batch: TensorDict, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows to train on: `rows`, which are those of `batch`, or others in their places."""
        return rows

    def after_updates(self, step: Step) -> None:
        """Called once the step's updates and their metrics are there, before the weights are pushed."""


def rules_of(
    loss: PolicyLossSettings, masks_overlong: bool, parts: GRPOParts, progress: Progress, longest: int
) -> list[Rule]:
    """The rules of a GRPO training with `parts`, whose turns have at most `longest` tokens."""
    rules = list[Rule]()
    if parts.env.weighed is not None:
        rules.append(CountDifficulty(parts.env.weighed))
    if loss.right_nll_coef:
        rules.append(NoteNothingIsRight())
    if loss.entropy_target is not None:
        rules.append(AdaptEntropyBonus(parts.objective, progress, loss.entropy_coef))
    if masks_overlong:
        rules.append(MaskOverlong(longest, parts.policy.max_model_len))
    if loss.ref_sync_every:
        rules.append(MoveReference(loss.ref_sync_every, loss.ref_sync_share))
    return rules


@dataclass
class CountDifficulty(Rule):
    """difficulty.enabled: the shares of the drawn prompts by difficulty."""

    weighed: WeighedRows

    def before_updates(self, step: Step, batch: TensorDict, rows: Sequence[Row]) -> Sequence[Row]:
        """See `Rule`."""
        step.metrics |= self.weighed.take_shares()
        return rows


class NoteNothingIsRight(Rule):
    """loss.right_nll_coef: note a step in which the environment measures no accuracy."""

    def before_updates(self, step: Step, batch: TensorDict, rows: Sequence[Row]) -> Sequence[Row]:
        """See `Rule`."""
        if batch["next", "accuracy_lenient"].isnan().all():
            step.note("no completion has an accuracy, so loss.right_nll_coef adds nothing")
        return rows


@dataclass
class AdaptEntropyBonus(Rule):
    """loss.entropy_target: set the coefficient of the entropy bonus by the entropy of the step before."""

    objective: PolicyObjective
    progress: Progress  # keeps the entropy and the coefficient for a resumed run
    first: float  # the coefficient of the first step

    def before_updates(self, step: Step, batch: TensorDict, rows: Sequence[Row]) -> Sequence[Row]:
        """See `Rule`."""
        so_far = self.first if self.progress.entropy_coef is None else self.progress.entropy_coef
        self.progress.entropy_coef = self.objective.adapt_entropy_coef(so_far, self.progress.entropy)
        step.metrics["entropy_coef"] = self.objective.entropy_coef
        step.ranks.share_objective()
        return rows

    def after_updates(self, step: Step) -> None:
        """See `Rule`."""
        if not math.isnan(entropy := step.metrics["entropy"]):
            self.progress.entropy = entropy


@dataclass
class MaskOverlong(Rule):
    """overlong.mask: leave truncated completions out of the loss."""

    limit: int  # tokens of a completion
    context: int | None  # tokens of a conversation

    def before_updates(self, step: Step, batch: TensorDict, rows: Sequence[Row]) -> Sequence[Row]:
        """See `Rule`; notes a step in which nothing is left to train on."""
        trained = mask_overlong(batch, rows)
        masked = [row for row, left in zip(rows, trained, strict=True) if left is not row and row.valid]
        step.metrics["completion/masked_overlong"] = float(len(masked))
        if masked and len(masked) == sum(row.valid for row in rows):
            at_limit = sum(row.last_turn >= self.limit for row in masked)
            where, advice = f"at env.max_completion_tokens={self.limit}", "raise the limit"
            if at_limit < len(masked):
                room = f"{len(masked) - at_limit} where the context of {self.context} tokens ran out"
                where = f"{room} and {at_limit} {where}"
                advice = "lower env.max_turns or env.max_completion_tokens, or take a model with a longer context"
            step.note(
                "nothing was trained on: all completions were truncated, and overlong.mask=true leaves those out",
                f" ({where}; {advice})",
            )
        return trained


@dataclass
class MoveReference(Rule):
    """loss.ref_sync_every: move the reference towards the model every so often (TR-DPO, arXiv:2404.09656)."""

    every: int  # steps
    share: float  # of the model in the moved reference

    def after_updates(self, step: Step) -> None:
        """See `Rule`."""
        if step.number % self.every == 0:
            step.ranks.move_reference(self.share)
