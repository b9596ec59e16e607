"""Settings that hold: each value that a command leaves open is chosen here, once, before anything is assembled.

    settings, changes = resolve(settings, device, shape)

What follows from the machine, the model or other settings is decided in this file alone, with the reason. Everything
behind it reads the settings as they are. Needs no torch, so a dry run resolves too; it does not know the precision yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from enum import Enum
from itertools import product
from math import ceil
from typing import Any, Generic, TypeVar

import yaml

from rlpost.errors import ConfigError
from rlpost.estimate.machine import Device, Room, chosen_policy, ranks_started
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
from rlpost.imports import is_installed
from rlpost.record import AS_BEGUN
from rlpost.settings import Autocast, DType, EvalSettings, ModelSettings, PolicySettings, SamplerCorrection
from rlpost.settings.commands import SampledSettings, TrainingSettings
from rlpost.settings.policy import Engine, ModelPolicySettings, Sharding, VLLMSettings
from rlpost.text import counted, readable

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
    """Fill in the open settings for `device` and a model of this `shape`; returns the settings and the changes.

    Without a `shape` the model's size is unknown, and what depends on it stays open. `kept` are the values, by key, of
    the run that is resumed or done again, which keeps its own; None for a new one. Raises ConfigError for a policy that
    several ranks cannot have.
    """
    resolving = _Resolving(settings)
    resolving.choose_policy()
    resolving.keep(kept or {})
    if shape is not None:
        resolving.choose_rate(shape)
    resolving.choose_lag(corrects_kernels=device.room is not None and kept is None)
    resolving.choose_evaluation()
    if device.room is not None and shape is not None:
        resolving.share_gpu(shape, device.room)
    resolving.choose_precision(device, kept)
    return resolving.settings, resolving.changes


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


def kept_of(model: ModelSettings, policy: PolicySettings, changes: Iterable[Change]) -> dict[str, str]:
    """The values that a run or an evaluation records, so that resuming and repeating it computes the same."""
    why = next((each.why for each in changes if each.key == AUTOCAST), "")
    return {
        AUTOCAST: model.autocast.value,
        SAMPLER: sampled_in(model, policy).value,
        "why": why,
        DAY: str(model.day),
    }


def today() -> str:
    """The current day."""
    return date.today().isoformat()


def _plain(value: Any) -> Any:
    """A value of a setting as config.yaml has it."""
    return value.name if isinstance(value, Enum) else value


class _Resolving(Generic[S]):
    """Settings in which open keys are being filled."""

    def __init__(self, settings: S) -> None:
        self.settings: Any = settings
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

    def choose_policy(self) -> None:
        """Choose the engine that samples, and with several ranks its process: vLLM makes its own process group."""
        sampler = self.settings.sampler
        if sampler is None:
            return
        policy = chosen_policy(sampler)
        if policy is not sampler:
            self.set("policy", policy, f"vllm is {'' if is_installed('vllm') else 'not '}installed")
        cluster = getattr(self.settings, "cluster", None)
        if cluster is None or (cluster.trainer_ranks or ranks_started()) == 1:
            return
        if isinstance(policy, VLLMSettings):
            if policy.engine is not Engine.own_process:
                self.set("policy.engine", Engine.own_process, "several ranks train")
        elif policy.shares_weights and cluster.sharding is Sharding.full and not self.settings.elsewhere:
            raise ConfigError(
                "policy=transformers samples from the trainer's model, which cluster.sharding=full divides: take "
                "policy=vllm or collector=async"
            )

    def keep(self, kept: Mapping[str, Any]) -> None:
        """Take the values that the run began with, and the day; a correction that was off follows from the lag anew."""
        for key in KEPT:
            value = kept.get(key)
            if isinstance(value, int | float | str) and (key, value) != (CORRECTION, SamplerCorrection.none.name):
                self.take(key, value, AS_BEGUN)
        self.take(DAY, kept.get(DAY) or today(), AS_BEGUN if kept.get(DAY) else "today")

    def choose_rate(self, shape: Shape) -> None:
        """Choose the learning rate by the size of the model."""
        if not self.is_open(RATE):
            return
        size = parameters_text(shape.parameters)
        rate = next(rate for most, rate in self.settings.rates_by_size if shape.parameters <= most)
        if self.settings.lora.enabled:
            self.take(RATE, float(f"{TIMES_FOR_ADAPTER * rate:g}"), f"an adapter of {size}")
        self.take(RATE, rate, size)

    def choose_lag(self, *, corrects_kernels: bool) -> None:
        """Choose the bound on stale completions and their correction, or that of the kernels of an engine on a GPU."""
        if self.is_open(LAG):
            how = "beside" if self.settings.lag else "in turn with"
            self.take(LAG, self.settings.lag, f"completions are sampled {how} training")
        if not self.is_open(CORRECTION):
            return
        if corrects_kernels and isinstance(self.settings.policy, VLLMSettings):
            why = "vLLM's kernels round differently from the trainer's"
            self.take(CORRECTION, SamplerCorrection.tis_token, why)
        stale = self.settings.lag > 0
        usual = self.settings.loss.corrected(stale=stale).sampler_correction
        self.take(CORRECTION, usual, f"completions {'may be stale' if stale else 'are fresh'}")

    def choose_evaluation(self) -> None:
        """Leave out evaluations that nothing would score: those of a distillation without rewards."""
        settings = self.settings
        if isinstance(settings, SampledSettings) and settings.eval.enabled and not settings.env.scores:
            why = "without env.reward nothing scores a reply; kl/teacher shows what is learned"
            self.set("eval.enabled", False, why)

    def choose_precision(self, device: Device, kept: Mapping[str, Any] | None) -> None:
        """Choose the formats of products and sampling; an unknown device leaves them open unless they are `kept`."""
        settings, policy = self.settings, self.settings.policy
        samples = isinstance(settings.sampler, ModelPolicySettings)
        recorded = kept if kept is not None and kept.get(AUTOCAST) in ("none", "bfloat16") else None
        if device.choose is not None:
            found = device.choose(settings.model, policy, kept=recorded, trains=settings.trains, samples=samples)
            self.set(AUTOCAST, found.autocast, found.why, found.warning or "")
            if isinstance(policy, VLLMSettings):
                self.set(SAMPLER, found.sampler, found.why)
        elif recorded is not None and settings.model.autocast is Autocast.auto:
            self.set(AUTOCAST, Autocast(recorded[AUTOCAST]), AS_BEGUN)

    # How the memory of a GPU is shared

    def share_gpu(self, shape: Shape, gpu: Room) -> None:
        """Choose the completions in flight, and how trainer and engine share the memory of the GPU."""
        settings, trains = self.settings, self.settings.trains
        engines, samples = engines_beside(settings), False
        if settings.sampler is not None:
            most, of = settings.completions_at_once
            limit = TOGETHER_IF_SMALL if shape.parameters <= SMALL_MODEL else TOGETHER
            self.take(AT_ONCE, min(most, limit), of if most <= limit else f"{of}, in several waves")
            samples = isinstance(settings.policy, VLLMSettings)
        if samples and not (trains and engines):
            self.take(SHARE, ALONE, "it has its GPU for itself")
        if not trains:
            return
        sized = bool(samples and engines and self.is_open(SHARE))
        may_sleep = sized and not settings.elsewhere
        tried = _Resolving(self.settings)
        for (recomputes, sleeps), part, tokens in product(WAYS, CACHES, MICROBATCHES):
            if sleeps and not may_sleep:
                continue
            tried = _Resolving(self.settings)
            tried.take(RECOMPUTES, recomputes, "saves memory" if recomputes else "not needed")
            tried.take(SLEEP, sleeps, "saves memory" if sleeps else "not needed")
            if sized:
                tried.size_engine(shape, gpu, part)
            tried.take(MICROBATCH, tokens, f"the most that fit {readable(gpu.free)} of the GPU")
            needed = MARGIN * peak(parts_of(work_of(tried.settings, shape, gpu_bytes=gpu.total)), on_gpu=True)
            if needed <= gpu.free:
                break
        for each in tried.changes:
            self.take(each.key, each.value, each.why)

    def size_engine(self, shape: Shape, gpu: Room, part: int) -> None:
        """Choose the KV cache for a `part`-th of the completions in flight, and vLLM's share of the GPU."""
        env, policy = self.settings.env, self.settings.policy
        number = work_of(self.settings, shape, gpu_bytes=gpu.total).sampler_number
        usual, longest = (env.longest_conversation(prompt) for prompt in (COMMON_PROMPT, env.max_prompt_tokens))
        count, each = ceil(policy.max_num_seqs / part), shape.kv_bytes(number)
        cache = max(count * conversation_bytes(usual, each), conversation_bytes(longest, each)) / 1e9
        self.take(CACHE, cache, f"room for {counted(count, 'conversation')} of {usual} tokens")
        held = shape.parameters * number + ENGINE_BYTES + self.settings.policy.kv_cache_gb * 1e9
        share = min(1.0, max(0.01, ceil(100 * held / gpu.total) / 100))
        self.take(SHARE, share, f"weights, cache and {readable(ENGINE_BYTES)}")
