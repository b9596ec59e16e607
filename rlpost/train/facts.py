"""The facts of a training: what it trains, on what and how, each worded here and nowhere else.

A dry run, the plan on the screen, `rlpost runs show`, the report and the model card show this list, and a run keeps it
in its folder. A new fact is a line in one of the lists below. Needs no torch: what only loading finds out comes as
values in `Seen`, and a dry run has few of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.catalog import option_of
from rlpost.config.compose import sources_of
from rlpost.estimate.machine import Precision
from rlpost.estimate.needs import Needs
from rlpost.estimate.shape import Fetch
from rlpost.files import MORE_SHARED
from rlpost.policies.drawing import training_sampling
from rlpost.record import Fact
from rlpost.settings import (
    DistillSettings,
    DPOSettings,
    EnvSettings,
    ExpertIterationSettings,
    FineTuningSettings,
    LoRASettings,
    MixSettings,
    OptimSettings,
    OwnRowsSettings,
    ToolsSettings,
)
from rlpost.settings.commands import HeldOutSettings, SampledSettings, samples_per_prompt
from rlpost.settings.loss import SamplerCorrection
from rlpost.settings.model import Autocast, ModelSettings
from rlpost.settings.policy import ClusterSettings, ModelPolicySettings, PolicySettings, Sharding
from rlpost.text import counted
from rlpost.train.resolve import AUTOCAST, DAY, LAG, SAMPLER, Change, products_in, sampled_in

WORDED = (AUTOCAST, SAMPLER, DAY, LAG, "policy")  # changes of settings that have a fact of their own


@dataclass(frozen=True)
class Tokens:
    """The tokens of demonstrations: how many are trained and read, in how many rows where not all were looked at."""

    trained: int
    read: int
    looked_at: int | None = None


@dataclass(frozen=True)
class Seen:
    """The machine, model and data of a training, as far as they are known beside its settings; None: not known."""

    model: str  # its class, size and device, in words
    writes: str  # the run's folder, and what follows it
    needs: Needs | None = None
    unsized: str = ""  # the model that must be converted or downloaded before the needs can be estimated
    fetches: Sequence[Fetch] = ()  # from the hub
    policy: str = ""  # its engine and where it samples, in words
    reads: str = ""  # how forward passes share a prompt, in words
    adapter: str = ""  # its layers and size, in words
    ranks: int = 1
    steps: int | None = None  # of the whole run
    rows: int | None = None  # to train on: prompts, demonstrations or pairs
    bad_rows: int = 0
    held_out: int | None = None  # prompts or rows
    prompts_held_out: int | None = None  # where rows are measured, and replies too
    tokens: Tokens | None = None
    notes: Sequence[str] = ()  # on the model and the data
    is_resumed: bool = False


def facts_of(settings: Any, changes: Sequence[Change], seen: Seen) -> list[Fact]:
    """The facts of a training in the order in which they are shown; `changes` are those of `resolve`."""
    kind = next(facts for base, facts in KINDS.items() if isinstance(settings, base))
    return kind(settings, changes, seen).all()


def precision_fact(
    model: ModelSettings,
    sampler: PolicySettings | None,
    changes: Iterable[Change],
    *,
    trains: bool,
    is_resumed: bool = False,
) -> Fact:
    """The formats of products and of sampling with `sampler`, and why; or that they will be chosen."""
    chosen = next((each for each in changes if each.key == AUTOCAST), None)
    if chosen is None and model.autocast is Autocast.auto:
        kept = ", or as the run began" if is_resumed else ""
        return Fact("precision", f"auto: float32 or bfloat16, chosen at the start{kept}")
    uses = {"products": products_in(model)} if trains else {}
    uses |= {"sampling": sampled_in(model, sampler)} if isinstance(sampler, ModelPolicySettings) else {}
    used = ", ".join(
        f"{dtype.value} {' and '.join(n for n in uses if uses[n] is dtype)}" for dtype in dict.fromkeys(uses.values())
    )
    return Fact("precision", used, reason=chosen.why if chosen else "", note=chosen.note if chosen else "")


def measured_precision(found: Precision) -> Fact:
    """The precision of a model by itself, as a chat has it."""
    return Fact("precision", found.used, found.warning or "", found.why)


class TrainingFacts:
    """The facts of every kind of training, and where those of one kind stand among them."""

    def __init__(self, settings: Any, changes: Sequence[Change], seen: Seen) -> None:
        self.settings, self.changes, self.seen = settings, changes, seen

    def all(self) -> list[Fact]:
        """All facts, in the order in which they are shown."""
        settings, seen = self.settings, self.seen
        return [
            Fact("model", f"{settings.model.path}: {seen.model}"),
            precision_fact(settings.model, settings.sampler, self.changes, trains=True, is_resumed=seen.is_resumed),
            *_ranks(settings.cluster, seen.ranks),
            *([Fact("reads", seen.reads)] if seen.reads else []),
            *self.own(),
            *([Fact("lora", seen.adapter or _adapter(settings.lora))] if settings.lora.enabled else []),
            Fact("loss", self.loss()),
            Fact("lr", _rate(settings.optim)),
            *(self.evaluations() if settings.eval.enabled else [Fact("eval", "none, by eval.enabled=false")]),
            *(Fact("chosen", str(each), reason=each.why) for each in self.changes if _is_news(each)),
            Fact("writes", seen.writes),
            *map(_fetch, seen.fetches),
            *(needs_facts(seen.needs) if seen.needs else []),
            *([Fact("memory", f"unknown until {seen.unsized} is here")] if seen.unsized else []),
            *(Fact("settings", note=doubt) for doubt in settings.doubts()),
            *(Fact("data", note=note) for note in seen.notes),
        ]

    def own(self) -> list[Fact]:
        """The facts of this kind of training: its data, its work, how it learns."""
        raise NotImplementedError

    def evaluations(self) -> list[Fact]:
        """The measures on held-out data, and when they are taken."""
        raise NotImplementedError

    def loss(self) -> str:
        """The loss, the estimator of the advantages, and the KL penalty."""
        settings, coef = self.settings, getattr(self.settings.loss, "kl_coef", 0.0)
        advantage = getattr(settings, "advantage", None)
        estimator = f", advantage.estimator={advantage.estimator}" if advantage else ""
        return option_of("loss", type(settings.loss)) + estimator + (f", KL penalty {coef:g}" if coef else "")


class SampledFacts(TrainingFacts):
    """Facts of a training on its own policy's completions."""

    def own(self) -> list[Fact]:
        """See `TrainingFacts.own`."""
        settings, env, seen = self.settings, self.settings.env, self.seen
        completions = settings.prompts_per_step * settings.group_size
        beside = ", beside training" if settings.elsewhere else ""
        policy = seen.policy or option_of("policy", type(settings.policy)) + beside
        sampling = training_sampling(settings.sampling, env)
        facts = [
            *data_facts(env, seen, counted(seen.rows, "prompt") if seen.rows is not None else ""),
            Fact("policy", f"{policy}, {sampling}"),
            Fact(
                "work",
                f"{counted(settings.steps, 'step')} of {counted(settings.prompts_per_step, 'prompt')} x "
                f"{settings.group_size} completions = {completions}, at most {env.max_completion_tokens} tokens each, "
                f"seed {settings.seed}",
            ),
            *_turns(env, settings.tools),
        ]
        if settings.lag:
            older = f"completions may be {counted(settings.lag, 'version')} older than the policy"
            given = {key: getattr(settings.loss, key, None) for key in ("ratio_to", "sampler_correction")}
            corrections = [f"loss.{key}={value.name}" for key, value in given.items() if value is not None]
            facts.append(Fact("lag", "; ".join([older, *corrections])))
        if seen.ranks > 1 and not settings.elsewhere and seen.needs is not None and seen.needs.work.on_gpu:
            gpus = ",".join(map(str, range(seen.ranks)))
            words = f"collector.players={seen.ranks} collector.gpus=[{gpus}] max_policy_lag=0 policy.sleep=true"
            facts.append(Fact("policy", note=f"rank 0's GPU alone samples; on all: collector=async {words}"))
        return facts

    def evaluations(self) -> list[Fact]:
        """See `TrainingFacts.evaluations`."""
        held_out, env, known = self.settings.eval, self.settings.env, self.seen.held_out
        samples = samples_per_prompt(held_out.k, held_out.samples)
        how = "greedy" if samples == 1 else f"{samples} completions each, k={held_out.k}"
        return _evaluations(held_out, env, f"{_size(held_out, env, known, 'held-out prompt')}, {how}", known, "prompt")


class ExpertIterationFacts(SampledFacts):
    """Facts of a training on the best of its own completions."""

    def own(self) -> list[Fact]:
        """See `TrainingFacts.own`."""
        least = self.settings.min_reward
        bar = "better than the median" if least is None else f"with a reward of {least:g} or more"
        return [*super().own(), Fact("select", f"the best {self.settings.topk_size} of each prompt, {bar}")]


class DistillFacts(SampledFacts):
    """Facts of a training that imitates a teacher on its own completions."""

    def own(self) -> list[Fact]:
        """See `TrainingFacts.own`."""
        teacher = self.settings.teacher or f"the model itself, told: {self.settings.hint}"
        return [*super().own(), Fact("teacher", teacher)]


class TuningFacts(TrainingFacts):
    """Facts of a training on rows; `unit` is one of them."""

    unit = "sample"
    figures = "loss"

    def own(self) -> list[Fact]:
        """See `TrainingFacts.own`."""
        settings, seen, unit = self.settings, self.seen, self.unit
        facts = data_facts(settings.env, seen, counted(seen.rows, unit) if seen.rows is not None else f"{unit}s")
        if (tokens := seen.tokens) is not None:
            where = f" in the {tokens.looked_at:,} {unit}s looked at" if tokens.looked_at is not None else ""
            share = f"({tokens.trained / tokens.read:.0%})"
            facts.append(Fact("tokens", f"{tokens.trained} of {tokens.read} are trained{where} {share}"))
        steps = "steps" if seen.steps is None else counted(seen.steps, "step")
        epochs = ""
        if settings.steps is None:
            epochs = f" ({counted(settings.epochs or 1, 'epoch')})"
        elif seen.rows:
            epochs = f" ({settings.steps * settings.minibatch_size / seen.rows:.3g} epochs)"
        alone = "" if settings.packing else ", each in a forward of its own"
        work = f"{steps} of {counted(settings.minibatch_size, unit)}{epochs}, at most {settings.max_tokens} tokens each"
        facts.append(Fact("work", f"{work}{alone}, seed {settings.seed}"))
        if settings.eval.accuracy:
            facts.append(Fact("policy", f"{option_of('policy', type(settings.policy))}, greedy"))
        return facts

    def evaluations(self) -> list[Fact]:
        """See `TrainingFacts.evaluations`."""
        held_out, env, known = self.settings.eval, self.settings.env, self.seen.held_out
        accuracy = " and accuracy of greedy replies" if held_out.accuracy else ""
        words = f"{self.figures} on {_size(held_out, env, known, 'held-out row')}{accuracy}"
        if held_out.accuracy:
            return _evaluations(held_out, env, words, self.seen.prompts_held_out, "prompt")
        return _evaluations(held_out, env, words, known, "row")


class PairFacts(TuningFacts):
    """Facts of a training on pairs of replies."""

    unit = "pair"
    figures = "loss, margin and accuracy"


# kind of training -> its facts; the first that a settings class derives from counts
KINDS: dict[type, type[TrainingFacts]] = {
    ExpertIterationSettings: ExpertIterationFacts,
    DistillSettings: DistillFacts,
    SampledSettings: SampledFacts,
    DPOSettings: PairFacts,
    FineTuningSettings: TuningFacts,
}


# Held-out data


def _size(held_out: HeldOutSettings, env: EnvSettings, known: int | None, unit: str) -> str:
    limit = held_out.limit or env.eval_limit
    return f"up to {counted(limit, unit)}" if known is None else counted(min(limit, known), unit)


def _evaluations(held_out: HeldOutSettings, env: EnvSettings, words: str, known: int | None, unit: str) -> list[Fact]:
    """The evaluations, what they decide, and a note if the `known` prompts or rows that they measure are few."""
    from rlpost.evaluation.statistics import few

    often = f", and every {counted(held_out.every, 'step')}" if held_out.every else ""
    facts = [Fact("eval", f"{words}; before and after training{often}")]
    limit = held_out.limit or env.eval_limit
    played = None if known is None else min(limit, known)
    decide = (played or 0) // 2 if held_out.stops else 0
    if held_out.stops:
        keys = ", ".join(f"{key}={getattr(held_out, key.partition('.')[2]):g}" for key in held_out.stops)
        both = "" if played is None else f": {decide} held-out {unit}s decide, {played - decide} others are reported"
        facts.append(Fact("ends", f"early by {keys}{both}"))
    if played is not None and (note := few(played - decide, unit)):
        facts.append(Fact("eval", note=f"{note}; {more_held_out(env, is_limited=played == limit)}"))
    return facts


def more_held_out(env: EnvSettings, *, is_limited: bool) -> str:
    """How to measure on more held-out prompts or rows."""
    if is_limited:
        return "raise eval.limit"
    if hasattr(env, "test_path"):
        return "hold out more with env.test_path=FILE, or a larger env.held_out"
    return "hold out more with a larger env.held_out" if hasattr(env, "held_out") else "hold out more"


def trained_on_too(shared: int, of: str, figures: str) -> str:
    """The warning that `shared` of the held-out prompts or rows are trained on."""
    are = "are" if figures == "figures" else "is"
    return (
        f"{shared} of {of} are trained on too, so {figures} called held-out {are} not: take them out of one of the two"
    )


# Facts of one group of settings


def name_of_data(env: EnvSettings) -> str:
    """The environment, and where its rows come from where it has rows, `gsm8k from data/gsm8k`; a mix's sources."""
    if isinstance(env, MixSettings):
        return f"mix of {', '.join(source.name for source in sources_of(env))}"
    source = getattr(env, "path", None)
    return option_of("env", type(env)) + (f" from {source}" if source else "")


def data_facts(env: EnvSettings, seen: Seen | None = None, rows: str = "") -> list[Fact]:
    """The environment and its rows, and each source of a mix; `rows` are those trained on."""
    counts = [rows]
    if seen is not None and rows:
        counts += [f"{seen.held_out} held out"] if seen.held_out else []
        counts += [f"{counted(seen.bad_rows, 'bad one')} left out"] if seen.bad_rows else []
    facts = [Fact("data", ", ".join([name_of_data(env), f"{env.split} split", *_rewards(env), *filter(None, counts)]))]
    sources = sources_of(env) if isinstance(env, MixSettings) else []
    whole = sum(source.weight for source in sources)
    for each in sources:
        what = [each.text, *_rewards(each.settings), f"at most {each.settings.max_completion_tokens} tokens each"]
        facts.append(Fact("source", f"{each.name}, {each.weight / whole:.1%} of the prompts: {', '.join(what)}"))
    return facts


def _rewards(env: EnvSettings) -> list[str]:
    return [f"reward {' + '.join(env.reward)}"] if isinstance(env, OwnRowsSettings) and env.reward else []


def _turns(env: EnvSettings, tools: ToolsSettings) -> list[Fact]:
    if env.max_turns == 1:
        return []
    using = f", tools {', '.join(tools.use)}" if tools.use else ""
    most = "as many as the environment plays" if env.max_turns is None else f"at most {env.max_turns} a conversation"
    return [Fact("turns", f"{most}{using}")]


def _ranks(cluster: ClusterSettings, count: int) -> list[Fact]:
    """The training processes, and what each holds of the model."""
    if count == 1:
        return []
    held = "a part of the model" if cluster.sharding is Sharding.full else "the whole model"
    offload = ", kept in the machine's memory" if cluster.cpu_offload else ""
    return [Fact("ranks", f"{count} train together, each holds {held}{offload}")]


def _adapter(lora: LoRASettings) -> str:
    targets = "all linear layers" if lora.target_modules is None else ", ".join(lora.target_modules)
    return f"rank {lora.rank}, alpha {lora.alpha}, on {targets}"


def _rate(optim: OptimSettings) -> str:
    rate = "by the size of the model" if optim.lr is None else f"{optim.lr:g}"
    warmup = f" after {counted(optim.warmup_steps, 'step')} of warm-up" if optim.warmup_steps else ""
    return f"{rate}, {optim.schedule.value}{warmup}"


def _is_news(change: Change) -> bool:
    """Whether no other fact words a change."""
    return change.key not in WORDED and change.value is not SamplerCorrection.none


def _fetch(fetch: Fetch) -> Fact:
    if fetch.cached is not None:
        return Fact("cached", f"{fetch.id}, in {fetch.cached}")
    return Fact("downloads", f"{fetch.id} ({fetch.size}){fetch.refusal}")


def needs_facts(needs: Needs) -> list[Fact]:
    """The estimate of memory and disk, and whether they suffice."""
    facts = [Fact("memory", needs.memory_text(on_gpu=True))] if needs.work.on_gpu else []
    facts += [Fact("memory", needs.memory_text(on_gpu=False)), Fact("disk", needs.disk_text)]
    if (pushes := needs.pushed_by_disk) is not None:
        facts.append(Fact("push", note=f"weights are pushed {pushes}: {MORE_SHARED}"))
    if (reason := needs.impossible()) is not None:
        return [*facts, Fact("fits", f"no: {reason}")]
    if needs.may_not_fit:
        facts.append(Fact("memory", note=f"memory may not suffice; ways to need less: {needs.advice()}"))
    return facts
