"""The examination of a training: every check in its order, from cheap ones to one step of it on a few rows.

Each finding is a line, with what to do about it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from math import ceil, inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

import torch
from tensordict import TensorDict

from rlpost.data.chat import ChatMask
from rlpost.data.conversation import CUT
from rlpost.data.demonstrations import Demonstration, Encoded, Sample
from rlpost.data.encoding import Encoder, RowEncoder, counted_in
from rlpost.data.rows import BadRows, Fault
from rlpost.envs.build import build_env, build_training_env, shown_of
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.checks import check_rewards, check_template, look_at_lengths
from rlpost.envs.dataset import DatasetEnv
from rlpost.envs.proof import cases_of, played, prove
from rlpost.errors import DataError, RlpostError
from rlpost.estimate.needs import needs_of
from rlpost.estimate.shape import shape_of_folder
from rlpost.model.load import context_length
from rlpost.model.logprobs import verdict_of
from rlpost.model.memory import MemoryWatch
from rlpost.model.optim import learning_rate
from rlpost.model.packing import Row, rows_of
from rlpost.model.precision import autocast
from rlpost.model.trainable import starting_tokenizer
from rlpost.remote.exchange import MORE_SHARED
from rlpost.rewards.attacks import NEED_GOLD, Attack, Verdict, attack_reward, failing_alike
from rlpost.rewards.builtin import BUILT_IN
from rlpost.rewards.functions import WorkerReward
from rlpost.settings import (
    Autocast,
    DistillSettings,
    DPOSettings,
    FineTuningSettings,
    GRPOSettings,
    NoClusterSettings,
    SFTSettings,
    SyncCollectorSettings,
)
from rlpost.settings.commands import SampledSettings
from rlpost.text import counted, first_line
from rlpost.train.assemble import assemble_grpo
from rlpost.train.distill import assemble as assemble_distill
from rlpost.train.dpo import PAIRS
from rlpost.train.dpo import assemble as assemble_dpo
from rlpost.train.grpo import fill_advantages, fill_log_probs, updates_per_step
from rlpost.train.ranks import Rank, Ranks
from rlpost.train.resolve import resolve_precision, size_and_room
from rlpost.train.rows import Kind, RowParts
from rlpost.train.sampling import SamplingParts, batch_metrics
from rlpost.train.sft import SAMPLES
from rlpost.train.sft import assemble as assemble_sft
from rlpost.train.step import Step
from rlpost.train.update import Microbatches

Sampled = GRPOSettings | DistillSettings
SampledParts = SamplingParts[Any]


class OnRows(NamedTuple):
    """A training on rows: what its rows are, and what assembles it."""

    kind: Kind[Any]
    assemble: Callable[[Any], RowParts[Any, Any]]


OF_ROWS = {SFTSettings: OnRows(SAMPLES, assemble_sft), DPOSettings: OnRows(PAIRS, assemble_dpo)}
Wait = Callable[[str], None]  # called with the current work
ROWS = 8  # most rows that are tried


def examine(settings: Sampled | FineTuningSettings, folder: Path, findings: Findings, wait: Wait) -> None:
    """Check everything that a training with `settings` in the run folder `folder` would do; nothing is kept."""
    wait("reading rows and tokenizer")
    if isinstance(settings, FineTuningSettings):
        good = _examine_rows(findings, settings)
    else:
        good = _examine_sampled(findings, settings)
    if not good:
        return
    with findings.looking("memory"):
        _look_at_room(findings, settings, folder)
    if findings.failed:  # a step would fail for the same reason
        return
    wait("a step on a few rows")
    with findings.looking("a step"):
        resolved, numbers = resolve_precision(settings)
        findings.ok("precision", numbers.line.removeprefix("precision").strip())
        if isinstance(resolved, FineTuningSettings):
            _practise_on_rows(findings, resolved)
        else:
            _practise_sampled(findings, resolved)


class Findings:
    """All findings of an examination; each goes to `tell` as soon as it is found."""

    def __init__(self, tell: Callable[[Finding], None] = lambda finding: None) -> None:
        self.all: list[Finding] = []
        self._tell = tell

    def ok(self, about: str, text: str) -> None:
        """Add something that is as it should be."""
        self._add(Finding(Level.ok, about, text))

    def warn(self, about: str, text: str, fix: str) -> None:
        """Add something that may be intended, or may not matter."""
        self._add(Finding(Level.warning, about, text, fix))

    def fail(self, about: str, text: str, fix: str = "") -> None:
        """Add something with which training cannot work."""
        self._add(Finding(Level.error, about, text, fix))

    @property
    def failed(self) -> bool:
        """Whether there is an error among them."""
        return any(finding.level is Level.error for finding in self.all)

    @contextlib.contextmanager
    def looking(self, about: str) -> Iterator[None]:
        """Run a block of checks; an error becomes its last finding, and the next block begins."""
        try:
            yield
        except RlpostError as error:
            first, *more = str(error).splitlines()
            self.fail(about, first + (f"; such as {more[0].strip()}" if more else ""))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  a model's or a reward's own code raised it: a finding, too
            self.fail(about, f"{type(error).__name__}: {first_line(error)}")

    def _add(self, finding: Finding) -> None:
        self.all.append(finding)
        self._tell(finding)


@dataclass(frozen=True)
class Finding:
    """One finding: what it is `about`, its text, and the `fix`, empty if none is needed."""

    level: Level
    about: str
    text: str
    fix: str = ""


class Level(Enum):
    """ok: all is well; warning: look at this first; error: the training cannot work, or would learn something wrong."""

    ok = "ok"
    warning = "warning"
    error = "error"


def _examine_sampled(findings: Findings, settings: Sampled) -> bool:
    """Check rows, rewards and template; whether a model can be loaded for them."""
    _look_at_rate(findings, settings, settings.steps * updates_per_step(settings))
    with contextlib.ExitStack() as opened:
        env = build_training_env(settings)
        opened.callback(env.close)
        with findings.looking("rows"):
            check_rewards(env)
            env.start()
            _look_at_rows(findings, env, settings)
            if settings.eval.enabled:
                held_out = build_env(
                    settings.env.held_out_for(settings.eval.limit),
                    num_prompts=1,
                    group_size=1,
                    seed=0,
                    tools=settings.tools,
                )
                opened.callback(held_out.close)
                _look_at_held_out(findings, env, held_out)
        if findings.failed:
            return False
        with findings.looking("rewards"):
            if _attack_rewards(findings, env):
                _look_at_gold(findings, env)
        return _look_at_writing(findings, settings, env, _answered(env))


def _examine_rows(findings: Findings, settings: FineTuningSettings) -> bool:
    """Check rows and template; whether a model can be loaded for them."""
    with contextlib.closing(build_env(settings.env, num_prompts=1, group_size=1, seed=settings.seed)) as env:
        shown: list[Any] = []
        with findings.looking("rows"):
            rows = shown_of(env, settings)
            _tell_not_used(findings, rows.not_used if rows else "")
            shown = list(islice(env.demonstrations() if rows is None else rows.in_turn(), ROWS))
            size = env.num_tasks if rows is None else len(rows)
            count = settings.steps or ceil((settings.epochs or 1) * size / settings.minibatch_size)
            _look_at_rate(findings, settings, max(1, count))
        if not shown:
            if not findings.failed:
                findings.fail("rows", "there are no rows to train on", "give some")
            return False
        encoder = OF_ROWS[type(settings)].kind.encoder
        return _look_at_writing(
            findings, settings, env, shown, lambda tokenizer: encoder(tokenizer, settings.max_tokens)
        )


def _look_at_writing(
    findings: Findings,
    settings: Any,
    env: DatasetChatEnv,
    shown: list[Any],
    encoder: Callable[[Any], RowEncoder[Any]] = Encoder,
) -> bool:
    before = findings.failed
    with findings.looking("model"):
        tokenizer, folder = starting_tokenizer(settings, None)
        shape = shape_of_folder(folder)
        with findings.looking("template"):
            _look_at_template(findings, tokenizer, shape.vocab if shape else None)
            if settings.learns_from_own:
                check_template(env, tokenizer)
        with findings.looking("lengths"):
            if settings.learns_from_own:
                context = context_length(folder)
                if note := look_at_lengths(env, settings.env, tokenizer, context):
                    findings.warn("lengths", note, "ignore this if it is intended")
                else:
                    findings.ok("lengths", f"every prompt fits env.max_prompt_tokens={settings.env.max_prompt_tokens}")
        with findings.looking("mask"):
            _look_at_masks(findings, tokenizer, shown, encoder(tokenizer))
    return before or not findings.failed


def _answered(env: DatasetChatEnv) -> list[Demonstration]:
    """A few prompts with their gold answers; empty if there are none."""
    try:
        return [
            Demonstration(where, messages=part.answered(task))
            for part in env.parts
            for where, task in islice(part.all_tasks(), ROWS)
        ]
    except DataError:  # the check of the gold answers has reported it
        return []


# The machine and the settings

MOST_UPDATES = 10_000  # most updates whose learning rates are looked at


def _look_at_room(findings: Findings, settings: Any, folder: Path) -> None:
    """Do memory and disk suffice, by estimate?"""
    shape, gpu = size_and_room(settings.model)
    needs = needs_of(settings, shape, folder, gpu)
    if needs is None:
        findings.warn("memory", f"the size of {settings.model.path} is not known", "the first step will show it")
        return
    reason = needs.impossible()
    if reason is not None:
        findings.fail("memory", reason)
        return
    *lines, last = needs.lines()
    for line in [*lines, last] if not needs.may_not_fit else lines:
        about, _, text = line.partition(" ")
        if about != "push":
            findings.ok(about, text.strip())
    if (pushes := needs.pushed_by_disk) is not None:
        findings.warn("push", pushes, MORE_SHARED)
    if needs.may_not_fit:
        findings.warn("memory", "by estimate it may not fit", needs.advice())


def _look_at_rate(findings: Findings, settings: Any, updates: int) -> None:
    """Can this learning rate learn in `updates` optimizer steps?"""
    rates = [learning_rate(number, updates, settings.optim) for number in range(min(updates, MOST_UPDATES))]
    highest = max(rates)
    if highest == 0:
        findings.fail(
            "rate", f"the learning rate is 0 in all of {counted(updates, 'update')}", "lower optim.warmup_steps"
        )
    elif highest < settings.optim.rate / 2:
        findings.warn(
            "rate",
            f"the learning rate gets to {highest:.2g} in {counted(updates, 'update')}, not to optim.lr="
            f"{settings.optim.rate:g}",
            "lower optim.warmup_steps, or give more steps",
        )
    elif (question := settings.usual_rates.question(settings.optim.rate, adapter=settings.lora.enabled)) is not None:
        findings.warn("rate", question, "give a usual one, or go on if it is meant")
    else:
        findings.ok("rate", f"optim.lr={settings.optim.rate:g} is a usual one")


# What the model reads: the chat template, the end of a turn, the trained tokens of a demonstration


def _look_at_template(findings: Findings, tokenizer: Any, vocabulary: int | None) -> None:
    """Does the template end a turn, begin an answer, begin a text once, and use ids that the model has?"""
    chat = ChatMask(tokenizer)
    before = len(findings.all)
    if chat.end_of_turn is None:
        findings.fail(
            "template",
            f"{chat.template} ends an answer with no special token, so the model would never learn to stop",
            "let it write eos_token behind an answer, or take model.chat_template=plain",
        )
    if chat.header_left_out:
        findings.fail(
            "template",
            f"{chat.template} writes {chat.header_left_out!r} before an answer but not as its generation prompt",
            "let it do so under {% if add_generation_prompt %}",
        )
    ids, _ = (
        Encoder(tokenizer).chat.encode([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])
        if not chat.header_left_out and chat.end_of_turn is not None
        else ([], [])
    )
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        findings.fail(
            "template", f"{chat.template} begins a text with {tokenizer.bos_token} twice", "let it write bos_token once"
        )
    if vocabulary is not None and max([*ids, *chat.special, 0]) >= vocabulary:
        findings.fail(
            "template",
            f"the tokenizer has ids up to {max([*ids, *chat.special])}, and the model {vocabulary} embeddings",
            "take the tokenizer that belongs to the model",
        )
    if len(findings.all) == before:
        end = tokenizer.convert_ids_to_tokens(chat.end_of_turn)
        findings.ok("template", f"{chat.template} ends an answer with {end}")


def _look_at_masks(
    findings: Findings, tokenizer: Any, demonstrations: Iterable[Any], encoder: RowEncoder[Encoded]
) -> None:
    """Is every answer trained, with its end, and nothing else?"""
    bad = BadRows()
    samples = [counted_in(bad, encoder.encode(demonstration)) for demonstration in demonstrations]
    for fault in dict.fromkeys(each.fault for each in bad.found):
        those, rows = bad.of(fault), counted(len(samples), "row")
        text = f"{fault.value}: {len(those)} of {rows}, such as {those[0].where}: {those[0].reason}"
        if fault is Fault.cut and len(those) < len(samples):
            findings.warn("mask", text, "raise max_tokens")
        else:
            findings.fail("mask", text, "raise max_tokens" if fault is Fault.cut else "correct or remove them")
    good = [sample for each in samples if each.num_trained for sample in each.samples]
    if good and not bad.count:
        _report_masks(findings, tokenizer, good, len(samples))


def _report_masks(findings: Findings, tokenizer: Any, samples: Sequence[Sample], rows: int) -> None:
    trained, read = sum(sample.num_trained for sample in samples), sum(len(sample.ids) for sample in samples)
    ends = {sample.ids[max(i for i, kept in enumerate(sample.mask) if kept)] for sample in samples}
    stops = {ChatMask(tokenizer).end_of_turn, tokenizer.eos_token_id}
    if not ends <= stops:
        odd = tokenizer.convert_ids_to_tokens(next(iter(ends - stops)))
        findings.fail("mask", f"an answer is trained up to {odd!r}, which ends no turn", "correct the chat template")
        return
    findings.ok(
        "mask",
        f"{trained:,} of {read:,} tokens of {counted(rows, 'row')} are trained, each answer with its end",
    )


# The rows, and whether the rewards tell a good reply from a bad one

PROMPTS_COMPARED = 20_000  # most rows that are searched for repeated prompts
ATTACK_SECONDS = 10.0  # for one call of a reward under attack


def _look_at_rows(findings: Findings, env: DatasetChatEnv, settings: SampledSettings) -> None:
    """How many prompts are there, how many of them are different, and does the seed fix their order?"""
    for part in env.parts:
        _count(findings, part, settings)
        _tell_not_used(findings, part.not_used)
    drawn = [_first_prompts(settings) for _ in range(2)]
    if drawn[0] != drawn[1]:
        findings.fail(
            "seed", f"seed={settings.seed} draws other prompts each time", "a plugin's environment draws unseeded"
        )
    else:
        findings.ok("seed", f"seed={settings.seed} draws the same prompts each time")


def _tell_not_used(findings: Findings, text: str) -> None:
    if text:
        findings.warn("rows", text, "ignore this if it is intended")


def _count(findings: Findings, env: DatasetChatEnv, settings: SampledSettings) -> None:
    about = f"rows of {env.source_name}" if env.source_name else "rows"
    rows: Sequence[Mapping[str, Any]] = env.rows
    if not len(rows):
        findings.ok(about, "made as they are drawn")
        return
    looked_at = list(islice(rows, PROMPTS_COMPARED))
    different = len({repr(env.opening_messages(row)) for row in looked_at})
    count = counted(len(rows), "prompt")
    if different == 1 and len(looked_at) > 1:
        findings.fail(
            about, f"all {len(looked_at):,} rows ask the same", "name the column of the prompts, or correct it"
        )
    elif different < len(looked_at):
        text = f"{len(looked_at) - different:,} of {counted(len(looked_at), 'row')} ask what another one asks"
        findings.warn(about, text, "remove them, or ignore this if it is intended")
    elif len(rows) < settings.prompts_per_step and len(env.parts) == 1:
        text = f"{count}, and prompts_per_step={settings.prompts_per_step} takes some of them twice a step"
        findings.warn(about, text, "lower prompts_per_step, or give more rows")
    else:
        drawn = settings.prompts_per_step * getattr(settings, "steps", 1)
        findings.ok(about, f"{count}, all different; {drawn:,} are drawn, {drawn / len(rows):.2g} passes")


def _first_prompts(settings: SampledSettings) -> list[str]:
    with contextlib.closing(build_training_env(settings)) as env:
        env.start()
        return [repr(conversation.messages) for conversation in env.draw(1)]


def _look_at_held_out(findings: Findings, env: DatasetChatEnv, held_out: DatasetChatEnv) -> None:
    """Are held-out prompts trained on?"""
    count = held_out.num_tasks
    shared = sum(part.prompts_shared_with(part_of) for part, part_of in zip(held_out.parts, env.parts, strict=True))
    if shared:
        text = f"{shared:,} of {counted(count, 'held-out prompt')} are trained on too"
        findings.warn("held out", text, "take them out of one of the two")
    else:
        findings.ok("held out", f"{counted(count, 'prompt')}, none of them trained on")


def _attack_rewards(findings: Findings, env: DatasetChatEnv) -> bool:
    """Do the user's own reward functions reward bad replies? Returns whether the functions score at all."""
    scored = True
    for part in env.parts:
        if not isinstance(part, DatasetEnv) or part.rewards is None:
            continue
        for reward in part.rewards.functions:
            if isinstance(reward, WorkerReward) and reward.reference not in BUILT_IN:
                scored = _attack(findings, part, reward) and scored
    return scored


def _attack(findings: Findings, env: DatasetEnv, reward: WorkerReward) -> bool:
    about = f"reward {reward.reference}"
    try:
        cases = cases_of(env, ROWS)
    except DataError as error:
        findings.warn(about, f"it is not attacked: {error}", "rlpost reward test, with rows that have answers")
        return True
    columns = list(dict.fromkeys(str(column) for case in cases for column in case.columns))
    seconds = min(ATTACK_SECONDS, env.settings.reward_timeout_seconds)
    checks = attack_reward(Attack(reward, cases, columns, seconds, env.has_gold))
    failing = [check for check in failing_alike(checks) if check.verdict is not Verdict.ok]
    advice = f"rlpost reward test {reward.reference} shows the replies"
    if any(check.name in NEED_GOLD for check in failing):
        advice += "; if no reply is right or wrong (length, style): add env.gold=false"
    for check in failing:
        tell = findings.fail if check.verdict is Verdict.fault else findings.warn
        tell(about, f"{check.name}: {check.reason}", advice)
    if not failing:
        left_out = "" if env.has_gold else "; attacks that need a right answer are left out"
        findings.ok(about, f"it withstands {len(checks)} attacks{left_out}")
    return len(checks) > 1


def _look_at_gold(findings: Findings, env: DatasetChatEnv) -> None:
    """Do gold replies earn more than wrong and empty ones?"""
    for part in env.parts:
        if part.has_gold:
            _prove(findings, part)
        else:
            about = f"gold of {part.source_name}" if part.source_name else "gold"
            findings.ok(
                about, "no reply is right or wrong (the rows have no answer, or env.gold=false): nothing to prove"
            )


def _prove(findings: Findings, env: DatasetChatEnv) -> None:
    about = f"gold of {env.source_name}" if env.source_name else "gold"
    try:
        proof = prove(env, ROWS)
        tasks = [task for _, task in islice(env.all_tasks(), ROWS)]
        replies = {"gold": [env.gold_reply(task) for task in tasks]}
    except DataError as error:
        findings.warn(about, f"no gold answers to try the rewards with: {error}", "ignore this if it is intended")
        return
    if not tasks:
        findings.warn(about, "no row has a gold answer to try the rewards with", "ignore this if it is intended")
        return
    replies["wrong"] = [env.corrupted_replies(task)[-1] for task in tasks]
    replies["empty"] = ["" for _ in tasks]
    earned = {
        kind: [
            reward
            for task, reply in zip(tasks, of_kind, strict=True)
            if (reward := played(env, task, reply).reward) is not None
        ]
        for kind, of_kind in replies.items()
    }
    means = {kind: fmean(rewards) for kind, rewards in earned.items() if rewards}
    means_text = ", ".join(f"{kind} {mean:.3g}" for kind, mean in means.items())
    if len(means) > 1 and len(set(means.values())) == 1:
        findings.fail(
            about,
            f"gold, wrong and empty replies earn alike ({means_text})",
            "correct the reward, or the column of the answers",
        )
    elif proof.failures:
        findings.fail(
            about, f"{len(proof.failures)} of {proof.replies} replies are scored wrongly; {proof.failures[0]}"
        )
    elif not proof.tells_apart:
        findings.fail(about, f"gold replies earn no more than the others ({means_text})", "correct the reward")
    else:
        findings.ok(about, f"of {counted(len(tasks), 'row')}: {means_text}")


# One step on a few rows: sampled, scored, read in two ways, learned from, pushed

COMPLETIONS = 4  # most completions of a prompt
TOKENS = 4096  # most sampled tokens, unless two completions of two prompts take more
GAP_HIGH, GAP_WRONG = 0.05, 0.3  # nats a token between sampler and trainer: formats explain the one, a fault the other
FLOAT32_OFF = 1e-3  # nats a token between packed and plain log-probs that float32 explains, with room to spare
LARGE_LOGIT = 32.0  # two forwards may round a logit of this size to neighbouring values of their dtype
COMPARED = 4  # rows that are read in both ways


@dataclass(frozen=True)
class _Took:
    """Seconds that a part of a step takes on `rows` completions or samples."""

    seconds: float
    rows: int

    def of(self, rows: int) -> float:
        """Seconds of the same part on `rows`."""
        return self.seconds * rows / self.rows


class _FirstWarning(logging.Handler):
    """Keeps the first warning of rlpost's log, which says why a reward failed; a context manager."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""

    def __enter__(self) -> Self:
        logging.getLogger("rlpost").addHandler(self)
        return self

    def __exit__(self, *raised: object) -> None:
        logging.getLogger("rlpost").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.first = self.first or record.getMessage()


def _practise_sampled(findings: Findings, settings: Sampled) -> None:
    """Sample a few groups and learn from them once."""
    prompts, completions = _size(settings)
    tried = replace(
        settings,
        prompts_per_step=prompts,
        group_size=completions,
        minibatch_size=None,
        passes=1,
        max_policy_lag=0,
        collector=SyncCollectorSettings(),
        cluster=NoClusterSettings(),
        eval=replace(settings.eval, enabled=False),
    )
    if isinstance(tried, GRPOSettings):
        tried = replace(tried, dynamic=replace(tried.dynamic, enabled=False))
    memory = MemoryWatch()
    memory.start()
    parts = _assembled(tried)
    with contextlib.closing(memory), parts.opened:
        parts.policy.start()
        step = Step(1, 2, _ranks(tried, parts, tried.tokens_per_microbatch))
        with _FirstWarning() as warned:
            batch = parts.buffer.take(tried.prompts_per_step, 0)
        _look_at_completions(findings, tried, parts, batch, warned)
        parts.policy.rest()
        rows = rows_of(batch)
        if not any(row.counts and row.num_trained for row in rows):
            findings.fail("learning", "no completion can be trained on")
            return
        _look_at_reading(findings, tried.model.autocast, parts.model, rows, parts.policy.sampling.temperature)
        learning = _learn_once(findings, tried, parts, step, batch, rows)
        if learning is None:
            return
        step.push(parts.collector)
        sampling = _look_at_push(findings, tried, parts, Step(2, 2, step.ranks))
        completions = settings.prompts_per_step * settings.group_size
        of_step = sampling.of(completions) + learning.of(completions) * settings.passes
        _report_cost(findings, of_step, settings.steps, sampling.rows, memory)


def _practise_on_rows(findings: Findings, settings: FineTuningSettings) -> None:
    """Learn from a few samples once."""
    memory = MemoryWatch()
    memory.start()
    tried = replace(settings, eval=replace(settings.eval, accuracy=False))
    parts = OF_ROWS[type(settings)].assemble(tried)
    with contextlib.closing(memory), parts.opened:
        samples = [sample for sample in islice(parts.samples.rows, ROWS) if sample.num_trained]
        rows = [row for sample in samples for row in parts.kind.rows_of(sample)]
        tokens = settings.tokens_per_microbatch if settings.packing else 1
        step = Step(1, 1, _ranks(tried, parts, tokens))
        _look_at_reading(findings, tried.model.autocast, parts.model, rows, 1.0)
        step.ranks.fill_reference(rows)
        learning = _update(findings, step, rows)
        if learning is None:
            return
        count = parts.samples.count()
        steps = settings.steps or ceil((settings.epochs or 1) * count / settings.minibatch_size)
        _report_cost(findings, learning.of(settings.minibatch_size), steps, learning.rows, memory)


def _assembled(settings: Sampled) -> SampledParts:
    return assemble_grpo(settings) if isinstance(settings, GRPOSettings) else assemble_distill(settings)


def _size(settings: Sampled) -> tuple[int, int]:
    """Numbers of prompts, and of completions of each, that take less than a minute on two cores with a small model."""
    longest = settings.env.longest_sampled
    completions = min(settings.group_size, max(2, min(COMPLETIONS, TOKENS // (ROWS * longest))))
    return min(settings.prompts_per_step, max(2, min(ROWS, TOKENS // (completions * longest)))), completions


def _ranks(settings: Any, parts: SampledParts | RowParts[Any, Any], tokens: int | None) -> Ranks:
    microbatches = Microbatches(tokens, parts.model.device, settings.model.autocast)
    ranks = Ranks()
    ranks.begin(
        Rank(parts.model, parts.optimizer, parts.reference, parts.objective, settings.optim, microbatches), tokens
    )
    return ranks


def _look_at_completions(
    findings: Findings, settings: Sampled, parts: SampledParts, batch: TensorDict, warned: _FirstWarning
) -> None:
    metrics = batch_metrics(batch, settings.group_size, parts.policy.version)
    count, tokens = len(batch), int(metrics["tokens/generated"])
    cut = sum(reason in CUT for reason in batch["finish_reason"])
    limit = settings.env.max_completion_tokens
    if cut == count:
        findings.warn(
            "completions",
            f"all {count} are truncated at env.max_completion_tokens={limit}: none ends by itself, or the limit is too "
            "low",
            "raise it, or take a model that was taught to end a turn",
        )
    elif cut > count / 2:
        text = f"{cut} of {count} are truncated at env.max_completion_tokens={limit}"
        findings.warn("completions", text, "raise it, unless the model should learn short answers")
    else:
        findings.ok(
            "completions",
            f"{counted(count, 'completion')}, {tokens / count:.0f} tokens on average, {cut} truncated at the limit",
        )
    _look_at_masked(findings, rows_of(batch))
    _look_at_rewards(findings, settings, batch, metrics, warned)


def _look_at_masked(findings: Findings, rows: Sequence[Row]) -> None:
    """How many of the tokens after the prompts did the environment write? No loss reads them."""
    read = sum(row.response.numel() for row in rows)
    masked = read - sum(row.num_trained for row in rows)
    whose = "the environment's" + (" or of prompts rendered anew" if any(row.restarts for row in rows) else "")
    findings.ok(
        "masked",
        f"{masked / max(read, 1):.0%} of the tokens behind the prompts are {whose} ({masked:,} of {read:,}): "
        "masked, not trained on",
    )


def _look_at_rewards(
    findings: Findings, settings: Sampled, batch: TensorDict, metrics: dict[str, float], warned: _FirstWarning
) -> None:
    count, failed = len(batch), int(metrics["reward/failed"])
    if failed:
        tell = findings.fail if failed > settings.max_failed_share * count else findings.warn
        tell("rewards", f"{failed} of {count} failed: {warned.first}", "correct the reward")
        if failed == count:
            return
    groups = count // settings.group_size
    if not settings.learns_from_rewards:
        findings.ok("rewards", f"{metrics['reward/mean']:.3g} on average; they are shown, and not learned from")
    elif metrics["groups/zero_std"] == 1:
        findings.warn(
            "groups",
            f"rewards differ in none of {counted(groups, 'group')} ({metrics['reward/mean']:.3g} on average), and only "
            "groups whose rewards differ train the model",
            "an easier task, a larger group_size, a higher sampling.temperature, or fine-tune first",
        )
    else:
        spread = round((1 - metrics["groups/zero_std"]) * groups)
        findings.ok(
            "groups",
            f"rewards differ in {spread} of {counted(groups, 'group')}, {metrics['reward/mean']:.3g} on average",
        )


def _look_at_reading(findings: Findings, kind: Autocast, model: Any, rows: Sequence[Row], temperature: float) -> None:
    """Do packed rows get the log-probs of the model's own forward, up to the dtype's rounding?"""
    verdict = verdict_of(model)
    chosen = sorted((row for row in rows if row.num_trained), key=lambda row: row.response.numel())[:COMPARED]
    dtype = model.dtype if kind is Autocast.none else getattr(torch, kind.value)
    off = _packed_off(model, kind, chosen, temperature)
    pair = "packed and plain" if verdict.reads_packed else f"batched ({verdict.reason}) and plain"
    text = f"{pair} log-probs differ by {off:.2g} nats a token on average"
    if off <= max(FLOAT32_OFF, LARGE_LOGIT * torch.finfo(dtype).eps):
        findings.ok("reading", text)
    elif kind is Autocast.bfloat16 and _packed_off(model, Autocast.none, chosen, temperature) <= FLOAT32_OFF:
        findings.warn("reading", text, "bfloat16 can do that: try model.autocast=none")
    elif dtype is torch.float32:
        findings.fail("reading", text, "rlpost does not read this model right: take another one")
    else:
        findings.fail(
            "reading", text, "try model.dtype=float32 model.autocast=none; if that differs too, another model"
        )


def _packed_off(model: Any, kind: Autocast, rows: Sequence[Row], temperature: float) -> float:
    """Mean difference, in nats a token, between the log-probs of packed rows and those of the model's own forward."""
    microbatches = Microbatches(None, model.device, kind)
    rank = Rank(model, None, None, None, None, microbatches)  # type: ignore[arg-type]  it only reads
    packed = rank.read_log_probs(rows, temperature)
    off = [
        (_plain_log_probs(model, row, temperature, microbatches) - read[row.sampled]).abs()
        for row, read in zip(rows, packed, strict=True)
    ]
    return torch.cat(off).mean().nan_to_num(inf).item()


@torch.no_grad()
def _plain_log_probs(model: Any, row: Row, temperature: float, microbatches: Microbatches) -> torch.Tensor:
    """log π of each sampled id, from the model's own forward of each of the row's pieces alone."""
    found = []
    for piece in row.pieces:
        ids, first = torch.cat([piece.prompt, piece.response]).to(microbatches.device), piece.prompt.numel()
        with autocast(microbatches.kind, microbatches.device):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, first - 1 : -1]
        chosen = (logits.float() / temperature).log_softmax(-1).gather(-1, ids[first:, None])
        found.append(chosen.squeeze(-1).cpu()[piece.sampled])
    return torch.cat(found)


def _learn_once(
    findings: Findings, settings: Sampled, parts: SampledParts, step: Step, batch: TensorDict, rows: list[Row]
) -> _Took | None:
    """Update once, with made-up advantages that are never 0, so that rows with equal rewards take their time too."""
    if isinstance(settings, GRPOSettings):
        fill_log_probs(settings, parts.objective, step.ranks, rows)
        fill_advantages(settings, batch, rows)
        for number, row in enumerate(rows):
            row.advantage = (-1.0) ** number
    else:
        step.ranks.fill_reference(rows, parts.objective.temperature)
    return _update(findings, step, rows, sampled=True)


def _update(findings: Findings, step: Step, rows: list[Row], *, sampled: bool = False) -> _Took | None:
    began = time.perf_counter()
    try:
        update = step.update(rows)
    except FloatingPointError as error:
        findings.fail("learning", f"{error}: the update would destroy the weights", "take another format or model")
        return None
    part = _Took(time.perf_counter() - began, len(rows))
    if not update.stepped or update.grad_norm == 0:
        findings.fail("learning", "no weight has a gradient", "see loss, lora.target_modules and overlong.mask")
        return None
    findings.ok(
        "learning", f"{counted(len(rows), 'row')} in {part.seconds:.1f} s, gradient norm {update.grad_norm:.3g}"
    )
    if sampled:
        read = zip(rows, update.log_probs, strict=True)
        apart = [(own - row.sampler_log_probs)[row.sampled].abs() for row, own in read if own is not None]
        _report_gap(findings, "sampler", torch.cat(apart).mean().item(), "as they start")
    return part


def _report_gap(findings: Findings, about: str, gap: float, when: str) -> None:
    text = f"sampler and trainer give a token log-probs {gap:.2g} nats apart, {when}"
    if not gap <= GAP_WRONG:
        findings.fail(about, text, "they do not compute the same: take policy.dtype=float32, or policy=transformers")
    elif gap > GAP_HIGH:
        findings.warn(about, text, "policy.dtype=float32 brings them closer, loss.sampler_correction allows for it")
    else:
        findings.ok(about, text)


def _look_at_push(findings: Findings, settings: Sampled, parts: SampledParts, step: Step) -> _Took:
    """Does the sampler have the pushed weights? Returns the time of sampling, now that everything is warm."""
    batch = parts.buffer.take(settings.prompts_per_step, 0)
    part = _Took(step.clock.seconds, len(batch))
    rows = [row for row in rows_of(batch) if row.num_trained]
    temperature = parts.policy.sampling.temperature
    read = step.ranks.read_log_probs(rows, temperature=temperature)
    pairs = zip(read, rows, strict=True)
    apart = torch.cat([(log_probs - row.sampler_log_probs)[row.sampled].abs() for log_probs, row in pairs])
    _report_gap(findings, "push", apart.mean().item(), "after weights were pushed")
    return part


def _report_cost(findings: Findings, of_step: float, steps: int, rows: int, memory: MemoryWatch) -> None:
    minutes = of_step * steps / 60
    whole = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    findings.ok(
        "time",
        f"about {of_step:.3g} s a step, {whole} for {counted(steps, 'step')} without evaluations, by a step on "
        f"{counted(rows, 'row')}; {memory.look() / 1e9:.1f} GB were held at most",
    )
