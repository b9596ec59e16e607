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
from logging.handlers import BufferingHandler
from math import ceil, inf
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch

from rlpost.catalog import Command
from rlpost.data.chat import ChatMask
from rlpost.data.demonstrations import Demonstration, Encoded, Sample
from rlpost.data.encoding import Encoder, RowEncoder, counted_in
from rlpost.data.faults import BadRows, Fault
from rlpost.envs.build import build_env
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.checks import check_rewards, check_template, look_at_lengths
from rlpost.envs.dataset import DatasetEnv
from rlpost.envs.proof import cases_of, played, prove
from rlpost.errors import DataError, RlpostError
from rlpost.estimate.needs import Machine, Needs, needs_of
from rlpost.estimate.shape import shape_of_folder, shape_of_model
from rlpost.files import MORE_SHARED
from rlpost.model.load import context_length
from rlpost.model.locate import shape_of
from rlpost.model.logprobs import READERS, token_log_probs, verdict_of
from rlpost.model.memory import MemoryWatch
from rlpost.model.optim import learning_rate
from rlpost.model.packing import Row, rows_of
from rlpost.model.precision import autocast, this_device
from rlpost.model.trainable import starting_tokenizer
from rlpost.rewards.attacks import NEED_GOLD, Attack, Verdict, attack_reward, failing_alike
from rlpost.rewards.builtin import BUILT_IN
from rlpost.rewards.functions import WorkerReward
from rlpost.settings import (
    Autocast,
    FineTuningSettings,
    GRPOSettings,
    ModelSettings,
    NoClusterSettings,
    OptimSettings,
    SyncCollectorSettings,
)
from rlpost.settings.commands import EvalDuringTrainingSettings, RowEvalSettings, SampledSettings
from rlpost.settings.training import UsualRates
from rlpost.text import counted, first_line
from rlpost.train.assemble import env_maker
from rlpost.train.facts import needs_facts, precision_fact
from rlpost.train.grpo import updates_per_step
from rlpost.train.progress import Progress
from rlpost.train.ranks import Rank, Ranks
from rlpost.train.resolve import resolve
from rlpost.train.rows import Kind
from rlpost.train.sampling import SamplingParts
from rlpost.train.step import Clock, NotFiniteError, Step
from rlpost.train.update import Microbatches, Update

Wait = Callable[[str], None]  # called with the current work
ROWS = 8  # most rows that are tried


def examine(command: Command[Any], settings: Any, folder: Path, findings: Findings, wait: Wait) -> None:
    """Check everything that `command` with `settings` would do in the run folder `folder`; nothing is kept."""
    wait("reading rows and tokenizer")
    model, kind = settings.model, command.kind
    device = this_device(model.device)
    settings, changes = resolve(settings, device, shape_of_model(model.path, model.revision))
    good = _examine_prompts(findings, settings) if kind is None else _examine_rows(findings, settings, kind)
    if not good:
        return
    with findings.looking("memory"):
        shape, machine = shape_of(model.path, model.revision), Machine.here(folder, device.room)
        needs = None if shape is None else needs_of(settings, shape, machine)
        _look_at_room(findings, settings.model.path, needs)
    if findings.failed:  # a step would fail for the same reason
        return
    wait("a step on a few rows")
    with findings.looking("a step"):
        findings.ok("precision", precision_fact(settings.model, settings.sampler, changes, trains=True).text)
        _practise(findings, command, settings)


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


def _examine_prompts(findings: Findings, settings: SampledSettings) -> bool:
    """Check rows, rewards and template of a training that samples; whether a model can be loaded for them."""
    completions = settings.prompts_per_step * settings.group_size
    updates = settings.steps * updates_per_step(completions, settings.minibatch_size, settings.passes)
    _look_at_rate(findings, settings.optim, settings.usual_rates, updates, adapter=settings.lora.enabled)
    make_env = env_maker(settings)
    with contextlib.ExitStack() as opened:
        env = opened.enter_context(contextlib.closing(make_env()))
        with findings.looking("rows"):
            check_rewards(env)
            env.start()
            for part in env.parts:
                _look_at_rows(findings, part, settings.prompts_per_step, settings.steps)
                _tell_not_used(findings, part.not_used)
            _look_at_seed(findings, make_env, settings.seed)
            if settings.eval.enabled:
                held_out = settings.env.held_out_for(settings.eval.limit)
                eval_env = build_env(held_out, tools=settings.tools)
                opened.callback(eval_env.close)
                _look_at_held_out(findings, env, eval_env)
        if findings.failed:
            return False
        with findings.looking("rewards"):
            if _attack_rewards(findings, env):
                _look_at_gold(findings, env)

        def look_at_prompts(tokenizer: Any, folder: Path) -> None:
            with findings.looking("template"):
                check_template(env, tokenizer)
            with findings.looking("lengths"):
                if note := look_at_lengths(env, settings.env, tokenizer, context_length(folder)):
                    findings.warn("lengths", note, "ignore this if it is intended")
                else:
                    findings.ok("lengths", f"every prompt fits env.max_prompt_tokens={settings.env.max_prompt_tokens}")

        return _look_at_writing(
            findings, settings.model, settings.lora.path, _answered(env), Encoder, also=look_at_prompts
        )


def _examine_rows(findings: Findings, settings: FineTuningSettings, kind: Kind[Any]) -> bool:
    """Check rows and template of a training on rows; whether a model can be loaded for them."""
    with contextlib.closing(build_env(settings.env, seed=settings.seed)) as env:
        shown: list[Any] = []
        with findings.looking("rows"):
            rows = kind.shown_of(env)
            _tell_not_used(findings, rows.not_used if rows else "")
            shown = list(islice(env.demonstrations() if rows is None else rows.in_turn(), ROWS))
            size = env.num_tasks if rows is None else len(rows)
            updates = settings.steps or ceil((settings.epochs or 1) * size / settings.minibatch_size)
            adapter = settings.lora.enabled
            _look_at_rate(findings, settings.optim, settings.usual_rates, max(1, updates), adapter=adapter)
        if not shown:
            if not findings.failed:
                findings.fail("rows", "there are no rows to train on", "give some")
            return False

        def encoder(tokenizer: Any) -> RowEncoder[Any]:
            return kind.encoder(tokenizer, settings.max_tokens)

        return _look_at_writing(findings, settings.model, settings.lora.path, shown, encoder)


def _look_at_writing(
    findings: Findings,
    model: ModelSettings,
    adapter: str | None,
    shown: Sequence[Any],
    encoder: Callable[[Any], RowEncoder[Any]],
    also: Callable[[Any, Path], None] = lambda tokenizer, folder: None,
) -> bool:
    """Check the template on the rows `shown`, and `also` what a training reads besides them."""
    before = findings.failed
    with findings.looking("model"):
        tokenizer, folder = starting_tokenizer(model, adapter, None)
        shape = shape_of_folder(folder)
        with findings.looking("template"):
            _look_at_template(findings, tokenizer, shape.vocab if shape else None)
        also(tokenizer, folder)
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


def _look_at_room(findings: Findings, model: str, needs: Needs | None) -> None:
    """Do memory and disk suffice, by estimate?"""
    if needs is None:
        findings.warn("memory", f"the size of {model} is not known", "the first step will show it")
        return
    reason = needs.impossible()
    if reason is not None:
        findings.fail("memory", reason)
        return
    facts = needs_facts(needs)
    for fact in facts[:-1] if needs.may_not_fit else facts:  # the last one says that
        if fact.name != "push":
            findings.ok(fact.name, fact.value)
    if (pushes := needs.pushed_by_disk) is not None:
        findings.warn("push", pushes, MORE_SHARED)
    if needs.may_not_fit:
        findings.warn("memory", "by estimate it may not fit", needs.advice())


def _look_at_rate(findings: Findings, optim: OptimSettings, usual: UsualRates, updates: int, *, adapter: bool) -> None:
    """Can this learning rate learn in `updates` optimizer steps?"""
    highest = max(learning_rate(number, updates, optim) for number in range(min(updates, MOST_UPDATES)))
    if highest == 0:
        findings.fail(
            "rate", f"the learning rate is 0 in all of {counted(updates, 'update')}", "lower optim.warmup_steps"
        )
    elif highest < optim.rate / 2:
        findings.warn(
            "rate",
            f"the learning rate gets to {highest:.2g} in {counted(updates, 'update')}, not to optim.lr={optim.rate:g}",
            "lower optim.warmup_steps, or give more steps",
        )
    elif (question := usual.question(optim.rate, adapter=adapter)) is not None:
        findings.warn("rate", question, "give a usual one, or go on if it is meant")
    else:
        findings.ok("rate", f"optim.lr={optim.rate:g} is a usual one")


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


def _look_at_seed(findings: Findings, make_env: Callable[[], DatasetChatEnv], seed: int) -> None:
    """Does the seed fix the order of the prompts?"""
    drawn = []
    for _ in range(2):
        with contextlib.closing(make_env()) as env:
            env.start()
            drawn.append([repr(conversation.messages) for conversation in env.draw(1)])
    if drawn[0] != drawn[1]:
        findings.fail("seed", f"seed={seed} draws other prompts each time", "a plugin's environment draws unseeded")
    else:
        findings.ok("seed", f"seed={seed} draws the same prompts each time")


def _tell_not_used(findings: Findings, text: str) -> None:
    if text:
        findings.warn("rows", text, "ignore this if it is intended")


def _look_at_rows(findings: Findings, env: DatasetChatEnv, prompts_per_step: int, steps: int) -> None:
    """How many prompts are there, and how many of them are different?"""
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
    elif len(rows) < prompts_per_step and len(env.parts) == 1:
        text = f"{count}, and prompts_per_step={prompts_per_step} takes some of them twice a step"
        findings.warn(about, text, "lower prompts_per_step, or give more rows")
    else:
        drawn = prompts_per_step * steps
        findings.ok(about, f"{count}, all different; {drawn:,} are drawn, {drawn / len(rows):.2g} passes")


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
MOST_WARNINGS = 10_000  # of the log that are kept: the first says why a reward failed


@dataclass
class _TriedStep(Step):
    """A step whose rows are looked at before they are learned from, and whose update is timed."""

    look: Callable[[Sequence[Row]], None] = lambda rows: None
    update_seconds: float = 0.0

    def update(self, minibatch: Sequence[Row], number: int | None = None) -> Update[Any]:
        """See `Step.update`."""
        self.look(minibatch)
        began = time.perf_counter()
        updated = super().update(minibatch, number)
        self.update_seconds = time.perf_counter() - began
        return updated


def _practise(findings: Findings, command: Command[Any], settings: Any) -> None:
    """Let the training's loop take one step on a few rows, and sample again with the weights that it has pushed."""
    samples = command.kind is None
    tried: Any = _few_prompts(settings) if samples else _few_rows(settings)
    memory = MemoryWatch()
    memory.start()
    parts = command.assemble(tried)
    logged, log = BufferingHandler(MOST_WARNINGS), logging.getLogger("rlpost")
    logged.setLevel(logging.WARNING)
    log.addHandler(logged)
    parts.opened.callback(log.removeHandler, logged)
    with contextlib.closing(memory), parts.opened:
        if samples:
            parts.policy.start()
        tokens, ranks = tried.microbatch_tokens, Ranks()
        microbatches = Microbatches(tokens, parts.model.device, tried.model.autocast)
        own = Rank(parts.model, parts.optimizer, parts.reference, parts.objective, tried.optim, microbatches)
        ranks.begin(own, tokens)
        step = _TriedStep(1, 1, ranks)

        def look(rows: Sequence[Row]) -> None:
            if samples:
                _look_at_completions(findings, step.metrics, len(rows), tried.env.max_completion_tokens)
                _look_at_masked(findings, rows)
                share, why = settings.max_failed_share, next((each.getMessage() for each in logged.buffer), "")
                _look_at_rewards(findings, step.metrics, len(rows), len(rows) // tried.group_size, share, why)
            if any(row.valid and row.num_trained for row in rows):
                temperature = parts.policy.sampling.temperature if samples else 1.0
                _look_at_reading(findings, tried.model.autocast, parts.model, rows, temperature)
            if samples:
                for number, row in enumerate(rows):  # never 0, so that rows with equal rewards take their time too
                    row.advantage = (-1.0) ** number

        step.look, screen = look, SimpleNamespace(note=lambda text: None)
        run = SimpleNamespace(settings=tried, ranks=ranks, progress=Progress(), total_steps=1, screen=screen)
        run.steps = lambda: [step]
        try:
            command.learn(run, parts)
        except NotFiniteError as error:
            text = f"{error}: the update would destroy the weights"
            findings.fail("learning", text, "take another format or model")
            return
        if not _look_at_update(findings, step):
            return
        rows = step.minibatch
        if samples:
            _report_gap(findings, "sampler", _gap(rows, [row.trainer_log_probs for row in rows]), "as they start")
            prompts, temperature = tried.prompts_per_step, parts.policy.sampling.temperature
            sampling = _look_at_push(findings, parts, ranks, prompts, temperature)
            a_row = sampling + settings.passes * step.update_seconds / len(rows)
            seconds, steps = a_row * settings.prompts_per_step * settings.group_size, settings.steps
        else:
            seconds = step.update_seconds / parts.position * settings.minibatch_size
            steps = settings.steps or ceil((settings.epochs or 1) * parts.samples.count() / settings.minibatch_size)
        _report_cost(findings, seconds, steps, len(rows), memory)


def _few_prompts(settings: SampledSettings) -> SampledSettings:
    """A step that takes less than a minute on two cores with a small model, in this process."""
    longest = settings.env.longest_sampled
    completions = min(settings.group_size, max(2, min(COMPLETIONS, TOKENS // (ROWS * longest))))
    prompts = min(settings.prompts_per_step, max(2, min(ROWS, TOKENS // (completions * longest))))
    tried = replace(
        settings,
        prompts_per_step=prompts,
        group_size=completions,
        minibatch_size=None,
        passes=1,
        max_policy_lag=0,
        max_failed_share=1.0,
        collector=SyncCollectorSettings(),
        cluster=NoClusterSettings(),
        eval=EvalDuringTrainingSettings(enabled=False),
    )
    if isinstance(tried, GRPOSettings):  # all completions are trained on
        dynamic, overlong = replace(tried.dynamic, enabled=False), replace(tried.overlong, mask=False)
        return replace(tried, dynamic=dynamic, overlong=overlong)
    return tried


def _few_rows(settings: FineTuningSettings) -> FineTuningSettings:
    """A step on a few rows, without replies."""
    held_out = RowEvalSettings(enabled=settings.eval.enabled, limit=settings.eval.limit)
    return replace(settings, minibatch_size=ROWS, eval=held_out)


def _look_at_completions(findings: Findings, metrics: Mapping[str, float], count: int, limit: int) -> None:
    """Do the `count` completions end by themselves, before the `limit` of their tokens?"""
    cut = round(metrics["completion/truncated"] * count)
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
        mean = metrics["completion/tokens_mean"]
        text = f"{counted(count, 'completion')}, {mean:.0f} tokens on average, {cut} truncated at the limit"
        findings.ok("completions", text)


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
    findings: Findings, metrics: Mapping[str, float], count: int, groups: int, max_failed_share: float, why: str
) -> None:
    """Do the rewards of `count` completions in `groups` differ, and can they be computed? `why` says how one failed."""
    failed, mean = round(metrics["reward/failed"]), metrics.get("reward/mean")
    if failed:
        tell = findings.fail if failed > max_failed_share * count else findings.warn
        tell("rewards", f"{failed} of {count} failed: {why}", "correct the reward")
    if failed == count or mean is None:
        return
    no_spread = metrics.get("groups/zero_std")
    if no_spread is None:
        findings.ok("rewards", f"{mean:.3g} on average; they are shown, and not learned from")
    elif no_spread == 1:
        findings.warn(
            "groups",
            f"rewards differ in none of {counted(groups, 'group')} ({mean:.3g} on average), and only groups whose "
            "rewards differ train the model",
            "an easier task, a larger group_size, a higher sampling.temperature, or fine-tune first",
        )
    else:
        spread = round((1 - no_spread) * groups)
        findings.ok("groups", f"rewards differ in {spread} of {counted(groups, 'group')}, {mean:.3g} on average")


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


@torch.no_grad()
def _packed_off(model: Any, kind: Autocast, rows: Sequence[Row], temperature: float) -> float:
    """Mean difference, in nats a token, between the log-probs of packed rows and those of the model's own forward."""
    microbatches, off = Microbatches(None, model.device, kind), []
    for microbatch in microbatches.of(rows, share_prompts=verdict_of(model).reads_packed):
        with autocast(kind, microbatches.device):
            packed, plain = (read(model, microbatch, temperature)[0] for read in (token_log_probs, READERS["alone"]))
        off.append((packed - plain).abs())
    return torch.cat(off).mean().nan_to_num(inf).item()


def _look_at_update(findings: Findings, step: _TriedStep) -> bool:
    """Did the step change the weights?"""
    if not any(row.valid and row.num_trained for row in step.minibatch):
        findings.fail("learning", "no completion can be trained on")
    elif not step.changed_weights or step.gradient()["grad_norm"] == 0:
        findings.fail("learning", "no weight has a gradient", "see loss, lora.target_modules and overlong.mask")
    else:
        text = f"{counted(len(step.minibatch), 'row')} in {step.update_seconds:.1f} s"
        findings.ok("learning", f"{text}, gradient norm {step.gradient()['grad_norm']:.3g}")
        return True
    return False


def _gap(rows: Sequence[Row], read: Sequence[torch.Tensor | None]) -> float:
    """Mean difference, in nats a token, between the log-probs of the sampler and of the trainer (`read`)."""
    pairs = [(row, log_probs) for row, log_probs in zip(rows, read, strict=True) if log_probs is not None]
    return torch.cat([(own - row.sampler_log_probs)[row.sampled].abs() for row, own in pairs]).mean().item()


def _report_gap(findings: Findings, about: str, gap: float, when: str) -> None:
    text = f"sampler and trainer give a token log-probs {gap:.2g} nats apart, {when}"
    if not gap <= GAP_WRONG:
        findings.fail(about, text, "they do not compute the same: take policy.dtype=float32, or policy=transformers")
    elif gap > GAP_HIGH:
        findings.warn(about, text, "policy.dtype=float32 brings them closer, loss.sampler_correction allows for it")
    else:
        findings.ok(about, text)


def _look_at_push(
    findings: Findings, parts: SamplingParts[Any], ranks: Ranks, prompts: int, temperature: float
) -> float:
    """Does the sampler have the pushed weights? Returns the seconds of a completion, now that everything is warm."""
    clock = Clock()
    parts.collector.fill(prompts)
    batch = parts.buffer.take(prompts)
    seconds = clock.seconds / len(batch)
    rows = [row for row in rows_of(batch) if row.num_trained]
    read = ranks.read_log_probs(rows, temperature=temperature)
    _report_gap(findings, "push", _gap(rows, read), "after weights were pushed")
    return seconds


def _report_cost(findings: Findings, of_step: float, steps: int, rows: int, memory: MemoryWatch) -> None:
    minutes = of_step * steps / 60
    whole = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    findings.ok(
        "time",
        f"about {of_step:.3g} s a step, {whole} for {counted(steps, 'step')} without evaluations, by a step on "
        f"{counted(rows, 'row')}; {memory.look() / 1e9:.1f} GB were held at most",
    )
