"""The parts of a training that learns from completions of its own policy, and the metrics of a step's completions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from rlpost.collectors.sync import SyncCollector
from rlpost.data.conversation import CUT, PolicyVersionLabel
from rlpost.data.replay_buffer import GroupBuffer
from rlpost.envs.chat import DatasetChatEnv
from rlpost.errors import ConfigError, RewardError
from rlpost.objectives.advantage import equal_up_to_rounding
from rlpost.policies.base import Policy
from rlpost.record import Fact
from rlpost.screen import Screen
from rlpost.settings.commands import SampledSettings, samples_per_prompt
from rlpost.train.facts import Seen, facts_of, trained_on_too
from rlpost.train.parts import HeldOut, ObjectiveT, Parts
from rlpost.train.progress import Closing
from rlpost.train.ranks import Ranks
from rlpost.train.resolve import Change
from rlpost.train.step import Step

if TYPE_CHECKING:
    from rlpost.collectors.driver import GroupDriver

log = logging.getLogger("rlpost")


@dataclass(kw_only=True)
class SamplingParts(Parts[ObjectiveT]):
    """The parts of every loop that learns from its own policy's samples."""

    settings: SampledSettings
    policy: Policy  # type: ignore[assignment]  never None
    env: DatasetChatEnv
    collector: SyncCollector | GroupDriver  # type: ignore[assignment]  never None
    buffer: GroupBuffer

    def facts(self, changes: Sequence[Change], seen: Seen) -> list[Fact]:
        """The facts of this training; `seen` says what is known of it beside its parts."""
        settings, env, held_out = self.settings, self.settings.env, self.eval_env
        has_rows, measured = hasattr(env, "path"), settings.eval.enabled
        notes: list[str] = []
        for part in held_out.parts if measured else ():
            if shared := part.prompts_shared_with(self.env):
                where = f" of {part.source_name}" if part.source_name else ""
                notes.append(trained_on_too(shared, f"{part.num_tasks} held-out prompts{where}", "figures"))
        seen = replace(
            seen,
            policy=self.policy.name,
            rows=self.env.num_tasks if has_rows else None,
            held_out=held_out.num_tasks if measured else None,
            notes=[*seen.notes, *(note for part in self.env.parts for note in part.notes), *notes, *self.notes],
        )
        return facts_of(settings, changes, seen)

    @property
    def closing(self) -> Closing:
        """The notes at the end of the training, and whether talking to its model shows something."""
        return Closing(talks=not self.settings.env.scores)

    def measure(self, ranks: Ranks, screen: Screen, when: str) -> HeldOut:
        """The figures of held-out prompts; `when` names the evaluation on a plain terminal.

        One completion a prompt is greedy; several, as `eval.k` asks for them, are drawn like those trained on.
        """
        settings, sampling = self.settings.eval, self.policy.sampling
        samples = samples_per_prompt(settings.k, settings.samples)
        if not screen.is_live:
            screen.line(f"evaluating on {self.num_played} held-out prompts, {when} ...")
        if samples == 1:
            sampling = replace(sampling, temperature=0.0)
        return self.play_held_out(screen, sampling, samples=samples, k=settings.k)

    def state(self) -> dict[str, Any]:
        """The data cursor, the conversations in flight, the buffer and the version, at one moment."""
        with self.collector.pause():
            return {
                "buffer": self.buffer.state_dict(),
                "collector": self.collector.state_dict(),
                "policy_version": self.policy.version,
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises ConfigError where the run was collected in the other way."""
        began, goes_on = ("issued" in collected for collected in (state["collector"], self.collector.state_dict()))
        if began != goes_on:
            kept = "collector=async or cluster=ray" if began else "collector=sync and cluster=none"
            raise ConfigError(f"--resume: the run began with {kept}; keep that")
        self.buffer.load_state_dict(state["buffer"])
        self.collector.load_state_dict(state["collector"])
        self.collector.weight_updater.restore_version(state["policy_version"])


def look_at_completions(
    step: Step, policy: Policy, batch: TensorDictBase, max_failed_share: float, *, learns_from_rewards: bool = True
) -> None:
    """Describe a step's completions in its metrics, and let the policy rest while the model learns.

    Raises RewardError where more than `max_failed_share` of their rewards failed.
    """
    groups, count = batch["group_id"], batch.batch_size[0]
    step.metrics |= batch_metrics(batch, int((groups == groups[0]).sum()), policy.version)
    if not learns_from_rewards:
        del step.metrics["groups/zero_std"]  # which measures how much there is to learn from rewards
    failed = step.metrics["reward/failed"]
    if failed > max_failed_share * count:
        raise RewardError(
            f"step {step.number}: {failed:.0f} of {count} rewards failed, more than the share "
            f"max_failed_share={max_failed_share:g} allows; the run's log.txt says how"
        )
    if failed and learns_from_rewards:
        more = f" ({failed:.0f} of {count}; the run's log.txt has the error)"
        step.note("rewards failed, and their completions were left out", more)
    step.clock.lap()
    if step.is_short_of_memory or step.ranks.own.model.device.type != "cpu":
        policy.rest()
    step.phase("training")


def batch_metrics(batch: TensorDictBase, group_size: int, version: PolicyVersionLabel | None) -> dict[str, float]:
    """Metrics of a step's batch: B rows in whole groups. `version` is the policy's when they are trained on."""
    reward = batch["next", "reward"].squeeze(-1)
    valid = batch["valid"]
    groups = zip(reward.split(group_size), valid.split(group_size), strict=True)
    no_spread = [equal_up_to_rounding(rewards[own]) for rewards, own in groups]
    lengths = torch.tensor([float(mask.sum()) for mask in batch["masks", "all_assistant_mask"].unbind()])
    metrics = {
        "reward/mean": reward[valid].mean().item(),
        "reward/std": reward[valid].std().item(),
        "reward/failed": float((~valid).sum()),
        "groups/zero_std": sum(no_spread) / len(no_spread),
        "completion/tokens_mean": lengths.mean().item(),
        "completion/truncated": sum(r in CUT for r in batch["finish_reason"]) / len(lengths),
        "tokens/generated": lengths.sum().item(),
    }
    if not reward.isfinite().any() and valid.all():  # nothing gives a reward
        del metrics["reward/mean"], metrics["reward/std"]
    if int(batch["turns"].max()) > 1:
        ran_out = batch["next", "truncated"].squeeze(-1).tolist()
        metrics |= {
            "turns/mean": batch["turns"].float().mean().item(),
            "turns/ran_out": sum(t and r not in CUT for t, r in zip(ran_out, batch["finish_reason"], strict=True))
            / len(lengths),
            "tools/calls_mean": batch["tools", "calls"].float().mean().item(),
            "tools/errors_mean": batch["tools", "errors"].float().mean().item(),
        }
    for name, values in batch["next", "reward_parts"].items():
        metrics[f"reward/{name}"] = values.nanmean().item()
    for name in ("strict", "lenient"):
        metrics[f"accuracy/{name}"] = batch["next", f"accuracy_{name}"].nanmean().item()
    metrics |= _by_source(batch, group_size)
    if isinstance(version, int):
        lag = version - batch["policy_version"].float()
        metrics |= {
            "policy/version": float(version),
            "policy/lag_mean": lag.mean().item(),
            "policy/lag_max": lag.max().item(),
        }
    return metrics


def _by_source(batch: TensorDictBase, group_size: int) -> dict[str, float]:
    """The metrics for each source of a mix of environments, under `source/NAME/`; empty without a mix.

    Counts of all sources add up to the step's. So do means, each weighted by its source's completions.
    """
    sources = list(batch["source"])
    metrics: dict[str, float] = {}
    for name in sorted({source for source in sources if source}):
        rows = torch.tensor([source == name for source in sources])
        reward, valid = batch["next", "reward"].squeeze(-1)[rows], batch["valid"][rows]
        sampled = batch["masks", "all_assistant_mask"].unbind()
        lengths = [int(mask.sum()) for mask, source in zip(sampled, sources, strict=True) if source == name]
        groups = zip(reward.split(group_size), valid.split(group_size), strict=True)
        no_spread = [equal_up_to_rounding(rewards[own]) for rewards, own in groups]
        own = {
            "completions": float(len(reward)),
            "reward": reward[valid].mean().item(),
            "failed": float((~valid).sum()),
            "zero_std": sum(no_spread) / len(no_spread),
            "tokens_mean": sum(lengths) / len(lengths),
        }
        for kind in ("strict", "lenient"):
            own[f"accuracy_{kind}"] = batch["next", f"accuracy_{kind}"].squeeze(-1)[rows].nanmean().item()
        metrics |= {f"source/{name}/{key}": value for key, value in own.items()}
    return metrics
