"""The session of the loops that train on what their own policy samples, GRPO and expert iteration."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tensordict import TensorDict

from rlpost.assemble import ExpertIterationParts, GRPOParts, SamplingParts
from rlpost.errors import ConfigError, RewardError
from rlpost.evaluation.play import held_out_metrics, play
from rlpost.model.lora import describe_adapter
from rlpost.model.precision import Numbers
from rlpost.objectives.policy_objective import PolicyObjective
from rlpost.runs.rollouts import write_rollouts
from rlpost.runs.writer import Run
from rlpost.settings import (
    ExpertIterationSettings,
    GateAlarm,
    GRPOSettings,
    SamplerCorrection,
    ScriptedSettings,
)
from rlpost.settings.evaluation import samples_per_prompt
from rlpost.text import counted
from rlpost.train.gate import Gate
from rlpost.train.metrics import batch_metrics
from rlpost.train.narration import (
    held_out_told,
    model_line,
    name_of_data,
    open_screen,
    reading_lines,
    say_before_and_after,
    say_best,
    say_evaluate,
    thinking_note,
)
from rlpost.train.session import Session

Settings = GRPOSettings | ExpertIterationSettings
S = TypeVar("S", GRPOSettings, ExpertIterationSettings)
P = TypeVar("P", GRPOParts, ExpertIterationParts)


class SamplingSession(Session[S, P]):
    """A training on the completions of its own policy."""

    waits_for = "loading the model, starting the policy"

    def load(self, assemble: Callable[[S, Path | None], P]) -> P:
        """See `Session.load`."""
        parts = super().load(assemble)
        self._opened.callback(self.screen.phase, "closing", "the policy")
        if not self.settings.samples_elsewhere:
            parts.policy.reload = self._reload
        self.gate = self._gate()
        return parts

    def _reload(self) -> None:
        """Bring the model's weights to an engine that has been started anew."""
        self.parts.collector.weight_updater.send_weights(self.parts.policy, self.parts.model)
        self.run.warn("the engine had failed and was started again with the present weights; log.txt says how")

    def steps(self) -> Iterator[int]:
        """See `Session.steps`."""
        for step in super().steps():
            self.parts.collector.begin_step()
            yield step

    def pushed(self) -> None:
        """Weights were pushed after the step's updates: look whether the sampler has them."""
        if self.gate is not None:
            self.screen.phase("checking", "the sampler")
            self.gate.pushed(self.step)

    def _gate(self) -> Gate | None:
        """What watches the sampler; None where it is off, or speaks from a script."""
        settings, parts = self.settings, self.parts
        scripted = isinstance(settings.policy, ScriptedSettings)
        if not settings.gate.enabled or scripted or self._is_done:
            return None
        self.screen.phase("checking", "the sampler")
        gate = Gate(settings.gate, parts.policy, self.ranks, parts.model, self._gate_alarm)
        gate.begin()
        return gate

    def _gate_alarm(self, action: GateAlarm, text: str) -> None:
        """Go on where sampler and trainer disagree, with a correction for it where that is wanted."""
        objective = self.parts.objective
        corrects = action is GateAlarm.correct and getattr(objective, "sampler_correction", None) == "none"
        if corrects:
            assert isinstance(objective, PolicyObjective)
            objective.sampler_correction = SamplerCorrection.tis_token.name
            self.ranks.begin(self.ranks.own, self.tokens_per_microbatch)  # the others are told it too
            text += "; going on with loss.sampler_correction=tis_token"
        self.screen.note(text)

    def collected(self, batch: TensorDict) -> None:
        """A step's completions are there: describe them, and let the policy rest while the model learns.

        Raises RewardError where more of their rewards failed than `max_failed_share` allows.
        """
        self.metrics |= batch_metrics(batch, self.settings.group_size, self.parts.policy.version)
        failed, count = self.metrics["reward/failed"], batch.batch_size[0]
        if failed > self.settings.max_failed_share * count:
            raise RewardError(
                f"step {self.step}: {failed:.0f} of {count} rewards failed, more than the share "
                f"max_failed_share={self.settings.max_failed_share:g} allows; the run's log.txt says how"
            )
        if failed:
            more = f" ({failed:.0f} of {count}; {self.run.folder}/log.txt has the error)"
            self.note_step("rewards failed, and their completions were left out", more)
        self.metrics |= self.parts.buffer.take_counts() | self.parts.collector.counts()
        self.clock.lap()
        self.parts.policy.rest()
        self.screen.phase("training")

    def trained(self) -> None:
        """The step's updates are done."""
        if getattr(self.settings.policy, "sleep", False):
            self.ranks.free_unused()
        self.clock.lap("time/train")

    def finish(self, batch: Any = None) -> None:
        """See `Session.finish`."""
        self.clock.lap("time/sync")
        self.metrics |= self.parts.collector.take_seconds()
        super().finish(batch)

    def announce(self, numbers: Numbers) -> None:
        """See `Session.announce`."""
        settings, parts, env = self.settings, self.parts, self.settings.env
        completions = settings.prompts_per_step * settings.group_size
        data = name_of_data(env)
        lines = [
            model_line(settings.model, parts.model_folder, parts.model),
            numbers.line,
            *settings.cluster.told_of_ranks(self.ranks.count),
            *reading_lines(parts.model, settings.group_size),
            f"data    {data}" + (f", {self._prompts()}" if hasattr(env, "path") else ""),
            f"policy  {parts.policy.name}, {parts.policy.sampling}",
            f"work    {counted(settings.steps, 'step')} of {counted(settings.prompts_per_step, 'prompt')} x "
            f"{settings.group_size} completions = {completions}, at most {env.max_completion_tokens} tokens each",
            *settings.tools.told(env),
            *settings.told_of_lag(),
            *([f"lora    {describe_adapter(parts.model)}"] if settings.lora.enabled else []),
            f"lr      {settings.optim.lr:g}, seed {settings.seed}",
        ]
        notes = [*parts.notes, thinking_note(env, parts.tokenizer)]
        if settings.eval.enabled:
            played, available = prompts_played(settings, parts), parts.eval_env.num_tasks
            divided, few = held_out_told(settings.eval, env, played, available)
            lines, notes = [*lines, *divided], [*notes, few]
        for part in parts.eval_env.parts if settings.eval.enabled else ():
            if shared := part.prompts_shared_with(parts.env):
                source = f" of {part.source_name}" if part.source_name else ""
                notes.append(
                    f"{shared} of {part.num_tasks} held-out prompts{source} are trained on too, so figures called "
                    "held-out are not: take them out of one of the two"
                )
        open_screen(self.run, numbers, lines, notes, f"{settings.model.path} · {data} · {parts.policy.name}")
        show_sampling(self.parts, self.screen.phase)

    def measure(self, when: str) -> dict[str, float]:
        """See `Session.measure`."""
        return evaluate_held_out(self.settings, self.parts, self.run, when)

    def state(self) -> dict[str, Any]:
        """Data cursor, what is under way, buffer and version, all of one moment."""
        parts = self.parts
        with parts.collector.pause():
            return {
                "buffer": parts.buffer.state_dict(),
                "collector": parts.collector.state_dict(),
                "policy_version": parts.policy.version,
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Session.restore`. Raises ConfigError where the run was collected in the other way."""
        began = "issued" in state["collector"]
        if began != self.settings.samples_elsewhere:
            asked = "collector=async or cluster=ray" if began else "collector=sync and cluster=none"
            raise ConfigError(f"--resume: the run began with {asked}; keep that")
        self.parts.buffer.load_state_dict(state["buffer"])
        self.parts.collector.load_state_dict(state["collector"])
        self.parts.collector.weight_updater.restore_version(state["policy_version"])

    def keep_batch(self, folder: Path, batch: Any) -> None:
        """See `Session.keep_batch`."""
        write_rollouts(folder / "rollouts.parquet", self.step, batch)

    def why_nothing(self) -> str:
        """See `Session.why_nothing`: of a step's completions."""
        settings, metrics, reward = self.settings, self.metrics, self.progress.same_reward
        look = f"read some with rlpost rollouts show {shlex.quote(str(self.run.folder))}"
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
        if isinstance(settings, ExpertIterationSettings):
            bar = "better than its prompt's median" if settings.min_reward is None else f"worth {settings.min_reward:g}"
            return f"no completion was {bar}; {look}"
        if metrics["groups/zero_std"] == 1:
            return "the completions of each prompt earn the same; raise group_size or sampling.temperature"
        return "no token is left to train on; see loss.clip_low, loss.clip_high, overlong.mask and max_policy_lag"

    def remaining(self) -> str:
        """See `Session.remaining`."""
        return "give more steps to go on"

    def conclude(self) -> None:
        """See `Session.conclude`."""
        say_before_and_after(self.run, self.progress)
        say_best(self.run, self.progress)
        say_evaluate(self.run, self.settings)

    def _prompts(self) -> str:
        held_out = f", {self.parts.eval_env.num_tasks} held out" if self.settings.eval.enabled else ""
        return f"{counted(self.parts.env.num_tasks, 'prompt')}{held_out}"


def show_sampling(parts: SamplingParts, phase: Callable[..., None]) -> None:
    """Let the screen's `phase` show what the collector does, and how far it is."""

    def sampled(ended: int, total: int, tokens: int) -> None:
        phase("sampling", f"{total} completions", ended, total, tokens)

    parts.collector.show(phase, sampled)


def prompts_played(settings: Settings, parts: SamplingParts) -> int:
    """How many held-out prompts an evaluation plays."""
    return min(settings.eval.limit or settings.env.eval_limit, parts.eval_env.num_tasks)


def evaluate_held_out(settings: Settings, parts: SamplingParts, run: Run, when: str) -> dict[str, float]:
    """The figures of held-out prompts; `when` tells a plain terminal which evaluation is under way.

    One completion a prompt is greedy; several, as `eval.k` asks for them, are drawn like those trained on.
    """
    num_prompts = prompts_played(settings, parts)
    samples = samples_per_prompt(settings.eval.k, settings.eval.samples)
    if not run.screen.is_live:
        run.screen.line(f"evaluating on {num_prompts} held-out prompts, {when} ...")
    before = parts.policy.tokens_sampled

    def progress(done: int, total: int) -> None:
        run.screen.phase("evaluating", "", done, total, parts.policy.tokens_sampled - before)

    sampling = replace(parts.policy.sampling, temperature=0.0) if samples == 1 else parts.policy.sampling
    played = play(
        parts.eval_env, parts.policy, num_prompts=num_prompts, samples=samples, sampling=sampling, progress=progress
    )
    some_decide = bool(settings.eval.stops)
    return held_out_metrics(played, k=settings.eval.k, temperature=sampling.temperature, some_decide=some_decide)
