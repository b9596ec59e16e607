"""Settings that hold: each value that a command leaves open is chosen here, once, before anything is assembled.

    settings, changes = resolve(settings, device, shape)

What follows from the machine, the model or other settings is decided in this file alone, with the reason. Everything
behind it reads the settings as they are. Needs no torch, so a dry run resolves too; it does not know the precision yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from enum import Enum
from itertools import product
from math import ceil
from typing import Any, Generic, TypeVar

import yaml

from rlpost.errors import ConfigError
from rlpost.estimate.machine import Device, Room, chosen_policy
from rlpost.estimate.needs import (
    COMMON_PROMPT,
    ENGINE_BYTES,
    MARGIN,
    conversation_bytes,
    engines_beside,
    parts_of,
    peak,
    work_of,
)
from rlpost.estimate.shape import Shape, parameters_text
from rlpost.settings import Autocast, DType, EvalSettings, ModelSettings, PolicySettings, SamplerCorrection
from rlpost.settings.commands import TrainingSettings
from rlpost.settings.policy import Engine, Sharding, VLLMSettings
from rlpost.text import counted, readable

# parameters up to which a rate for sampled completions and pairs holds, and one for demonstrations. For 135M they are
# rlpost's own; from rewards verl, TRL and prime-rl train 0.5B and more with about 1e-6, and fine-tune with 1e-5
RATES = ((2e8, 2e-5, 2e-5), (1e9, 2e-6, 2e-5), (float("inf"), 1e-6, 1e-5))
TIMES_FOR_ADAPTER = 10
MICROBATCHES = (32768, 16384, 8192, 4096, 2048)  # tokens, on a GPU
CACHES = (1, 2, 4, 8, 16)  # the KV cache holds the completions in flight, divided by this
WAYS = ((False, False), (True, False), (False, True), (True, True))  # activation checkpointing, an engine that sleeps
SMALL_MODEL, TOGETHER, TOGETHER_IF_SMALL = 2e9, 512, 1024  # parameters; completions in flight at once on a GPU
ALONE = 0.9  # share of its GPU for an engine that has it for itself
AUTOCAST, SAMPLER, DAY = "model.autocast", "policy.dtype", "model.day"
CORRECTION, LAG, SLEEP = "loss.sampler_correction", "max_policy_lag", "policy.sleep"
MICROBATCH, AT_ONCE, SHARE = "tokens_per_microbatch", "policy.max_num_seqs", "policy.gpu_memory_utilization"
RECOMPUTES, CACHE, RATE = "model.activation_checkpointing", "policy.kv_cache_gb", "optim.lr"
KEPT = (RATE, CORRECTION, RECOMPUTES, MICROBATCH, AT_ONCE, CACHE, SHARE, SLEEP)  # by a run that is resumed
S = TypeVar("S", bound=TrainingSettings | EvalSettings)


@dataclass(frozen=True)
class Change:
    """A setting that `resolve` has set, and why; `note` warns the user."""

    key: str
    value: Any
    why: str
    note: str = ""

    def __str__(self) -> str:
        shown = f"{self.value:.3g}" if isinstance(self.value, float) else _plain(self.value)
        return f"{self.key}={str(shown).lower() if isinstance(shown, bool) else shown}"


def resolve(
    settings: S, device: Device, shape: Shape | None, kept: Mapping[str, Any] | None = None
) -> tuple[S, list[Change]]:
    """The settings that hold on `device` for a model of this `shape`, and what was changed.

    Without a `shape` the model's size is unknown, and what depends on it stays open. `kept` are the values, by key, of
    the run that is resumed or done again, which keeps its own; None for a new one. Raises ConfigError for a policy that
    several ranks cannot have.
    """
    changing = _Changing(settings)
    if settings.uses_policy:
        policy = chosen_policy(settings.policy)
        if policy is not settings.policy:
            changing.set("policy", policy, f"{'vllm is' if policy.needs_vllm else 'vllm is not'} installed")
    for key in KEPT:
        value = kept.get(key) if kept is not None else None
        if isinstance(value, int | float | str) and (key, value) != (CORRECTION, SamplerCorrection.none.name):
            changing.take(key, value, "as the run began")
    changing.take(DAY, (kept or {}).get(DAY) or date.today().isoformat(), "today")
    _choose_for_training(changing, shape, is_new=kept is None, on_gpu=device.room is not None)
    if device.room is not None and shape is not None:
        _fill_gpu(changing, shape, device.room)
    _set_precision(changing, device, kept)
    return changing.settings, changing.changes


def in_yaml(config_yaml: str, changes: Iterable[Change]) -> str:
    """The configuration with the values that `resolve` has set, as far as it has their keys."""
    content = yaml.safe_load(config_yaml)
    for each in changes:
        owner, _, name = each.key.rpartition(".")
        part = content.get(owner) if owner else content
        if isinstance(part, dict) and name in part and not isinstance(part[name], dict):
            part[name] = _plain(each.value)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def products_in(model: ModelSettings) -> DType:
    """The dtype of the products of a model whose autocast is resolved."""
    return DType.bfloat16 if model.autocast is Autocast.bfloat16 else model.dtype


def sampled_in(model: ModelSettings, policy: PolicySettings) -> DType:
    """The dtype in which a resolved policy samples from `model`."""
    return policy.dtype if isinstance(policy, VLLMSettings) else products_in(model)


def kept_of(settings: TrainingSettings | EvalSettings, changes: Iterable[Change]) -> dict[str, str]:
    """The values that a run or an evaluation records, so that resuming and repeating it computes the same."""
    model, why = settings.model, next((each.why for each in changes if each.key == AUTOCAST), "")
    sampler = sampled_in(model, settings.policy)
    return {AUTOCAST: model.autocast.value, SAMPLER: sampler.value, "why": why, DAY: str(model.day)}


class _Changing(Generic[S]):
    """Settings in which open keys are being filled."""

    def __init__(self, settings: S) -> None:
        self.settings = settings
        self.changes: list[Change] = []

    def is_open(self, key: str) -> bool:
        """Whether these settings have `key`, and no value for it."""
        owner, _, name = key.rpartition(".")
        return getattr(getattr(self.settings, owner, None) if owner else self.settings, name, key) is None

    def take(self, key: str, value: Any, why: str) -> None:
        """Set `key` if it is open."""
        if self.is_open(key):
            self.set(key, SamplerCorrection[value] if key == CORRECTION and isinstance(value, str) else value, why)

    def set(self, key: str, value: Any, why: str, note: str = "") -> None:
        """Set `key`, open or not."""
        owner, _, name = key.rpartition(".")
        values = {owner: replace(getattr(self.settings, owner), **{name: value})} if owner else {name: value}
        self.settings = replace(self.settings, **values)
        self.changes.append(Change(key, value, why, note))


def _plain(value: Any) -> Any:
    """A value of a setting as config.yaml has it."""
    return value.name if isinstance(value, Enum) else value


def _choose_for_training(changing: _Changing[Any], shape: Shape | None, *, is_new: bool, on_gpu: bool) -> None:
    """Choose the rate, the bound on stale completions and their correction, and where an engine runs."""
    settings = changing.settings
    if shape is not None and changing.is_open(RATE):
        changing.take(RATE, *_rate(settings, shape))
    if changing.is_open(LAG):
        how = "beside" if settings.lag else "in turn with"
        changing.take(LAG, settings.lag, f"completions are sampled {how} training")
    if changing.is_open(CORRECTION):
        usual = settings.loss.corrected(stale=settings.lag > 0).sampler_correction
        if on_gpu and is_new and settings.policy.needs_vllm:
            why = "vLLM's kernels round differently from the trainer's"
            changing.take(CORRECTION, SamplerCorrection.tis_token, why)
        changing.take(CORRECTION, usual, "completions may be stale" if settings.lag else "completions are fresh")
    if settings.learns_from_own and settings.eval.enabled and not settings.env.scores:
        why = "without env.reward nothing scores a reply; kl/teacher shows what is learned"
        changing.set("eval.enabled", False, why)
    if settings.trains and settings.uses_policy and (settings.cluster.trainer_ranks or ranks_started()) > 1:
        _set_engine_beside_ranks(changing)


def ranks_started() -> int:
    """How many processes torchrun has started for this training; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _set_engine_beside_ranks(changing: _Changing[Any]) -> None:
    """With several ranks vLLM has a process of its own: it makes its own process group."""
    settings = changing.settings
    if isinstance(settings.policy, VLLMSettings):
        if settings.policy.engine is not Engine.own_process:
            changing.set("policy.engine", Engine.own_process, "several ranks train")
    elif settings.policy.is_model and settings.cluster.sharding is Sharding.full and not settings.samples_elsewhere:
        raise ConfigError(
            "policy=transformers samples from the trainer's model, which cluster.sharding=full divides: take "
            "policy=vllm or collector=async"
        )


def _set_precision(changing: _Changing[Any], device: Device, kept: Mapping[str, Any] | None) -> None:
    settings = changing.settings
    policy = settings.policy
    recorded = kept if kept is not None and kept.get(AUTOCAST) in ("none", "bfloat16") else None
    found = device.precision(
        settings.model,
        policy,
        kept=recorded,
        trains=settings.trains,
        samples=settings.uses_policy and policy.is_model,
    )
    if found is None:
        if recorded is not None and settings.model.autocast is Autocast.auto:
            changing.set(AUTOCAST, Autocast(recorded[AUTOCAST]), "as the run began")
        return
    changing.set(AUTOCAST, found.autocast, found.why, found.warning or "")
    if isinstance(policy, VLLMSettings):
        changing.set(SAMPLER, found.sampler, found.why)


def _rate(settings: TrainingSettings, shape: Shape) -> tuple[float, str]:
    column = 1 if settings.learns_from_rewards or settings.learns_from_pairs else 2
    row = next(row for row in RATES if shape.parameters <= row[0])
    size = parameters_text(shape.parameters)
    if settings.lora.enabled:
        return float(f"{TIMES_FOR_ADAPTER * row[column]:g}"), f"an adapter of {size}"
    return row[column], size


# How the memory of a GPU is shared


def _fill_gpu(changing: _Changing[Any], shape: Shape, gpu: Room) -> None:
    """Choose the completions in flight, and how trainer and engine share the memory of the GPU."""
    settings = changing.settings
    engines = engines_beside(settings)
    if settings.uses_policy:
        most, of = settings.completions_at_once
        limit = TOGETHER_IF_SMALL if shape.parameters <= SMALL_MODEL else TOGETHER
        changing.take(AT_ONCE, min(most, limit), of if most <= limit else f"{of}, in several waves")
    samples = settings.uses_policy and settings.policy.needs_vllm
    if samples and not (settings.trains and engines):
        changing.take(SHARE, ALONE, "it has its GPU for itself")
    if not settings.trains:
        return
    sized = bool(samples and engines and changing.is_open(SHARE))
    may_sleep = sized and not settings.samples_elsewhere
    tried = _Changing(changing.settings)
    for (recomputes, sleeps), part, tokens in product(WAYS, CACHES, MICROBATCHES):
        if sleeps and not may_sleep:
            continue
        tried = _Changing(changing.settings)
        tried.take(RECOMPUTES, recomputes, "saves memory" if recomputes else "not needed")
        tried.take(SLEEP, sleeps, "saves memory" if sleeps else "not needed")
        if sized:
            _size_engine(tried, shape, gpu, part)
        tried.take(MICROBATCH, tokens, f"the most that fit {readable(gpu.free)} of the GPU")
        needed = MARGIN * peak(parts_of(work_of(tried.settings, shape, gpu_bytes=gpu.total)), on_gpu=True)
        if needed <= gpu.free:
            break
    for each in tried.changes:
        changing.take(each.key, each.value, each.why)


def _size_engine(tried: _Changing[Any], shape: Shape, gpu: Room, part: int) -> None:
    """Choose the KV cache for a `part`-th of the completions in flight, and vLLM's share of the GPU."""
    settings = tried.settings
    number = work_of(settings, shape, gpu_bytes=gpu.total).sampler_bytes
    usual, longest = (
        settings.env.longest_conversation(prompt) for prompt in (COMMON_PROMPT, settings.env.max_prompt_tokens)
    )
    count, each = ceil(settings.policy.max_num_seqs / part), shape.kv_bytes(number)
    cache = max(count * conversation_bytes(usual, each), conversation_bytes(longest, each)) / 1e9
    tried.take(CACHE, cache, f"room for {counted(count, 'conversation')} of {usual} tokens")
    held = shape.parameters * number + ENGINE_BYTES + tried.settings.policy.kv_cache_gb * 1e9
    share = min(1.0, max(0.01, ceil(100 * held / gpu.total) / 100))
    tried.take(SHARE, share, f"weights, cache and {readable(ENGINE_BYTES)}")
