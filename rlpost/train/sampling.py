"""The parts of a training that learns from completions of its own policy: metrics, narration, rollouts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from transformers import PreTrainedModel

from rlpost.collectors.sync import SyncCollector
from rlpost.data.conversation import CUT, PolicyVersionLabel
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.envs.chat import DatasetChatEnv
from rlpost.errors import ConfigError, RewardError
from rlpost.evaluation.play import held_out_metrics, play
from rlpost.evaluation.saved import sample_rows
from rlpost.model.lora import describe_adapter
from rlpost.model.packing import Reference
from rlpost.model.precision import Precision
from rlpost.model.weights import device_of
from rlpost.objectives.advantage import equal_up_to_rounding
from rlpost.policies.base import Policy
from rlpost.runs.rollouts import write_rollouts
from rlpost.settings import Autocast, DType, GateAlarm, SamplerCorrection
from rlpost.settings.commands import samples_per_prompt
from rlpost.text import counted
from rlpost.train import narration
from rlpost.train.gate import Gate
from rlpost.train.update import Objective

if TYPE_CHECKING:
    from rlpost.collectors.driver import GroupDriver
    from rlpost.train.session import Session

O = TypeVar("O", bound=Objective[Any])  # noqa: E741


@dataclass
class SamplingParts(Generic[O]):
    """The parts of every loop that learns from its own policy's samples."""

    objective: O
    model_folder: Path
    tokenizer: Any
    model: PreTrainedModel
    reference: Reference | None  # None where the loss compares with none
    policy: Policy
    env: DatasetChatEnv
    eval_env: DatasetChatEnv
    collector: SyncCollector | GroupDriver
    buffer: ReplayBuffer
    optimizer: torch.optim.Optimizer
    notes: list[str]  # what a user should know of the data before training begins
    data: dict[str, str]  # the rows of each split: see `DatasetChatEnv.content`
    gate: Gate | None = None  # what watches the sampler; None where it is off, or speaks from a script
    _version: PolicyVersionLabel | None = None  # of the policy, as the step began
    _restarts: int = 0  # of the policy's engine, as far as they were reported

    @property
    def device(self) -> torch.device:
        """The device on which the model is trained."""
        return device_of(self.model)

    def start(self) -> None:
        """Start the policy."""
        self.policy.start()

    def close(self) -> None:
        """Stop the policy, and close the environments with their tools."""
        self.policy.close()
        self.env.close()
        self.eval_env.close()

    def total_steps(self, session: Session[Any, Any]) -> int:
        """Steps of the whole run, those done included."""
        return session.run.total_steps

    def announce(self, session: Session[Any, Any], numbers: Precision) -> None:
        """Print the plan, and let the screen show the collector's progress."""
        settings, env = session.settings, session.settings.env
        completions = settings.prompts_per_step * settings.group_size
        data, prompts = narration.name_of_data(env), counted(self.env.num_tasks, "prompt")
        held_out = f", {self.eval_env.num_tasks} held out" if settings.eval.enabled else ""
        lines = [
            narration.model_line(settings.model, self.model_folder, self.model),
            numbers.line,
            *settings.cluster.rank_lines(session.ranks.count),
            *narration.reading_lines(self.model, settings.group_size),
            f"data    {data}" + (f", {prompts}{held_out}" if hasattr(env, "path") else ""),
            f"policy  {self.policy.name}, {self.policy.sampling}",
            f"work    {counted(settings.steps, 'step')} of {counted(settings.prompts_per_step, 'prompt')} x "
            f"{settings.group_size} completions = {completions}, at most {env.max_completion_tokens} tokens each",
            *settings.tools.lines(env),
            *settings.lag_lines(),
            *settings.learning_lines(),
            *([f"lora    {describe_adapter(self.model)}"] if settings.lora.enabled else []),
            f"lr      {settings.optim.rate:g}, seed {settings.seed}",
        ]
        notes = [*self.notes, narration.thinking_note(env, self.tokenizer)]
        if settings.eval.enabled:
            played, available = self._prompts_played(settings), self.eval_env.num_tasks
            divided, few = narration.held_out_told(settings.eval, env, played, available)
            lines, notes = [*lines, *divided], [*notes, few]
        for part in self.eval_env.parts if settings.eval.enabled else ():
            if shared := part.prompts_shared_with(self.env):
                source = f" of {part.source_name}" if part.source_name else ""
                notes.append(
                    f"{shared} of {part.num_tasks} held-out prompts{source} are trained on too, so figures called "
                    "held-out are not: take them out of one of the two"
                )
        about = f"{settings.model.path} · {data} · {self.policy.name}"
        narration.open_screen(session.run, numbers, lines, notes, about)

        def sampled(ended: int, total: int, tokens: int) -> None:
            session.screen.phase("sampling", f"{total} completions", ended, total, tokens)

        self.collector.show(session.screen.phase, sampled)

    def loaded(self, session: Session[Any, Any]) -> None:
        """Before the first step: an engine that fails gets the weights anew, and the gate looks at the sampler."""
        settings = session.settings

        def reload() -> None:  # of an engine that was restarted, or that dropped its weights to sleep
            self.collector.weight_updater.send_weights(self.policy, self.model)
            if self.policy.restarts > self._restarts:
                self._restarts = self.policy.restarts
                session.run.warn(
                    "the engine had failed and was started again with the present weights; log.txt says how"
                )

        def alarm(action: GateAlarm, text: str) -> None:  # goes on, with a correction where that is wanted
            corrects = getattr(self.objective, "sampler_correction", "") != "none"
            if action is GateAlarm.correct and not corrects and not getattr(self.objective, "ratio_to_sampler", False):
                self.objective.sampler_correction = SamplerCorrection.tis_token.name  # type: ignore[attr-defined]
                session.ranks.share_objective()  # the other ranks correct too
                text += "; going on with loss.sampler_correction=tis_token"
            session.screen.note(text)

        if not settings.samples_elsewhere:
            self.policy.reload = reload
        if settings.gate.enabled and settings.policy.is_model and not session.is_done:
            session.screen.phase("checking", "the sampler")
            formats = (settings.model.dtype, settings.model.autocast, getattr(settings.policy, "dtype", DType.float32))
            exact = formats == (DType.float32, Autocast.none, DType.float32)
            self.gate = Gate(settings.gate, self.policy, session.ranks, self.model, alarm, exact=exact)
            self.gate.begin()

    def begin_step(self) -> None:
        """A step begins."""
        self._version = self.policy.version
        self.collector.begin_step()

    def collected(self, session: Session[Any, Any], batch: TensorDict) -> None:
        """Describe a step's completions, and let the policy rest while the model learns.

        Raises RewardError where more of their rewards failed than `max_failed_share` allows.
        """
        settings = session.settings
        session.metrics |= batch_metrics(batch, settings.group_size, self.policy.version)
        if not settings.learns_from_rewards:
            del session.metrics["groups/zero_std"]  # which tells how much there is to learn from rewards
        failed, count = session.metrics["reward/failed"], batch.batch_size[0]
        if failed > settings.max_failed_share * count:
            raise RewardError(
                f"step {session.step}: {failed:.0f} of {count} rewards failed, more than the share "
                f"max_failed_share={settings.max_failed_share:g} allows; the run's log.txt says how"
            )
        if failed and settings.learns_from_rewards:
            more = f" ({failed:.0f} of {count}; {session.run.folder}/log.txt has the error)"
            session.note_step("rewards failed, and their completions were left out", more)
        session.metrics |= self.buffer.take_counts() | self.collector.counts()
        session.metrics |= self.env.weighed.take_shares() if self.env.weighed else {}
        session.clock.lap()
        if not session.has_to_spare or self.device.type != "cpu":
            self.policy.rest()

    def end_step(self, session: Session[Any, Any], *, changed: bool) -> None:
        """Look whether the sampler has the weights of a step that has `changed` them. Raises RuntimeError if not."""
        if changed:
            if self.policy.version == self._version:
                raise RuntimeError(
                    f"step {session.step}: the weights have changed and were not pushed: "
                    "call parts.collector.update_policy_weights_(parts.model) before session.finish"
                )
            if self.gate is not None:
                session.screen.phase("checking", "the sampler")
                self.gate.pushed(session.step)
        session.clock.lap("time/sync")
        session.metrics |= self.collector.take_seconds()

    def measure(self, session: Session[Any, Any], when: str) -> dict[str, float]:
        """The figures of held-out prompts; `when` names the evaluation on a plain terminal.

        One completion a prompt is greedy; several, as `eval.k` asks for them, are drawn like those trained on.
        """
        asked, screen, policy = session.settings.eval, session.screen, self.policy
        num_prompts, samples = self._prompts_played(session.settings), samples_per_prompt(asked.k, asked.samples)
        if not screen.is_live:
            screen.line(f"evaluating on {num_prompts} held-out prompts, {when} ...")
        before = policy.tokens_sampled
        sampling = replace(policy.sampling, temperature=0.0) if samples == 1 else policy.sampling
        played = play(
            self.eval_env,
            policy,
            num_prompts=num_prompts,
            samples=samples,
            sampling=sampling,
            progress=lambda done, total: screen.phase("evaluating", "", done, total, policy.tokens_sampled - before),
        )
        session.keep_held_out(sample_rows(session.reported(played)))
        return held_out_metrics(played, k=asked.k, temperature=sampling.temperature, some_decide=bool(asked.stops))

    def state(self, session: Session[Any, Any] | None = None) -> dict[str, Any]:
        """The data cursor, the conversations in flight, the buffer and the version, at one moment."""
        with self.collector.pause():
            return {
                "buffer": self.buffer.state_dict(),
                "collector": self.collector.state_dict(),
                "policy_version": self.policy.version,
            }

    def restore(self, session: Session[Any, Any], state: Mapping[str, Any]) -> None:
        """Take up what `state` gave. Raises ConfigError where the run was collected in the other way."""
        began = "issued" in state["collector"]
        if began != session.settings.samples_elsewhere:
            asked = "collector=async or cluster=ray" if began else "collector=sync and cluster=none"
            raise ConfigError(f"--resume: the run began with {asked}; keep that")
        self.buffer.load_state_dict(state["buffer"])
        self.collector.load_state_dict(state["collector"])
        self.collector.weight_updater.restore_version(state["policy_version"])

    def keep_batch(self, folder: Path, step: int, batch: Any) -> None:
        """Write the rows that a step was about to train on into `folder`."""
        write_rollouts(folder / "rollouts.parquet", step, batch)

    def why_nothing(self, session: Session[Any, Any]) -> str:
        """The likely reason where nothing is learned from a step's completions, and what to do."""
        settings, metrics, reward = session.settings, session.metrics, session.progress.same_reward
        look = f"read some with rlpost rollouts show {shlex.quote(str(session.run.folder))}"
        if not settings.learns_from_rewards:
            return settings.why_nothing_learned(metrics, look)
        if metrics["completion/truncated"] == 1:
            limit = settings.env.max_completion_tokens
            return f"every completion is cut at env.max_completion_tokens={limit}; raise it"
        if reward is not None and metrics.get("accuracy/lenient") == 1:
            return "every completion is right; the task is too easy for this model"
        if reward == 0:
            return (
                f"every reward is 0: the task is too hard, or the reward does not find the answer in the reply; {look}"
            )
        if reward is not None:
            return f"every reward is {reward:g}, which tells no completion from another; {look}"
        return settings.why_nothing_learned(metrics, look)

    def conclude(self, session: Session[Any, Any]) -> None:
        """The commands to type next, for a run that was not stopped."""
        narration.say_best(session.run, session.progress)
        narration.say_evaluate(session.run)
        if not session.settings.env.scores:
            narration.say_talk(session.run)

    def _prompts_played(self, settings: Any) -> int:
        return min(settings.eval.limit or settings.env.eval_limit, self.eval_env.num_tasks)


def batch_metrics(batch: TensorDictBase, group_size: int, version: PolicyVersionLabel | None) -> dict[str, float]:
    """Metrics of a step's batch: B rows in whole groups. `version` is the policy's when they are trained on."""
    reward = batch["next", "reward"].squeeze(-1)
    valid = batch["valid"]
    groups = zip(reward.split(group_size), valid.split(group_size), strict=True)
    no_spread = [equal_up_to_rounding(rewards[counts]) for rewards, counts in groups]
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
        no_spread = [equal_up_to_rounding(rewards[counts]) for rewards, counts in groups]
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
