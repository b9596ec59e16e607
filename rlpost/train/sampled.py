"""The session of the loops that train on what their own policy samples, GRPO and expert iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tensordict import TensorDict

from rlpost.assemble import ExpertIterationParts, GRPOParts, SamplingParts
from rlpost.errors import RewardError
from rlpost.evaluation.play import EvalResult, evaluate
from rlpost.model.precision import Numbers
from rlpost.runs.rollouts import write_rollouts
from rlpost.runs.writer import Run
from rlpost.settings import ExpertIterationSettings, GRPOSettings, SamplingSettings
from rlpost.settings.evaluation import samples_per_prompt
from rlpost.train.metrics import batch_metrics
from rlpost.train.narration import announce, conclude
from rlpost.train.progress import LearningSoFar
from rlpost.train.session import Session
from rlpost.train.state import collection_state, restore_collection

Settings = GRPOSettings | ExpertIterationSettings
S = TypeVar("S", GRPOSettings, ExpertIterationSettings)
P = TypeVar("P", GRPOParts, ExpertIterationParts)


class SamplingSession(Session[S, P]):
    """A training on the completions of its own policy."""

    waits_for = "loading the model, starting the policy"
    after: EvalResult | None = None  # of the latest evaluation after a step

    def load(self, assemble: Callable[[S, Path | None], P]) -> P:
        """See `Session.load`."""
        parts = super().load(assemble)
        self._opened.callback(self.screen.phase, "closing", "the policy")
        return parts

    def collected(self, batch: TensorDict) -> None:
        """A step's completions are there: describe them, and let the policy rest while the model learns.

        Raises RewardError where more of their rewards failed than `max_failed_share` allows.
        """
        self.metrics |= batch_metrics(batch, self.settings.group_size, self.parts.policy.version)
        check_failed(self.settings, self.step, self.metrics)
        self.metrics |= self.parts.buffer.take_counts()
        self.clock.lap()
        self.parts.policy.rest()
        self.screen.phase("training")

    def trained(self) -> None:
        """The step's updates are done."""
        self.clock.lap("time/train")

    def finish(self, batch: Any = None) -> None:
        """See `Session.finish`."""
        self.clock.lap("time/sync")
        self.metrics |= self.parts.collector.player.take_seconds()
        super().finish(batch)

    def announce(self, numbers: Numbers) -> None:
        """See `Session.announce`."""
        announce(self.settings, self.parts, numbers, self.run)
        show_sampling(self.parts, self.screen.phase)

    def measure(self, when: str) -> dict[str, float]:
        """See `Session.measure`."""
        result = evaluate_held_out(self.settings, self.parts, self.run, when)
        self.after = result if self.progress.step else None
        return result.metrics()

    def state(self) -> dict[str, Any]:
        """See `Session.state`."""
        return collection_state(self.parts)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Session.restore`."""
        restore_collection(self.parts, state)

    def keep_batch(self, folder: Path, batch: Any) -> None:
        """See `Session.keep_batch`."""
        write_rollouts(folder / "rollouts.parquet", self.step, batch)

    def why_nothing(self) -> str:
        """See `Session.why_nothing`."""
        return why_sampled(self.settings, self.run, self.progress, self.metrics)

    def remaining(self) -> str:
        """See `Session.remaining`."""
        return "give more steps to go on"

    def conclude(self) -> None:
        """See `Session.conclude`."""
        conclude(self.run, self.progress, self.after)


def show_sampling(parts: SamplingParts, phase: Callable[..., None]) -> None:
    """Let the screen's `phase` show what the collector does, and how far it is."""

    def sampled(ended: int, total: int, tokens: int) -> None:
        phase("sampling", f"{total} completions", ended, total, tokens)

    parts.collector.player.on_phase = phase
    parts.collector.player.on_sampled = sampled


def check_failed(settings: Settings, step: int, metrics: Mapping[str, float]) -> None:
    """Raise RewardError where more rewards of a step failed than `max_failed_share` allows."""
    count = settings.prompts_per_step * settings.group_size
    failed = metrics["reward/failed"]
    if failed > settings.max_failed_share * count:
        raise RewardError(
            f"step {step}: {failed:.0f} of {count} rewards failed, more than the share "
            f"max_failed_share={settings.max_failed_share:g} allows; the run's log.txt says how"
        )


def evaluate_held_out(settings: Settings, parts: SamplingParts, run: Run, when: str) -> EvalResult:
    """Accuracy on held-out prompts; `when` tells a plain terminal which evaluation is under way.

    One completion a prompt is greedy; several, as `eval.k` asks for them, are drawn like those trained on.
    """
    num_prompts = min(settings.eval.limit or settings.env.eval_limit, parts.eval_env.num_tasks)
    samples = samples_per_prompt(settings.eval.k, settings.eval.samples)
    if not run.screen.is_live:
        run.screen.line(f"evaluating on {num_prompts} held-out prompts, {when} ...")
    before = parts.policy.tokens_sampled

    def progress(done: int, total: int) -> None:
        run.screen.phase("evaluating", "", done, total, parts.policy.tokens_sampled - before)

    return evaluate(
        parts.eval_env,
        parts.policy,
        num_prompts=num_prompts,
        sampling=SamplingSettings(temperature=0.0) if samples == 1 else settings.sampling,
        k=settings.eval.k,
        samples=samples,
        progress=progress,
    )


def why_sampled(
    settings: GRPOSettings | ExpertIterationSettings, run: Run, learning: LearningSoFar, metrics: Mapping[str, float]
) -> str:
    """The likely reason why nothing is learned from a step's completions, and what to do."""
    reward, look = learning.same_reward, f"read some with rlpost rollouts show {run.folder}"
    if metrics["completion/truncated"] == 1:
        limit = settings.env.max_completion_tokens
        return f"every completion is cut at env.max_completion_tokens={limit}; raise it"
    if reward is not None and metrics.get("accuracy/lenient") == 1:
        return "every completion is right; the task is too easy for this model"
    if reward == 0:
        return f"every reward is 0: the task is too hard, or the reward does not find the answer in the reply; {look}"
    if reward is not None:
        return f"every reward is {reward:g}, which tells no completion from another; {look}"
    if isinstance(settings, ExpertIterationSettings):
        bar = "better than its prompt's median" if settings.min_reward is None else f"worth {settings.min_reward:g}"
        return f"no completion was {bar}; {look}"
    if metrics["groups/zero_std"] == 1:
        return "the completions of each prompt earn the same; raise group_size or sampling.temperature"
    return "no token is left to train on; see loss.clip_low, loss.clip_high, overlong.mask and max_policy_lag"
