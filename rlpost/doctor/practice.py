"""A step of the training as it will be, on a few rows: sampled, scored, read in two ways, learned from, pushed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, inf
from typing import Any, Self

import torch
from tensordict import TensorDict

from rlpost.assemble import GRPOParts, assemble_grpo
from rlpost.assemble_sft import SFTParts, assemble_sft
from rlpost.data.conversation import CUT
from rlpost.data.demonstrations import Sample
from rlpost.doctor.findings import Findings
from rlpost.doctor.rows import ROWS
from rlpost.envs.build import longest_sampled
from rlpost.model.logprobs import verdict_of
from rlpost.model.memory import MemoryWatch
from rlpost.model.packing import Row, rows_of
from rlpost.model.precision import autocast
from rlpost.objectives.advantage import give_advantages
from rlpost.settings import Autocast, GRPOSettings, NoClusterSettings, SFTSettings, SyncCollectorSettings
from rlpost.text import counted
from rlpost.train.grpo import fill_log_probs, update_metrics
from rlpost.train.metrics import batch_metrics
from rlpost.train.rank import Rank
from rlpost.train.ranks import Ranks
from rlpost.train.sft_session import row_of
from rlpost.train.update import Microbatches

COMPLETIONS = 4  # a prompt, at most
TOKENS = 4096  # that are sampled, at most, but for two completions of two prompts
GAP_HIGH, GAP_WRONG = 0.05, 0.3  # nats a token between sampler and trainer: formats explain the one, a fault the other
FLOAT32_OFF = 1e-3  # nats a token between packed and plain log-probs that float32 explains, with room to spare
LARGE_LOGIT = 32.0  # two forwards may round a logit of this size to neighbouring values of their dtype
COMPARED = 4  # rows that are read in both ways


@dataclass(frozen=True)
class Took:
    """Seconds of a part of a step on some completions or samples."""

    seconds: float
    rows: int

    def of(self, rows: int) -> float:
        """The same part on so many."""
        return self.seconds * rows / self.rows


class Heard(logging.Handler):
    """What rlpost's log is told meanwhile, which says why a reward failed; a context manager."""

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


def practise_grpo(findings: Findings, settings: GRPOSettings) -> None:
    """Sample a few groups, and learn from them once."""
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
        dynamic=replace(settings.dynamic, enabled=False),
        eval=replace(settings.eval, enabled=False),
    )
    memory = MemoryWatch()
    memory.start()
    with contextlib.closing(memory), contextlib.closing(assemble_grpo(tried)) as parts:
        parts.start()
        parts.collector.begin_step()
        with Heard() as heard:
            batch = parts.buffer.take(tried.prompts_per_step, 0)
        _look_at_completions(findings, tried, parts, batch, heard)
        parts.policy.rest()
        rows = rows_of(batch)
        if not any(row.counts and row.num_trained for row in rows):
            findings.fail("learning", "no completion can be trained on")
            return
        ranks = _ranks(tried, parts, tried.tokens_per_microbatch)
        _look_at_reading(findings, tried.model.autocast, parts.model, rows, parts.policy.sampling.temperature)
        learning = _learn_once(findings, tried, parts, ranks, batch, rows)
        if learning is None:
            return
        sampling = _look_at_push(findings, tried, parts, ranks)
        completions = settings.prompts_per_step * settings.group_size
        of_step = sampling.of(completions) + learning.of(completions) * settings.passes
        _tell_cost(findings, of_step, settings.steps, sampling.rows, memory)


def _size(settings: GRPOSettings) -> tuple[int, int]:
    """Prompts, and completions of each, that take less than a minute on two cores with a small model."""
    longest = longest_sampled(settings.env)
    completions = min(settings.group_size, max(2, min(COMPLETIONS, TOKENS // (ROWS * longest))))
    return min(settings.prompts_per_step, max(2, min(ROWS, TOKENS // (completions * longest)))), completions


def practise_sft(findings: Findings, settings: SFTSettings) -> None:
    """Learn from a few samples once."""
    memory = MemoryWatch()
    memory.start()
    tried = replace(settings, eval=replace(settings.eval, accuracy=False))
    with contextlib.closing(memory), contextlib.closing(assemble_sft(tried)) as parts:
        samples: list[Sample] = [sample for sample in islice(parts.samples.rows, ROWS) if sample.num_trained]
        rows = [row_of(sample) for sample in samples]
        tokens = settings.tokens_per_microbatch if settings.packing else 1
        ranks = _ranks(tried, parts, tokens)
        _look_at_reading(findings, tried.model.autocast, parts.model, rows, 1.0)
        ranks.fill_reference(rows)
        learning = _update(findings, ranks, rows)
        if learning is None:
            return
        count = parts.samples.count()
        steps = settings.steps or ceil((settings.epochs or 1) * count / settings.minibatch_size)
        _tell_cost(findings, learning.of(settings.minibatch_size), steps, learning.rows, memory)


def _ranks(settings: Any, parts: GRPOParts | SFTParts, tokens: int | None) -> Ranks:
    microbatches = Microbatches(tokens, parts.device, settings.model.autocast)
    ranks = Ranks()
    ranks.begin(
        Rank(parts.model, parts.optimizer, parts.reference, parts.objective, settings.optim, microbatches), tokens
    )
    return ranks


def _look_at_completions(
    findings: Findings, settings: GRPOSettings, parts: GRPOParts, batch: TensorDict, heard: Heard
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
    _look_at_rewards(findings, settings, batch, metrics, heard)


def _look_at_masked(findings: Findings, rows: Sequence[Row]) -> None:
    """How much of what follows the prompts did the environment write, which no loss reads?"""
    read = sum(row.response.numel() for row in rows)
    masked = read - sum(row.num_trained for row in rows)
    findings.ok(
        "masked",
        f"{masked / max(read, 1):.0%} of the tokens behind the prompts are the environment's ({masked:,} of {read:,}): "
        "masked, not trained on",
    )


def _look_at_rewards(
    findings: Findings, settings: GRPOSettings, batch: TensorDict, metrics: dict[str, float], heard: Heard
) -> None:
    count, failed = len(batch), int(metrics["reward/failed"])
    if failed:
        tell = findings.fail if failed > settings.max_failed_share * count else findings.warn
        tell("rewards", f"{failed} of {count} failed: {heard.first}", "correct the reward")
        if failed == count:
            return
    groups = count // settings.group_size
    if metrics["groups/zero_std"] == 1:
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
    """Do packed rows get the log-probs of the model's own forward, as far as the dtype's rounding allows?"""
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
    """Nats a token, on average, between the log-probs of packed rows and those of the model's own forward."""
    microbatches = Microbatches(None, model.device, kind)
    rank = Rank(model, None, None, None, None, microbatches)  # type: ignore[arg-type]  it only reads
    packed = rank.read_log_probs(rows, temperature)
    off = [
        (_plain_log_probs(model, row, temperature, microbatches) - read)[row.sampled].abs()
        for row, read in zip(rows, packed, strict=True)
    ]
    return torch.cat(off).mean().nan_to_num(inf).item()


@torch.no_grad()
def _plain_log_probs(model: Any, row: Row, temperature: float, microbatches: Microbatches) -> torch.Tensor:
    """log π of each id of the response by the model's own forward of this row alone."""
    ids = torch.cat([row.prompt, row.response]).to(microbatches.device)
    with autocast(microbatches.kind, microbatches.device):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, row.prompt.numel() - 1 : -1]
    chosen = (logits.float() / temperature).log_softmax(-1)
    return chosen.gather(-1, ids[row.prompt.numel() :, None]).squeeze(-1).cpu()


def _learn_once(
    findings: Findings, settings: GRPOSettings, parts: GRPOParts, ranks: Ranks, batch: TensorDict, rows: list[Row]
) -> Took | None:
    """An update, on advantages that none lacks: what a step takes is known on rows without a spread too."""
    fill_log_probs(settings, parts, ranks, rows)
    give_advantages(settings, batch, rows)
    for number, row in enumerate(rows):
        row.advantage = (-1.0) ** number
    return _update(findings, ranks, rows, settings, parts)


def _update(
    findings: Findings,
    ranks: Ranks,
    rows: list[Row],
    settings: GRPOSettings | None = None,
    parts: GRPOParts | None = None,
) -> Took | None:
    began = time.perf_counter()
    try:
        update = ranks.update(rows, 0)
    except FloatingPointError as error:
        findings.fail("learning", f"{error}: the update would destroy the weights", "take another format or model")
        return None
    took = Took(time.perf_counter() - began, len(rows))
    if not update.stepped or update.grad_norm == 0:
        findings.fail("learning", "no weight has a gradient", "see loss, lora.targets and overlong.mask")
        return None
    findings.ok(
        "learning", f"{counted(len(rows), 'row')} in {took.seconds:.1f} s, gradient norm {update.grad_norm:.3g}"
    )
    if settings is not None and parts is not None:
        gap = update_metrics(settings, parts, ranks, rows, [update])["sampler/logprob_gap"]
        _tell_gap(findings, "sampler", gap, "as they start")
    return took


def _tell_gap(findings: Findings, about: str, gap: float, when: str) -> None:
    text = f"sampler and trainer give a token log-probs {gap:.2g} nats apart, {when}"
    if not gap <= GAP_WRONG:
        findings.fail(about, text, "they do not compute the same: take policy.dtype=float32, or policy=transformers")
    elif gap > GAP_HIGH:
        findings.warn(about, text, "policy.dtype=float32 brings them closer, loss.sampler_correction allows for it")
    else:
        findings.ok(about, text)


def _look_at_push(findings: Findings, settings: GRPOSettings, parts: GRPOParts, ranks: Ranks) -> Took:
    """Does the sampler have the weights that were pushed? What sampling takes, now that all is warm."""
    parts.collector.update_policy_weights_(parts.model)
    began = time.perf_counter()
    parts.collector.begin_step()
    batch = parts.buffer.take(settings.prompts_per_step, 0)
    took = Took(time.perf_counter() - began, len(batch))
    rows = [row for row in rows_of(batch) if row.num_trained]
    temperature = parts.policy.sampling.temperature
    read = ranks.read_log_probs(rows, temperature=temperature)
    pairs = zip(read, rows, strict=True)
    apart = torch.cat([(log_probs - row.sampler_log_probs)[row.sampled].abs() for log_probs, row in pairs])
    _tell_gap(findings, "push", apart.mean().item(), "after weights were pushed")
    return took


def _tell_cost(findings: Findings, of_step: float, steps: int, rows: int, memory: MemoryWatch) -> None:
    minutes = of_step * steps / 60
    whole = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    findings.ok(
        "time",
        f"about {of_step:.3g} s a step, {whole} for {counted(steps, 'step')} without evaluations, by a step on "
        f"{counted(rows, 'row')}; {memory.look() / 1e9:.1f} GB were held at most",
    )
