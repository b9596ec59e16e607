"""Memory and disk of a training by estimate, and whether they fit the machine.

`TERMS` is the table of all memory: a name, a formula in bytes over the model's shape and the settings, where it is
held, in which phase of a step, and with which sampler. A training that cannot fit is refused, with the settings that
would help: those with which the same table gives less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil
from pathlib import Path
from typing import Any

from rlpost.errors import ResourceError
from rlpost.estimate.machine import Room, chosen_policy, disk, host_memory, ranks_started
from rlpost.estimate.shape import Shape, shape_of_model
from rlpost.files import memory_folder
from rlpost.settings import (
    AsyncCollectorSettings,
    Autocast,
    DType,
    Engine,
    EnvSettings,
    FineTuningSettings,
    Sharding,
    VLLMSettings,
)
from rlpost.settings.commands import SampledSettings
from rlpost.settings.env import Turns
from rlpost.settings.policy import ModelPolicySettings
from rlpost.text import readable

TrainingSettings = SampledSettings | FineTuningSettings

COMMON_PROMPT = 256  # tokens; limits on prompts are far above what most have
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROGRAM = 500_000_000  # bytes of Python, torch and everything that a training imports
VLLM_PROGRAM = 430_000_000  # bytes that vLLM adds
LOGITS_TOGETHER, LOGITS_ON_GPU = 256, 1024  # tokens whose logits exist at once while training
ON_GPU, FEWEST_ON_CPU, MOST_ON_CPU = 16384, 384, 2048  # tokens_per_microbatch by default
KV_BLOCK, GPU_KV_BLOCK = 32, 16  # tokens in one block of vLLM's KV cache; a conversation takes whole blocks
LARGEST_KV_CACHE = 10**9  # bytes: the most by default on a CPU
USUAL_SHARE = 0.4  # of the GPU for vLLM, where neither its share nor its cache is given
ENGINE_BYTES = 2 * 10**9  # that vLLM takes on a GPU beside weights and cache: activations and captured graphs


# The training, as the formulas read it


# the samplers, which hold different things: vLLM may leave the GPU while the model learns; transformers in other
# processes has a copy of the weights
ON_CPU, BESIDE, SLEEPING, SHARED, COPIED = "vllm-cpu", "vllm", "vllm that sleeps", "transformers", "transformers apart"


@dataclass(frozen=True)
class Work:
    """Everything that the estimate depends on."""

    shape: Shape
    on_gpu: bool
    number: int  # bytes of one number of the trainer's weights
    autocast: bool
    lora: tuple[int, Sequence[str] | None] | None  # rank and names of layers; None: all weights are trained
    small_moments: bool  # the optimizer's running means are in 8 bits
    reference: bool  # a second copy of the starting weights
    moves: bool  # the reference moves, so checkpoints hold it
    teacher: int  # parameters of another model that the loss compares with; 0: there is none
    two_logits: bool  # the loss compares two models over the whole vocabulary
    sampler: str  # one of those above; empty: no model samples
    sampler_number: int  # bytes of one number of vLLM's weights
    kv_cache_bytes: int  # of each engine of vLLM; on a GPU with its activations
    engines: int  # of vLLM, on the GPU of rank 0
    pushes: bool  # to vLLM in another process
    together: int  # completions in flight at once
    longest: int  # tokens of the longest conversation or sample
    microbatch: int  # tokens of one forward and backward
    recomputed: bool  # activation checkpointing
    kept_models: int | None  # checkpoints without state beside the newest two; None: one is saved, at the end
    ranks: int  # of the trainer
    processes: int  # that have all of rlpost in memory
    is_divided: bool  # each rank holds its share of the model
    offloaded: bool  # the shares are in host memory between uses

    @property
    def has_vllm(self) -> bool:
        """Whether vLLM samples."""
        return self.sampler in (ON_CPU, BESIDE, SLEEPING)

    @property
    def trained(self) -> int:
        """Parameters that take a gradient."""
        return self.shape.parameters if self.lora is None else self.shape.adapter_parameters(*self.lora)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that take a gradient: an adapter is in float32."""
        return self.trained * (self.number if self.lora is None else 4)


def work_of(settings: TrainingSettings, shape: Shape, *, gpu_bytes: int | None) -> Work:
    """The work of `settings`; `gpu_bytes` None: trained on the CPU."""
    model, cluster, lora, env = settings.model, settings.cluster, settings.lora, settings.env
    policy, on_gpu = chosen_policy(settings.policy), gpu_bytes is not None
    own = settings if isinstance(settings, SampledSettings) else None  # trained on its own completions
    vllm = policy if isinstance(policy, VLLMSettings) and settings.sampler is not None else None
    elsewhere = settings.elsewhere != ""

    longest, rows, group = settings.lengths(COMMON_PROMPT)
    row = longest
    if own is not None:
        row += (again := later_prompts(env))
        group += own.group_size * again
    unset = ON_GPU if on_gpu else min(MOST_ON_CPU, max(FEWEST_ON_CPU, group))

    teacher, compares = 0, settings.needs_reference
    if settings.reference_path is not None:  # of an unknown size: taken to be as large as the model
        teacher = (shape_of_model(settings.reference_path) or shape).parameters
    live = settings.reference_hint is not None  # the trained model itself
    ranks = cluster.trainer_ranks or ranks_started()
    every, keep_last = settings.checkpoint.every, settings.checkpoint.keep_last
    many = keep_last + 1  # if the number of steps follows from data that is not read yet
    saves = 1 if every == 0 else ceil(settings.steps / every) if settings.steps else many
    keeps_best = settings.eval.enabled and settings.eval.every > 0

    work = Work(
        shape=shape,
        on_gpu=on_gpu,
        number=BYTES.get(model.dtype.value, 4),
        autocast=model.autocast is not Autocast.none,
        lora=(lora.rank, lora.target_modules) if lora.enabled else None,
        small_moments=settings.optim.eight_bit,
        reference=compares and not (lora.enabled or teacher or live),
        moves=settings.moves_reference,
        teacher=teacher,
        two_logits=getattr(settings.loss, "whole_vocabulary", False),
        sampler=(COPIED if elsewhere else SHARED) if isinstance(settings.sampler, ModelPolicySettings) else "",
        sampler_number=0,
        kv_cache_bytes=0,
        engines=engines_beside(settings),
        pushes=vllm is not None and (elsewhere or ranks > 1 or vllm.engine is Engine.own_process),
        together=min(rows, getattr(policy, "at_once", rows)),
        longest=longest,
        microbatch=min(max(settings.tokens_per_microbatch or unset, row), rows * row),
        recomputed=bool(model.activation_checkpointing),
        kept_models=None if saves == 1 else min(keep_last, saves - 1) - 1 + keeps_best,
        ranks=ranks,
        processes=ranks + elsewhere,
        is_divided=ranks > 1 and cluster.sharding is Sharding.full,
        offloaded=ranks > 1 and cluster.cpu_offload,
    )
    # on a CPU it may be chosen when the run starts: count the one that takes more
    is_open = model.autocast is Autocast.auto and not on_gpu
    works = [replace(work, autocast=False), work] if is_open else [work]
    if vllm is not None:
        works = [_with_vllm(each, vllm, model.dtype, gpu_bytes, env.longest_conversation()) for each in works]
    return max(works, key=lambda each: peak(parts_of(each), on_gpu=on_gpu))


def _with_vllm(work: Work, policy: VLLMSettings, dtype: DType, gpu_bytes: int | None, longest: int) -> Work:
    """The work with vLLM as its sampler, whose conversations have at most `longest` tokens."""
    trainers = DType.bfloat16 if work.autocast else dtype
    number = BYTES[(trainers if policy.dtype is DType.auto else policy.dtype).value]
    if gpu_bytes is None:
        cache, _ = kv_cache_bytes(policy, work.shape.kv_bytes(number), longest)
    elif policy.kv_cache_gb is not None:
        cache = ENGINE_BYTES + round(policy.kv_cache_gb * 10**9)
    else:
        share = int((policy.gpu_memory_utilization or USUAL_SHARE) * gpu_bytes)
        cache = max(0, share - work.shape.parameters * number)
    sampler = ON_CPU if gpu_bytes is None else SLEEPING if policy.sleep else BESIDE
    return replace(work, sampler=sampler, sampler_number=number, kv_cache_bytes=cache)


def later_prompts(env: EnvSettings) -> int:
    """Tokens of the prompts of a conversation's later turns, where each is rendered anew and a row holds them all."""
    if env.history is not Turns.as_template:
        return 0
    later = env.most_turns - 1
    earlier = later * env.most_turns // 2  # turns before each of them, in all: every prompt holds those before it
    prompt = min(env.max_prompt_tokens, COMMON_PROMPT)
    return later * prompt + earlier * env.max_completion_tokens + (earlier - later) * env.max_observation_tokens


# The table


class When(Enum):
    """The phases of a step in which an item of memory is held."""

    always = "always"
    training = "training"
    sampling = "sampling"


class Where(Enum):
    """The place of an item of memory, and how often it is held: a GPU's is rank 0's, a host's the sum of all ranks."""

    model = "with the weights: a copy, or a share, of each rank; offloaded ones are on the host"
    rank = "where each rank computes"
    first = "where rank 0 computes, once"
    host = "on the host, once"


@dataclass(frozen=True)
class Term:
    """An item of memory: its formula in bytes, and where and when it is held."""

    name: str
    bytes: Callable[[Work], int]
    where: Where
    when: When = When.always
    samplers: Sequence[str] = ()  # that have it; empty: every training has it


def _gathered(work: Work) -> int:
    """The layers that a rank holds whole besides its share: two, one of them in transfer, and all outside layers."""
    if not work.is_divided:
        return 0
    shape = work.shape
    outside = min(shape.parameters, 2 * shape.vocab * shape.hidden)
    layer = (shape.parameters - outside) // max(1, shape.layers)
    return (outside + 2 * layer) * work.number * 2  # and their gradients


def _cast_weights(work: Work) -> int:
    """The copies of weights that autocast keeps during a forward and backward; a GPU's shards come as such."""
    comes_so = work.is_divided and work.on_gpu
    return 2 * work.shape.parameters if work.autocast and work.number == 4 and not comes_so else 0


def _head_gradient(work: Work) -> int:
    """The head's gradient in float32 from one microbatch, until it is added to those of the others.

    Where the head is the embedding too, that is at the end of the backward pass.
    """
    return 0 if work.lora is not None or work.is_divided else 4 * work.shape.vocab * work.shape.hidden


def _activations(work: Work) -> int:
    """The tensors that the forward pass keeps for the backward pass, and the logits of one chunk of tokens.

    Near the tensors that layers of Llama, Qwen and Gemma 3 save, counted by hooks: within 15%. A CPU's attention is in
    float32, with the keys repeated for all heads, and keeps the weight of each key that a token reads. A comparison of
    two models' logits has three more arrays of float32 at once, for their mixture.
    """
    shape, number = work.shape, work.number
    a_layer = (8 if work.lora is None else 4) * shape.norm_width  # frozen norms keep less
    if work.autocast:
        a_layer += 10 * shape.hidden + 2 * shape.q_width + 8 * shape.intermediate
    else:
        a_layer += number * (2 * shape.hidden + shape.q_width + 4 * shape.intermediate)
    if not work.on_gpu:
        a_layer += 18 * shape.q_width + 4 * shape.heads * min(work.longest, COMMON_PROMPT)
    elif work.autocast:
        a_layer += 6 * shape.q_width + 6 * shape.kv_width
    else:
        a_layer += number * (5 * shape.q_width + 4 * shape.kv_width)
    kept = a_layer + shape.layers * shape.hidden * number if work.recomputed else shape.layers * a_layer
    chunk = min(work.microbatch, LOGITS_ON_GPU if work.on_gpu else LOGITS_TOGETHER)
    logits = chunk * shape.vocab * (4 + 4 + number + (12 if work.two_logits else 0))
    return kept * work.microbatch + logits


def _vllm_weights(work: Work) -> int:
    """The weights of all engines on the GPU of rank 0; on a CPU of one, which packs its head a second time."""
    parameters = work.shape.parameters * work.sampler_number
    if not work.on_gpu:
        return parameters + work.shape.vocab * work.shape.hidden * work.sampler_number
    return work.engines * parameters


def _vllm_cache(work: Work) -> int:
    """The KV caches; on a GPU with the engines' activations, and what their share leaves beside their weights."""
    return (work.engines if work.on_gpu else 1) * work.kv_cache_bytes


def _sampling(work: Work) -> int:
    """The KV cache, the logits and the cast weights of sampling with transformers."""
    cache = work.shape.kv_bytes(2 if work.autocast else work.number) * work.together * work.longest
    return cache + 3 * 4 * work.shape.vocab * work.together + _cast_weights(work)


def _moments(work: Work) -> int:
    """The optimizer's two running means."""
    return 2 * (work.trained if work.small_moments else work.trained_bytes)


TERMS = (
    Term("weights", lambda w: w.shape.parameters * w.number, Where.model),
    Term("adapter", lambda w: w.trained_bytes if w.lora else 0, Where.model),
    Term("gradients", lambda w: w.trained_bytes, Where.model, When.training),
    Term("moments", _moments, Where.model),
    Term("reference", lambda w: w.shape.parameters * w.number if w.reference else 0, Where.model),
    Term("teacher", lambda w: w.teacher * w.number, Where.model),
    Term("gathered layers", _gathered, Where.rank),
    Term("sampler", _vllm_weights, Where.first, samplers=(ON_CPU, BESIDE)),
    Term("its KV cache", _vllm_cache, Where.first, When.sampling, samplers=(ON_CPU,)),
    Term("its KV cache", _vllm_cache, Where.first, samplers=(BESIDE,)),
    Term("sampler, awake", lambda w: _vllm_weights(w) + _vllm_cache(w), Where.first, When.sampling, (SLEEPING,)),
    Term("sampler, asleep", _vllm_weights, Where.host, samplers=(SLEEPING,)),
    Term("sampling", _sampling, Where.first, When.sampling, samplers=(SHARED,)),
    Term("sampler", lambda w: w.shape.parameters * w.number, Where.first, samplers=(COPIED,)),
    Term("sampling", _sampling, Where.first, samplers=(COPIED,)),
    Term("cast weights", _cast_weights, Where.rank, When.training),
    Term("head's gradient", _head_gradient, Where.rank, When.training),
    Term("activations", _activations, Where.rank, When.training),
    Term("program", lambda w: PROGRAM * w.processes + VLLM_PROGRAM * w.has_vllm, Where.host),
)
FIXED = ("weights", "adapter", "gradients", "moments", "reference", "teacher", "sampler")  # depend on no length


@dataclass(frozen=True)
class Part:
    """One item of memory as it is held: on the GPU or the host, and when."""

    name: str
    bytes: int
    on_gpu: bool
    when: When = When.always


def parts_of(work: Work) -> list[Part]:
    """The memory of `work`, item by item, without the items that it does not need."""
    gpu, ranks = work.on_gpu, work.ranks
    on_gpu = gpu and not work.offloaded
    # each rank holds a copy or its share; on a GPU rank 0's counts, on a CPU those of all ranks
    copies = (1 if on_gpu else ranks) / (ranks if work.is_divided else 1)
    held = {
        Where.model: (copies, on_gpu),
        Where.rank: (1 if gpu else ranks, gpu),
        Where.first: (1, gpu),
        Where.host: (1, False),
    }
    parts = []
    for term in TERMS:
        if not term.samplers or work.sampler in term.samplers:
            times, there = held[term.where]
            parts.append(Part(term.name, round(times * term.bytes(work)), there, term.when))
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
    """Bytes that do not depend on lengths or batches: weights, their copies, gradients and moments.

    A CPU's copies for autocast do not count: `model.autocast` decides on them when the run starts.
    """
    fixed = (*FIXED, "cast weights") if on_gpu else FIXED
    return sum(part.bytes for part in parts if part.on_gpu == on_gpu and part.name in fixed)


def longest_that_fits(work: Work, room: int, *, on_gpu: bool) -> int:
    """Tokens of the longest sequence whose forward and backward fit `room` bytes, by estimate; 0 if none does."""

    def size(tokens: int) -> int:
        return peak(parts_of(replace(work, longest=tokens, microbatch=tokens)), on_gpu=on_gpu)

    # the first that does not fit, less one: the size grows with the length
    return bisect_right(range(work.longest + 1), room, lo=1, key=size) - 1


def checkpoint_bytes(work: Work) -> tuple[int, int]:
    """(bytes of a whole checkpoint, bytes of one without the moments)."""
    adapter = work.trained_bytes if work.lora else 0
    model = (1 + work.moves) * work.shape.parameters * work.number + adapter
    return model + _moments(work), model


def disk_of(work: Work) -> int:
    """Bytes of checkpoints at the worst moment: a new one is complete before its predecessor loses its state."""
    whole, model = checkpoint_bytes(work)
    return whole if work.kept_models is None else 2 * whole + work.kept_models * model


# The engine's memory, as others ask for it


def kv_cache_bytes(policy: VLLMSettings, each: int, longest: int) -> tuple[int, int]:
    """(bytes of vLLM's KV cache on a CPU, bytes of one conversation of `longest` tokens of `each` bytes).

    The cache's size is `policy.kv_cache_gb`, or by default the size of all conversations that run at once.
    """
    conversation = conversation_bytes(longest, each, KV_BLOCK)
    spare = KV_BLOCK * each  # vLLM reserves one block
    least = conversation + spare
    if policy.kv_cache_gb is not None:
        return round(policy.kv_cache_gb * 10**9), least
    return max(least, min(LARGEST_KV_CACHE, policy.at_once * conversation + spare)), least


def conversation_bytes(longest: int, each: int, block: int = GPU_KV_BLOCK) -> int:
    """Bytes of a conversation of `longest` tokens in vLLM's KV cache, a token in `each` bytes."""
    return ceil(longest / block) * block * each


def engines_beside(settings: Any) -> int:
    """How many engines sample on the GPU on which rank 0 trains."""
    if not settings.elsewhere:
        return 1
    if settings.cluster.elsewhere:
        return 0
    collector = settings.collector
    assert isinstance(collector, AsyncCollectorSettings)
    return int(0 in collector.gpus) if collector.gpus else collector.players


def share_beside(settings: Any) -> float:
    """The share of the GPU of rank 0 that engines in other processes hold while the model learns."""
    policy = None if settings.sampler is None else chosen_policy(settings.sampler)
    if not isinstance(policy, VLLMSettings) or policy.sleep:
        return 0.0
    if not settings.elsewhere and policy.engine is Engine.in_process:
        return 0.0
    return engines_beside(settings) * (policy.gpu_memory_utilization or USUAL_SHARE)


# Whether it fits the machine

MARGIN = 1.2  # a training needs at most this times the estimate
SPARE = 2.0  # with this times the estimate free, a run keeps freed memory between phases, which saves time
WORTH_SAVING = 0.02  # share of the estimate from which a setting is advised


def lighter(work: Work) -> list[tuple[str, Work]]:
    """Settings that need less, in the order in which to try them, each with the work that results."""
    few = 2048 if work.on_gpu else 512
    tried: list[tuple[str, bool, dict[str, Any]]] = [
        (f"tokens_per_microbatch={few}", work.microbatch > few, {"microbatch": few}),
        ("model.activation_checkpointing=true", True, {"recomputed": True}),
        ("policy.sleep=true", work.sampler == BESIDE, {"sampler": SLEEPING}),
        ("optim=adamw_8bit", work.lora is None and not work.is_divided, {"small_moments": True}),
        ("lora.enabled=true", work.lora is None and not work.moves, {"lora": (16, None), "reference": False}),
        ("policy=transformers", work.has_vllm, {"sampler": SHARED}),
        ("model.dtype=bfloat16", work.number == 4, {"number": 2, "autocast": False}),
        ("cluster.sharding=full", work.ranks > 1 and not work.small_moments, {"is_divided": True}),
        ("cluster.cpu_offload=true", work.on_gpu and work.is_divided, {"offloaded": True}),
    ]
    return [(word, replace(work, **values)) for word, applies, values in tried if applies]


def needs_of(settings: TrainingSettings, shape: Shape, machine: Machine) -> Needs:
    """The needs of `settings` on a machine, with a model of this `shape`."""
    device, gpu = settings.model.device, machine.gpu
    on_gpu = device.startswith("cuda") or (device == "auto" and gpu is not None)
    work = work_of(settings, shape, gpu_bytes=(gpu.total if gpu else 0) if on_gpu else None)
    return Needs(work, parts_of(work), machine)


@dataclass(frozen=True)
class Needs:
    """The estimated needs of a training on a machine."""

    work: Work
    parts: list[Part]
    machine: Machine

    @property
    def disk_text(self) -> str:
        """The disk that checkpoints take."""
        free = f", of {readable(self.machine.disk.free)} free" if self.machine.disk else ""
        return f"about {readable(disk_of(self.work))} for checkpoints at most, by estimate{free}"

    def impossible(self) -> str | None:
        """Why the training cannot work at all; None if it may."""
        for on_gpu, room in ((True, self.machine.gpu), (False, self.machine.host)):
            if room is not None and (reason := self._too_large(room, on_gpu=on_gpu)):
                return reason
        whole, _ = checkpoint_bytes(self.work)
        if self.machine.disk is not None and whole > self.machine.disk.free:
            return (
                f"one checkpoint takes {readable(whole)}, and {readable(self.machine.disk.free)} are free for it: free "
                "some space, or give another --out"
            )
        return None

    def _too_large(self, room: Room, *, on_gpu: bool) -> str:
        """The error if the fixed parts, or one sequence as long as the settings allow, take clearly more than `room`.

        Empty if they do not.
        """
        has = f"{'the GPU' if on_gpu else 'this machine'} has {readable(room.total)} in all"
        least = floor(self.parts, on_gpu=on_gpu)
        if least > room.total:
            held = ", ".join(part.name for part in self.parts if floor([part], on_gpu=on_gpu))
            return f"{held} take {readable(least)}, and {has}; what helps: {self.advice(floor)}"
        size = peak(parts_of(replace(self.work, microbatch=self.work.longest)), on_gpu=on_gpu)
        fits = longest_that_fits(self.work, room.total, on_gpu=on_gpu)
        if size <= MARGIN * room.total or self.work.on_gpu != on_gpu or not fits:  # if no token fits, length is not it
            return ""
        key = "max_tokens" if not self.work.sampler else "env.max_completion_tokens"
        return (
            f"a sequence of {self.work.longest} tokens, which is not split, takes {readable(size)} with all else, and "
            f"{has}: {fits} tokens fit, so lower {key}; what helps too: {self.advice()}"
        )

    def check(self, model: str) -> None:
        """Raise ResourceError if the training cannot work at all."""
        if (reason := self.impossible()) is not None:
            raise ResourceError(f"training {model} cannot work here: {reason}")

    @property
    def has_to_spare(self) -> bool:
        """Whether the free host memory holds all phases at once, with room for fragmentation."""
        host = self.machine.host
        return host is not None and SPARE * peak(self.parts, on_gpu=False) <= host.free

    @property
    def pushed_by_disk(self) -> str | None:
        """A warning if shared memory is too small for a push of weights to another process; None if it suffices."""
        size, room = self.work.shape.parameters * self.work.sampler_number, self.machine.shared
        if room is None or not self.work.pushes or 2 * size <= room.free:
            return None
        return (
            f"by the disk, which takes longer: weights are {readable(size)}, and {memory_folder()} has "
            f"{readable(room.free)} free"
        )

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
        remedies = [f"{word} (saves {readable(size)})" for word, size in saved if size > WORTH_SAVING * now]
        return ", ".join([*remedies, "a smaller model", *([] if on_gpu else ["a GPU"])])

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
        fits = "no" if impossible else "maybe" if self.may_not_fit else "yes"
        return {"memory": memory, "disk": disk, "fits": fits, "reason": impossible}

    def memory_text(self, *, on_gpu: bool) -> str:
        """The memory that the largest phase of a step takes, by its parts."""
        room = self.machine.gpu if on_gpu else self.machine.host
        here = worst_phase(self.parts, on_gpu=on_gpu)
        size = sum(part.bytes for part in here)
        free = f" of {readable(room.free)} free" if room else ""
        where = " on the GPU" if on_gpu else " beside the GPU" if self.work.on_gpu else ""
        parts = ", ".join(f"{part.name} {_figure(part.bytes)}" for part in here if part.bytes > 0.01 * size)
        return f"about {readable(size)} to {readable(MARGIN * size)}{free}{where}, by estimate (in GB): {parts}"


@dataclass(frozen=True)
class Machine:
    """Room on this machine; None if unknown, and `gpu` None also if it is not used."""

    host: Room | None
    gpu: Room | None
    disk: Room | None
    shared: Room | None = None  # the file system in memory through which processes exchange weights

    @classmethod
    def here(cls, folder: Path, gpu: Room | None) -> Machine:
        """This machine, for a run in `folder`; `gpu` is the room of its GPU."""
        return cls(host_memory(), gpu, disk(folder), disk(memory_folder()))


def _figure(size: float) -> str:
    """GB in two or three digits."""
    return f"{size / 1e9:.3g}" if size >= 1e8 else f"{size / 1e9:.2f}"
