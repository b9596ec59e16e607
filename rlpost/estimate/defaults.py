"""Settings that follow from the device and the model's size: chosen where nobody gave them, with the reason.

They stand in a run's settings as they were chosen, and a run that is resumed keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from math import ceil
from typing import Any, Generic, TypeVar

import yaml

from rlpost.estimate.machine import Room, chosen_policy
from rlpost.estimate.needs import (
    COMMON_PROMPT,
    ENGINE_BYTES,
    MARGIN,
    computes_on_gpu,
    conversation_bytes,
    engines_beside,
    parts_of,
    peak,
    work_of,
)
from rlpost.estimate.shape import Shape
from rlpost.settings import DistillSettings, EvalSettings, SamplerCorrection
from rlpost.settings.commands import TrainingSettings, samples_per_prompt
from rlpost.text import counted, readable

# parameters up to which it holds, rate for sampled completions and pairs, rate for demonstrations. For 135M they are
# rlpost's own; from rewards verl, TRL and prime-rl train 0.5B and more with about 1e-6, and fine-tune with 1e-5
RATES = ((2e8, 2e-5, 2e-5), (1e9, 2e-6, 2e-5), (float("inf"), 1e-6, 1e-5))
TIMES_FOR_ADAPTER = 10
MICROBATCHES = (32768, 16384, 8192, 4096, 2048)  # tokens, on a GPU
CACHES = (1, 2, 4, 8, 16)  # the KV cache holds the completions in flight, divided by this
WAYS = ((False, False), (True, False), (False, True), (True, True))  # activation checkpointing, an engine that sleeps
SMALL_MODEL, TOGETHER, TOGETHER_IF_SMALL = 2e9, 512, 1024  # parameters; completions in flight at once on a GPU
ALONE = 0.9  # share of its GPU for an engine that has it for itself
KEYS = (
    "optim.lr",
    "loss.sampler_correction",
    "model.activation_checkpointing",
    "tokens_per_microbatch",
    "policy.max_num_seqs",
    "policy.kv_cache_gb",
    "policy.gpu_memory_utilization",
    "policy.sleep",
)
S = TypeVar("S", bound=TrainingSettings | EvalSettings)


@dataclass(frozen=True)
class Chosen:
    """The value of a setting that nobody gave, and why."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        value = self.value.name if isinstance(self.value, SamplerCorrection) else self.value
        shown = f"{value:.3g}" if isinstance(value, float) else str(value).lower()
        return f"{self.key}={shown} ({self.why})"


def choose(
    settings: S, shape: Shape | None, gpu: Room | None, kept: Mapping[str, Any] | None = None
) -> tuple[S, list[Chosen]]:
    """Fill the open keys of `settings`. Returns the settings and the choices made.

    Without a `shape` the model's size is unknown, and the keys that depend on it stay open. `kept` maps keys to the
    values of the run that is resumed; None for a new run.
    """
    choosing = _Choosing(settings)
    for key in KEYS:
        if kept is not None and isinstance(kept.get(key), int | float | str):
            choosing.take(key, kept[key], "as the run began")
    if isinstance(settings, DistillSettings) and settings.eval.enabled and not settings.env.scores:
        choosing.set(
            "eval.enabled", False, "without env.reward nothing scores a reply; kl/teacher shows what is learned"
        )
    on_gpu = gpu is not None and computes_on_gpu(settings.model.device, gpu)
    if not isinstance(settings, EvalSettings) and shape is not None:
        choosing.take("optim.lr", *_rate(settings, shape))
    if gpu is None or not on_gpu:
        return choosing.settings, choosing.chosen
    if settings.uses_policy:
        choosing.settings = replace(choosing.settings, policy=chosen_policy(choosing.settings.policy))
    if choosing.settings.policy.needs_vllm and kept is None:
        why = "vLLM's kernels round differently from the trainer's"
        choosing.take("loss.sampler_correction", SamplerCorrection.tis_token, why)
    if shape is not None:
        _fill_gpu(choosing, shape, gpu)
    return choosing.settings, choosing.chosen


class _Choosing(Generic[S]):
    """Settings in which open keys are being filled."""

    def __init__(self, settings: S) -> None:
        self.settings = settings
        self.chosen: list[Chosen] = []

    def is_open(self, key: str) -> bool:
        """Whether these settings have `key`, and no value for it."""
        owner, _, name = key.rpartition(".")
        return getattr(getattr(self.settings, owner, None) if owner else self.settings, name, key) is None

    def take(self, key: str, value: Any, why: str) -> None:
        """Set `key` if it is open."""
        if self.is_open(key):
            kind = SamplerCorrection if key == "loss.sampler_correction" and isinstance(value, str) else None
            self.set(key, kind[value] if kind else value, why)

    def set(self, key: str, value: Any, why: str) -> None:
        """Set `key`, open or not."""
        self.settings = with_value(self.settings, key, value)
        self.chosen.append(Chosen(key, value, why))


def in_yaml(config_yaml: str, chosen: Sequence[Chosen]) -> str:
    """The resolved configuration with the chosen values, as far as it has their keys."""
    content = yaml.safe_load(config_yaml)
    for each in chosen:
        owner, _, name = each.key.rpartition(".")
        part = content.get(owner) if owner else content
        if isinstance(part, dict) and name in part:
            part[name] = each.value.name if isinstance(each.value, Enum) else each.value
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def with_value(settings: S, key: str, value: Any) -> S:
    """`settings` with another value of a dotted key."""
    owner, _, name = key.rpartition(".")
    if not owner:
        return replace(settings, **{name: value})
    return replace(settings, **{owner: replace(getattr(settings, owner), **{name: value})})


def _rate(settings: TrainingSettings, shape: Shape) -> tuple[float, str]:
    column = 1 if settings.learns_from_rewards or settings.learns_from_pairs else 2
    row = next(row for row in RATES if shape.parameters <= row[0])
    count = shape.parameters
    size = f"{count / 1e9:.2g}B parameters" if count > 1e9 else f"{count / 1e6:.3g}M parameters"
    if settings.lora.enabled:
        return float(f"{TIMES_FOR_ADAPTER * row[column]:g}"), f"an adapter of {size}"
    return row[column], size


def _fill_gpu(choosing: _Choosing[Any], shape: Shape, gpu: Room) -> None:
    """Choose the completions in flight, and how trainer and engine share the memory of the GPU."""
    settings = choosing.settings
    engines = engines_beside(settings)
    if settings.uses_policy:
        most, of = _at_once(settings)
        limit = TOGETHER_IF_SMALL if shape.parameters <= SMALL_MODEL else TOGETHER
        choosing.take("policy.max_num_seqs", min(most, limit), of if most <= limit else f"{of}, in several waves")
    samples = settings.uses_policy and settings.policy.needs_vllm
    if samples and not (settings.trains and engines):
        choosing.take("policy.gpu_memory_utilization", ALONE, "it has its GPU for itself")
    if not settings.trains:
        return
    sized = bool(samples and engines and choosing.is_open("policy.gpu_memory_utilization"))
    may_sleep = sized and not settings.samples_elsewhere
    tried = _Choosing(choosing.settings)
    for (recomputes, sleeps), part, tokens in product(WAYS, CACHES, MICROBATCHES):
        if sleeps and not may_sleep:
            continue
        tried = _Choosing(choosing.settings)
        tried.take("model.activation_checkpointing", recomputes, "saves memory" if recomputes else "not needed")
        tried.take("policy.sleep", sleeps, "saves memory" if sleeps else "not needed")
        if sized:
            _size_engine(tried, shape, gpu, part)
        tried.take("tokens_per_microbatch", tokens, f"the most that fit {readable(gpu.free)} of the GPU")
        needed = MARGIN * peak(parts_of(work_of(tried.settings, shape, gpu_bytes=gpu.total)), on_gpu=True)
        if needed <= gpu.free:
            break
    for each in tried.chosen:
        choosing.take(each.key, each.value, each.why)


def _size_engine(tried: _Choosing[Any], shape: Shape, gpu: Room, part: int) -> None:
    """Choose the KV cache for a `part`-th of the completions in flight, and vLLM's share of the GPU."""
    settings = tried.settings
    number = work_of(settings, shape, gpu_bytes=gpu.total).sampler_bytes
    usual, longest = (
        settings.env.longest_conversation(prompt) for prompt in (COMMON_PROMPT, settings.env.max_prompt_tokens)
    )
    count, each = ceil(settings.policy.max_num_seqs / part), shape.kv_bytes(number)
    cache = max(count * conversation_bytes(usual, each), conversation_bytes(longest, each)) / 1e9
    tried.take("policy.kv_cache_gb", cache, f"room for {counted(count, 'conversation')} of {usual} tokens")
    held = shape.parameters * number + ENGINE_BYTES + tried.settings.policy.kv_cache_gb * 1e9
    share = min(1.0, max(0.01, ceil(100 * held / gpu.total) / 100))
    tried.take("policy.gpu_memory_utilization", share, f"weights, cache and {readable(ENGINE_BYTES)}")


def _at_once(settings: Any) -> tuple[int, str]:
    """The number of completions sampled together, and the reason for it."""
    if not settings.trains:
        return 10**9, "an evaluation's completions"
    samples, of_step, held_out = 1, 0, settings.eval
    if settings.learns_from_own:
        samples = samples_per_prompt(settings.eval.k, settings.eval.samples)
        of_step = settings.prompts_per_step * settings.group_size
    evaluated = (held_out.limit or settings.env.eval_limit) * samples if held_out.enabled else 0
    if of_step >= evaluated:
        return of_step, f"{of_step} completions a step"
    return evaluated, f"{evaluated} completions an evaluation"
