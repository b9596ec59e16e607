"""The examination of a training: checks that need no training, then two of its own steps on a few rows, measured.

Each finding is a line, with what to do about it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlpost.catalog import Command
from rlpost.data.chat import ChatMask
from rlpost.data.encoding import Encoder
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.dataset import DatasetEnv
from rlpost.envs.proof import attack_of, prove
from rlpost.errors import DataError, RlpostError
from rlpost.estimate.needs import Machine, needs_of
from rlpost.estimate.shape import shape_of_folder, shape_of_model
from rlpost.model.locate import shape_of
from rlpost.model.optim import learning_rate
from rlpost.model.packing import Row
from rlpost.model.precision import this_device
from rlpost.model.trainable import starting_tokenizer
from rlpost.record import Fact
from rlpost.remote import cluster
from rlpost.rewards.attacks import NEED_GOLD, Verdict, attack_reward
from rlpost.rewards.builtin import BUILT_IN
from rlpost.rewards.functions import WorkerReward
from rlpost.settings import (
    GRPOSettings,
    NoClusterSettings,
    NoTrackingSettings,
    OptimSettings,
    SyncCollectorSettings,
)
from rlpost.settings.commands import RowEvalSettings, RunRequest, SampledSettings
from rlpost.settings.training import GateAlarm
from rlpost.text import counted, first_line
from rlpost.train.assemble import env_maker
from rlpost.train.facts import needs_facts, precision_fact
from rlpost.train.grpo import updates_per_step
from rlpost.train.resolve import resolve
from rlpost.train.run import Run, Watcher
from rlpost.train.step import NotFiniteError, Step
from rlpost.train.update import Update
from rlpost.train.watchers import Timing

Wait = Callable[[str], None]  # called with the current work
ROWS = 8  # most rows that are tried
INTENDED = "ignore this if it is intended"


def examine(command: Command[Any], settings: Any, folder: Path, findings: Findings, wait: Wait) -> None:
    """Check everything that `command` with `settings` would do in the run folder `folder`; nothing is kept."""
    if settings.cluster.elsewhere:
        wait("asking the nodes of the cluster")
        with findings.looking("cluster"):
            _look_at_nodes(findings, settings.cluster.address)
    wait("reading rows and tokenizer")
    model = settings.model
    device = this_device(model.device)
    settings, changes = resolve(settings, device, shape_of_model(model.path, model.revision))
    if command.kind is None:
        _look_at_prompts(findings, settings)
    with findings.looking("model"):
        tokenizer, at = starting_tokenizer(model, settings.lora.path, None)
        shape = shape_of_folder(at)
        _look_at_template(findings, tokenizer, shape.vocab if shape else None)
    if findings.failed:
        return
    with findings.looking("memory"):
        if (shape := shape_of(model.path, model.revision)) is None:
            findings.warn("memory", f"the size of {model.path} is not known", "the first step will show it")
        elif reason := (needs := needs_of(settings, shape, Machine.here(folder, device.room))).impossible():
            findings.fail("memory", reason)
        else:
            findings.take(needs_facts(needs))
    if findings.failed:  # a step would fail for the same reason
        return
    wait("two steps on a few rows")
    with findings.looking("training"):
        findings.take([precision_fact(settings.model, settings.sampler, changes, trains=True)])
        _practise(findings, command, settings)


class Findings:
    """All findings of an examination; each goes to `tell` as soon as it is found."""

    def __init__(self, tell: Callable[[Finding], None] = lambda finding: None) -> None:
        self.all: list[Finding] = []
        self._tell = tell

    def ok(self, about: str, text: str) -> None:
        """Add something that is as it should be."""
        self._add(Finding("ok", about, text))

    def warn(self, about: str, text: str, fix: str = INTENDED) -> None:
        """Add something that may be intended, or may not matter."""
        self._add(Finding("warning", about, text, fix))

    def fail(self, about: str, text: str, fix: str = "") -> None:
        """Add something with which training cannot work."""
        self._add(Finding("error", about, text, fix))

    @property
    def failed(self) -> bool:
        """Whether there is an error among them."""
        return any(finding.level == "error" for finding in self.all)

    def take(self, facts: Iterable[Fact]) -> None:
        """Add facts as they are, and their notes as warnings."""
        for fact in facts:
            if fact.value:
                self.ok(fact.name, fact.text)
            if fact.note:
                self.warn(fact.name, fact.note)

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

    level: str  # ok; warning: look at this first; error: the training cannot work, or would learn something wrong
    about: str
    text: str
    fix: str = ""


# The machines and the model

PUSHED_MB, NODE_SECONDS = 100, 120.0  # an object that every node reads, and the longest wait for all of them


def _look_at_nodes(findings: Findings, address: str) -> None:
    """Does every node of the Ray cluster answer, with the versions of this machine, and how fast does it read?"""
    ray = cluster.connect(address)
    try:
        nodes = cluster.report(ray, megabytes=PUSHED_MB, seconds=NODE_SECONDS)
        resources = cluster.what_there_is(ray)
    finally:
        ray.shutdown()
    for node in nodes:
        name = f"{node.name} ({node.address})"
        if not node.alive:
            findings.warn("node", f"{name} is gone", "start Ray there again, if it should sample")
        elif node.seconds is not None:
            devices = f" ({', '.join(node.devices)})" if node.devices else ""
            has = f"{node.cpus:g} CPUs, {node.gpus:g} GPUs{devices}, {node.memory / 1e9:.1f} GB for workers"
            speed = f"{node.seconds:.2f} s, {PUSHED_MB / max(node.seconds, 1e-6):,.0f} MB/s"
            findings.ok("node", f"{name}: {has}; reads {PUSHED_MB} MB in {speed}")
    for problem in cluster.differences(nodes, cluster.versions()):
        findings.fail("cluster", problem, "install the same versions there, and see that every node reaches the head")
    findings.ok("cluster", resources)


def _look_at_template(findings: Findings, tokenizer: Any, vocabulary: int | None) -> None:
    """Does the template end a turn, begin an answer, begin a text once, and use ids that the model has?"""
    chat = ChatMask(tokenizer)
    if chat.end_of_turn is None:
        text = f"{chat.template} ends an answer with no special token, so the model would never learn to stop"
        fix = "let it write eos_token behind an answer, or take model.chat_template=plain"
        findings.fail("template", text, fix)
    if chat.header_left_out:
        text = f"{chat.template} writes {chat.header_left_out!r} before an answer but not as its generation prompt"
        findings.fail("template", text, "let it do so under {% if add_generation_prompt %}")
    if chat.end_of_turn is None or chat.header_left_out:
        return
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    ids, _ = Encoder(tokenizer).chat.encode(messages)
    bos, highest = tokenizer.bos_token_id, max([*ids, *chat.special])
    if bos is not None and ids[:2] == [bos, bos]:
        text = f"{chat.template} begins a text with {tokenizer.bos_token} twice"
        findings.fail("template", text, "let it write bos_token once")
    elif vocabulary is not None and highest >= vocabulary:
        text = f"the tokenizer has ids up to {highest}, and the model {vocabulary} embeddings"
        findings.fail("template", text, "take the tokenizer that belongs to the model")
    else:
        end = tokenizer.convert_ids_to_tokens(chat.end_of_turn)
        findings.ok("template", f"{chat.template} ends an answer with {end}")


# The prompts, and whether the rewards tell a good reply from a bad one

PROMPTS_COMPARED = 20_000  # most rows that are searched for repeated prompts
ATTACK_SECONDS = 10.0  # for one call of a reward under attack


def _look_at_prompts(findings: Findings, settings: SampledSettings) -> None:
    """Check the rows and the rewards of a training that samples."""
    make_env = env_maker(settings)
    with contextlib.closing(make_env()) as env:
        with findings.looking("rows"):
            env.start()
            for part in env.parts:
                _look_at_rows(findings, part, settings.prompts_per_step, settings.steps)
        if findings.failed:
            return
        with findings.looking("rewards"):
            for part in env.parts:
                try:
                    scored = [_attack(findings, part, reward) for reward in _own_rewards(part)]
                    if all(scored):
                        _prove(findings, part)
                except DataError as error:
                    findings.warn("rewards", f"they are not tried: {error}")


def _look_at_rows(findings: Findings, env: DatasetChatEnv, size: int, steps: int) -> None:
    """How many prompts are there, how many of them are different, and do they suffice for steps of `size`?"""
    about = f"rows of {env.source_name}" if env.source_name else "rows"
    rows = env.rows
    if not len(rows):
        findings.ok(about, "made as they are drawn")
        return
    looked_at = min(len(rows), PROMPTS_COMPARED)
    different = len({repr(env.opening_messages(row)) for row in islice(rows, looked_at)})
    count = counted(len(rows), "prompt")
    if different == 1 and looked_at > 1:
        text = f"all {looked_at:,} rows ask the same"
        findings.fail(about, text, "name the column of the prompts, or correct it")
    elif different < looked_at:
        text = f"{looked_at - different:,} of {looked_at:,} rows ask what another one asks"
        findings.warn(about, text, f"remove them, or {INTENDED}")
    elif len(rows) < size and len(env.parts) == 1:
        text = f"{count}, and prompts_per_step={size} takes some of them twice a step"
        findings.warn(about, text, "lower prompts_per_step, or give more rows")
    else:
        drawn = size * steps
        findings.ok(about, f"{count}, all different; {drawn:,} are drawn, {drawn / len(rows):.2g} passes")


def _own_rewards(env: DatasetChatEnv) -> list[WorkerReward]:
    """The user's own reward functions."""
    functions = env.rewards.functions if isinstance(env, DatasetEnv) and env.rewards is not None else []
    return [each for each in functions if isinstance(each, WorkerReward) and each.reference not in BUILT_IN]


def _attack(findings: Findings, env: Any, reward: WorkerReward) -> bool:
    """Does the reward pay for bad replies? Returns whether it scores at all."""
    about, seconds = f"reward {reward.reference}", min(ATTACK_SECONDS, env.settings.reward_timeout_seconds)
    checks = attack_reward(attack_of(reward, env, ROWS, seconds))
    failing = [check for check in checks if check.verdict is not Verdict.ok]
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


def _prove(findings: Findings, env: DatasetChatEnv) -> None:
    """Do gold replies earn more than corrupted ones?"""
    about = f"gold of {env.source_name}" if env.source_name else "gold"
    if not env.has_gold:
        findings.ok(about, "no right reply is known (no answers in the rows, or env.gold=false): nothing to prove")
        return
    proof = prove(env, ROWS)
    verdict, *details = (line.strip() for line in proof.lines())
    if proof.holds:
        findings.ok(about, verdict)
    elif proof.checked:
        findings.fail(about, "; ".join([verdict, *details[:1]]), "correct the reward, or the column of the answers")
    else:
        findings.warn(about, verdict)


# Two steps on a few rows: the first is looked at, the second is timed and samples with the pushed weights

COMPLETIONS = 4  # most completions of a prompt
TOKENS = 4096  # most sampled tokens, unless two completions of two prompts take more
GAP_HIGH = 0.05  # nats a token between sampler and trainer that formats explain; a fault has stopped the gate
MOST_UPDATES = 10_000  # most updates whose learning rates are looked at
PHASES = ("rollout", "reward", "train", "sync")  # of a step, in the names of its times
FROM_LOADING = ("reads", "tokens")  # facts that only loading finds out


def _practise(findings: Findings, command: Command[Any], settings: Any) -> None:
    """Let the training itself, in a folder that is removed, make two steps on a few rows."""
    tried: Any = _few_prompts(settings) if command.kind is None else _few_rows(settings)
    with TemporaryDirectory(ignore_cleanup_errors=True) as place:
        request = RunRequest(Path(place) / "run", None, [], ["rlpost", "doctor"], "{}", plain=True)
        with Trial(tried, request) as run:
            parts = run.load(command.assemble, lambda run: [Timing(run), Measuring(run, settings, findings)])
            try:
                command.learn(run, parts)
            except NotFiniteError as error:
                text = f"{error}: the update would destroy the weights"
                findings.fail("learning", text, "lower optim.lr, or take another format or model")


def _few_prompts(settings: SampledSettings) -> SampledSettings:
    """Two steps that take less than a minute on two cores with a small model, in this process."""
    longest = settings.env.longest_sampled
    completions = min(settings.group_size, max(2, min(COMPLETIONS, TOKENS // (ROWS * longest))))
    prompts = min(settings.prompts_per_step, max(2, min(ROWS, TOKENS // (completions * longest))))
    tried = replace(
        settings,
        prompts_per_step=prompts,
        group_size=completions,
        minibatch_size=None,
        steps=2,
        max_policy_lag=0,
        max_failed_share=1.0,
        gate=replace(settings.gate, enabled=True, on_alarm=GateAlarm.stop),
        collector=SyncCollectorSettings(),
        cluster=NoClusterSettings(),
        tracking=NoTrackingSettings(),
    )
    if isinstance(tried, GRPOSettings):  # all completions are trained on
        dynamic, overlong = replace(tried.dynamic, enabled=False), replace(tried.overlong, mask=False)
        return replace(tried, dynamic=dynamic, overlong=overlong)
    return tried


def _few_rows(settings: Any) -> Any:
    """Two steps on a few rows, without replies."""
    held_out = RowEvalSettings(enabled=settings.eval.enabled, limit=settings.eval.limit)
    tracking = NoTrackingSettings()
    return replace(settings, minibatch_size=ROWS, steps=2, epochs=None, eval=held_out, tracking=tracking)


class TriedStep(Step):
    """A step in which every completion counts, so that one without a spread of rewards is measured too."""

    def update(self, minibatch: Sequence[Row], number: int | None = None) -> Update[Any]:
        """See `Step.update`."""
        for place, row in enumerate(minibatch):
            if not torch.as_tensor(row.advantage).any():
                row.advantage = (-1.0) ** place
        return super().update(minibatch, number)


class Trial(Run[Any, Any]):
    """A training that makes `TriedStep`s."""

    step_class = TriedStep


class Measuring(Watcher):
    """Reports what the training of `settings` notes, and what the steps of a trial of it measure."""

    def __init__(self, run: Run[Any, Any], settings: Any, findings: Findings) -> None:
        self.run, self.settings, self.findings = run, settings, findings

    def on_start(self, facts: Sequence[Fact]) -> None:
        """Report the facts that only loading finds out, all notes, and the learning rate of the whole training."""
        self.findings.take(fact for fact in facts if fact.name in FROM_LOADING or fact.note)
        settings, updates = self.settings, self._steps
        if self.run.parts.collector is not None:
            completions = settings.prompts_per_step * settings.group_size
            updates *= updates_per_step(completions, settings.minibatch_size, settings.passes)
        _look_at_rate(self.findings, settings.optim, updates)

    def on_step(self, step: Step) -> None:
        """Report the completions and the update of the first step, the gap of both, and the time of the second."""
        metrics, is_first = step.metrics, step.number == 1
        if is_first and step.batch is not None:
            self._look_at_completions(metrics, len(step.rows))
        if is_first:
            self._look_at_update(step)
        if (gap := metrics.get("sampler/logprob_gap")) is not None:
            self._report_gap(gap, *(("sampler", "at the start") if is_first else ("push", "after a push")))
        if step.is_last:
            self._report_cost(metrics)

    def _report_gap(self, gap: float, about: str, when: str) -> None:
        """Do sampler and trainer compute the same? The gate has compared the weights, and stops a larger gap."""
        text = f"sampler and trainer give a token log-probs {gap:.2g} nats apart, {when}"
        if gap > GAP_HIGH:
            fix = "policy.dtype=float32 brings them closer, loss.sampler_correction allows for it"
            self.findings.warn(about, text, fix)
        else:
            self.findings.ok(about, text)

    @property
    def _steps(self) -> int:
        """Steps of the whole training."""
        settings = self.settings
        if settings.steps is not None:
            return settings.steps
        return max(1, ceil((settings.epochs or 1) * self.run.parts.samples.count() / settings.minibatch_size))

    def _look_at_completions(self, metrics: Mapping[str, float], count: int) -> None:
        """Do the `count` completions end by themselves? Can their rewards be computed, and do they differ?"""
        cut = round(metrics["completion/truncated"] * count)
        text = f"{cut} of {count} are truncated at env.max_completion_tokens={self.settings.env.max_completion_tokens}"
        if cut > count / 2:
            fix = "raise it, unless the model should learn short answers, or take a model that was taught to end a turn"
            self.findings.warn("completions", text, fix)
        else:
            self.findings.ok("completions", f"{text}; {metrics['completion/tokens_mean']:.0f} tokens on average")
        if failed := round(metrics["reward/failed"]):
            tell = self.findings.fail if failed > self.settings.max_failed_share * count else self.findings.warn
            log = (self.run.folder.path / "log.txt").read_text(errors="replace")
            why = log.partition(" WARNING ")[2].partition("\n")[0]
            tell("rewards", f"{failed} of {count} failed: {why}", "correct the reward")
        elif (no_spread := metrics.get("groups/zero_std")) is not None:
            groups = self.run.settings.prompts_per_step
            spread = "none" if no_spread == 1 else f"{(1 - no_spread) * groups:.0f}"
            text = f"rewards differ in {spread} of {counted(groups, 'group')}, {metrics['reward/mean']:.3g} on average"
            if no_spread == 1:
                fix = "an easier task, a larger group_size, a higher sampling.temperature, or fine-tune first"
                self.findings.warn("groups", f"{text}; only groups whose rewards differ train the model", fix)
            else:
                self.findings.ok("groups", text)

    def _look_at_update(self, step: Step) -> None:
        """Did the step change the weights?"""
        norm = step.metrics["grad_norm"]
        if not any(row.valid and row.num_trained for row in step.minibatch):
            self.findings.fail("learning", "no completion can be trained on")
        elif not step.changed_weights or norm == 0:
            self.findings.fail(
                "learning", "no weight has a gradient", "see loss, lora.target_modules and overlong.mask"
            )
        else:
            self.findings.ok("learning", f"gradient norm {norm:.3g} of {counted(len(step.minibatch), 'row')}")

    def _report_cost(self, metrics: Mapping[str, float]) -> None:
        """The time of the whole training, by that of a step, and the memory that was held."""
        _, rows, _ = self.run.settings.lengths(0)
        longer = self.settings.lengths(0)[1] / rows
        phases = [f"{name} {longer * metrics[key]:.2g}" for name in PHASES if (key := f"time/{name}") in metrics]
        of_step = longer * metrics["time/step"]
        minutes = of_step * self._steps / 60
        whole = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
        of = f" ({', '.join(phases)})" if phases else ""
        self.findings.ok(
            "time",
            f"about {of_step:.3g} s a step{of}, {whole} for {counted(self._steps, 'step')} without evaluations, by a "
            f"step on {counted(rows, 'row')}; {metrics['memory/peak_gb']:.1f} GB were held at most",
        )


def _look_at_rate(findings: Findings, optim: OptimSettings, updates: int) -> None:
    """Can this learning rate learn in `updates` optimizer steps?"""
    highest = max(learning_rate(number, updates, optim) for number in range(min(updates, MOST_UPDATES)))
    text = f"the learning rate gets to {highest:.2g} in {counted(updates, 'update')}"
    if highest >= optim.rate / 2:
        findings.ok("rate", text)
        return
    tell = findings.warn if highest else findings.fail
    tell("rate", f"{text}, not to optim.lr={optim.rate:g}", "lower optim.warmup_steps, or give more steps")
