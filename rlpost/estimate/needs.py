"""Memory and disk that a training takes, part by part: formulas over the model's shape and the settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import ceil

from rlpost.estimate.machine import chosen_policy
from rlpost.estimate.shape import Shape
from rlpost.settings import (
    AdamW8bitSettings,
    Autocast,
    DType,
    EnvSettings,
    ExpertIterationSettings,
    GRPOSettings,
    SFTSettings,
    Sharding,
    VLLMSettings,
)
from rlpost.settings.commands import SampledSettings
from rlpost.settings.policy import ModelPolicySettings

TrainingSettings = GRPOSettings | SFTSettings | ExpertIterationSettings

MARGIN = 1.2  # of what is needed at most over what is estimated
COMMON_PROMPT = 256  # tokens; limits on prompts are far above what most have
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROGRAM = 500_000_000  # Python, torch and what a training imports
VLLM_PROGRAM = 430_000_000  # that vLLM adds
LOGITS_TOGETHER = 256  # tokens whose logits exist at once while training
ON_GPU, FEWEST_ON_CPU, MOST_ON_CPU = 16384, 384, 2048  # tokens_per_microbatch where it is not set
KV_BLOCK = 32  # tokens whose keys and values vLLM keeps together on a CPU, a conversation in whole blocks
LARGEST_KV_CACHE = 10**9  # bytes, on a CPU where nobody asks for more


@dataclass(frozen=True)
class Work:
    """Everything that the estimate follows from."""

    shape: Shape
    weight_bytes: int  # of one of the trainer's weights
    autocast: bool
    lora: tuple[int, tuple[str, ...] | None] | None  # rank and names of layers; None: all weights are trained
    eight_bit: bool
    reference: bool  # a second copy of the starting weights
    sampler: str | None  # vllm, transformers, or None where no model samples
    beside: bool  # it has a process of its own, and a copy of the weights there
    sampler_bytes: int  # of one of vLLM's weights
    kv_cache_bytes: int  # that vLLM is given on a CPU
    gpu_share: float  # of the GPU that vLLM is given
    sleeps: bool  # it leaves the GPU while the model learns
    together: int  # completions under way at once
    longest: int  # tokens of a conversation or sample
    microbatch: int  # tokens of one forward and backward
    recomputed: bool  # activation checkpointing
    on_gpu: bool
    gpu_bytes: int  # that the GPU has; 0: not known, or there is none
    saves: int  # checkpoints over the whole run
    keep_last: int
    keeps_best: bool
    ranks: int = 1  # that train
    divided: bool = False  # each holds its share of the model
    offloaded: bool = False  # in the machine's memory between uses

    @property
    def trained(self) -> int:
        """Parameters that take a gradient."""
        return self.shape.parameters if self.lora is None else self.shape.adapter_parameters(*self.lora)


@dataclass(frozen=True)
class Part:
    """One thing that takes memory; `on_gpu` says where, `lasting` whether it is there all the time."""

    name: str
    bytes: int
    on_gpu: bool
    lasting: bool = True


def work_of(settings: TrainingSettings, shape: Shape, *, gpu_bytes: int | None) -> Work:
    """What `settings` ask for; `gpu_bytes` None: trained on the CPU."""
    model, policy, on_gpu = settings.model, chosen_policy(settings.policy), gpu_bytes is not None
    samples = settings.uses_policy and isinstance(policy, ModelPolicySettings)
    sampler = None if not samples else "vllm" if policy.needs_vllm else "transformers"
    lora = settings.lora
    targets = None if lora.target_modules is None else tuple(lora.target_modules)
    longest, completions, group = _lengths(settings)
    unset = ON_GPU if on_gpu else min(MOST_ON_CPU, max(FEWEST_ON_CPU, group))
    asked = settings.tokens_per_microbatch or unset
    # what is measured when a run starts is taken for bfloat16 on a GPU, and for float32, which takes more, on a CPU
    autocast = model.autocast is Autocast.bfloat16 or (model.autocast is Autocast.auto and on_gpu)
    sampler_bytes = kv_cache = 0
    if isinstance(policy, VLLMSettings):
        sampler_bytes = _sampler_bytes(settings, policy, autocast=autocast)
        each = shape.kv_bytes(sampler_bytes)
        kv_cache, _ = kv_cache_bytes(policy, each, conversation_length(settings.env, settings.env.max_prompt_tokens))
    ranks = settings.cluster.trainer_ranks or int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun says it
    every, keep_last = settings.checkpoint.every, settings.checkpoint.keep_last
    many = keep_last + 1  # where the steps follow from data that nobody has read yet
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
        gpu_share=getattr(policy, "gpu_memory_utilization", 0.0),
        sleeps=on_gpu and getattr(policy, "sleep", False),
        together=min(completions, getattr(policy, "max_num_seqs", completions)),
        longest=longest,
        microbatch=min(max(asked, longest), completions * longest),
        recomputed=model.activation_checkpointing,
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
    """What takes memory while `work` is done: on a GPU that of rank 0, in the machine that of all its ranks."""
    shape, gpu = work.shape, work.on_gpu
    trained = work.trained * work.weight_bytes
    held = gpu and not work.offloaded
    # of what each rank holds: a copy of its own, or its share; of a GPU rank 0's, of a CPU those of all ranks
    copies = (1 if held else work.ranks) / (work.ranks if work.divided else 1)
    here = 1 if gpu else work.ranks

    def of_ranks(size: float) -> int:
        return round(copies * size)

    parts = [
        Part("weights", of_ranks(shape.parameters * work.weight_bytes), held),
        Part("adapter", of_ranks(trained if work.lora else 0), held),
        Part("gradients", of_ranks(trained), held),
        Part("moments", of_ranks(2 * work.trained * (1 if work.eight_bit else work.weight_bytes)), held),
        Part("reference", of_ranks(shape.parameters * work.weight_bytes if work.reference else 0), held),
        Part("gathered layers", here * _gathered(work), gpu),
        *_sampler_parts(work),
        Part("activations", here * _activations(work), gpu, lasting=False),
        Part(
            "program",
            PROGRAM * (work.ranks + work.beside) + (VLLM_PROGRAM if work.sampler == "vllm" else 0),
            on_gpu=False,
        ),
    ]
    return [part for part in parts if part.bytes]


def _gathered(work: Work) -> int:
    """What a rank holds whole beside its share: two layers, one of them on its way, and what is in no layer."""
    if not work.divided:
        return 0
    shape = work.shape
    outside = min(shape.parameters, 2 * shape.vocab * shape.hidden)
    layer = (shape.parameters - outside) // max(1, shape.layers)
    return (outside + 2 * layer) * work.weight_bytes * 2  # and their gradients


def longest_that_fits(work: Work, room: int, *, on_gpu: bool) -> int:
    """Tokens of the longest sequence whose forward and backward fit `room` bytes, by estimate; 0 where none does."""

    def fits(tokens: int) -> bool:
        return peak(parts_of(replace(work, longest=tokens, microbatch=tokens)), on_gpu=on_gpu) <= room

    low, high = 0, work.longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def peak(parts: list[Part], *, on_gpu: bool) -> int:
    """Bytes held at the worst moment: all that lasts, and the largest of what comes and goes."""
    here = [part for part in parts if part.on_gpu == on_gpu]
    passing = max((part.bytes for part in here if not part.lasting), default=0)
    return sum(part.bytes for part in here if part.lasting) + passing


def floor(parts: list[Part], *, on_gpu: bool) -> int:
    """What no setting of lengths or batches changes: weights, gradients, moments and the copies of weights."""
    fixed = ("weights", "adapter", "gradients", "moments", "reference", "sampler")
    return sum(part.bytes for part in parts if part.on_gpu == on_gpu and part.name in fixed)


def checkpoint_bytes(work: Work) -> tuple[int, int]:
    """(of a whole checkpoint, of one that keeps the model alone)."""
    adapter = work.trained * work.weight_bytes if work.lora else 0
    model = work.shape.parameters * work.weight_bytes + adapter
    return model + 2 * work.trained * (1 if work.eight_bit else work.weight_bytes), model


def disk_of(work: Work) -> int:
    """Bytes of checkpoints at the worst moment: a new one is whole before the one before it keeps the model alone."""
    whole, model = checkpoint_bytes(work)
    if work.saves == 1:
        return whole
    older = min(work.keep_last, work.saves - 1) - 1
    return 2 * whole + (older + work.keeps_best) * model


def lighter(work: Work) -> list[tuple[str, Work]]:
    """Settings that take less, in the order in which to try them, with the work that each makes of this one."""
    wide = work.weight_bytes == 4
    tried = [
        ("lora.enabled=true", work.lora is None, replace(work, lora=(16, None), reference=False)),
        ("optim=adamw_8bit", not work.eight_bit and work.lora is None, replace(work, eight_bit=True)),
        ("policy=transformers", work.sampler == "vllm", replace(work, sampler="transformers")),
        ("policy.sleep=true", work.on_gpu and work.sampler == "vllm" and not work.sleeps, replace(work, sleeps=True)),
        ("model.dtype=bfloat16", wide, replace(work, weight_bytes=2, autocast=False)),
        ("model.activation_checkpointing=true", not work.recomputed, replace(work, recomputed=True)),
        ("cluster.sharding=full", work.ranks > 1 and not work.divided, replace(work, divided=True)),
        (
            "cluster.cpu_offload=true",
            work.on_gpu and work.divided and not work.offloaded,
            replace(work, offloaded=True),
        ),
        ("tokens_per_microbatch=512", work.microbatch > 512, replace(work, microbatch=512)),
    ]
    return [(word, other) for word, applies, other in tried if applies]


def _sampler_parts(work: Work) -> list[Part]:
    shape = work.shape
    if work.sampler == "vllm":
        weights = shape.parameters * work.sampler_bytes
        if work.on_gpu:
            room = max(0, int(work.gpu_share * work.gpu_bytes) - weights)
            if work.sleeps:
                awake = Part("sampler, awake", weights + room, True, lasting=False)
                return [awake, Part("sampler, asleep", weights, False)]
            return [Part("sampler", weights, True), Part("its KV cache", room, True)]
        head = shape.vocab * shape.hidden * work.sampler_bytes  # packed a second time for the CPU
        return [Part("sampler", weights + head, False), Part("its KV cache", work.kv_cache_bytes, False, False)]
    if work.sampler == "transformers":
        number = 2 if work.autocast else work.weight_bytes
        cache = shape.kv_bytes(number) * work.together * work.longest
        logits = 3 * 4 * shape.vocab * work.together
        passing = Part("sampling", cache + logits + _cast_weights(work), work.on_gpu, lasting=work.beside)
        copy = Part("sampler", shape.parameters * work.weight_bytes if work.beside else 0, work.on_gpu)
        return [copy, passing]
    return []


def _activations(work: Work) -> int:
    """What the forward pass keeps for the backward one, and the logits of one chunk of tokens.

    Counted by hooks on what Llama and Qwen2 layers save, packed rows and all, within 3%.
    """
    shape, number = work.shape, work.weight_bytes
    if work.autocast:
        a_layer = 44 * shape.hidden + 9 * shape.intermediate + 12 * shape.kv_width
    else:
        a_layer = number * (12 * shape.hidden + 4 * shape.intermediate + 4 * shape.kv_width)
    kept = a_layer + shape.layers * shape.hidden * number if work.recomputed else shape.layers * a_layer
    chunk = min(work.microbatch, LOGITS_TOGETHER)
    logits = chunk * shape.vocab * (4 + 4 + number)
    return kept * work.microbatch + logits + _cast_weights(work)


def _cast_weights(work: Work) -> int:
    """The copies of weights that autocast keeps during a forward and backward."""
    return 2 * work.shape.parameters if work.autocast and work.weight_bytes == 4 else 0


def _lengths(settings: TrainingSettings) -> tuple[int, int, int]:
    """(tokens of the longest row, rows of a step, tokens of the largest group of rows that share a prompt)."""
    if isinstance(settings, SFTSettings):
        return settings.max_tokens, settings.minibatch_size, settings.max_tokens
    longest = conversation_length(settings.env)
    beside = (settings.group_size - 1) * (longest - min(settings.env.max_prompt_tokens, COMMON_PROMPT))
    return longest, settings.prompts_per_step * settings.group_size, longest + beside


def conversation_length(env: EnvSettings, longest_prompt: int = COMMON_PROMPT) -> int:
    """Tokens of a conversation as long as the settings let the model make it, with such a prompt at most."""
    prompt = min(env.max_prompt_tokens, longest_prompt)
    return prompt + env.max_turns * env.max_completion_tokens + (env.max_turns - 1) * env.max_observation_tokens


def _sampler_bytes(settings: TrainingSettings, policy: VLLMSettings, *, autocast: bool) -> int:
    if policy.dtype is not DType.auto:
        return BYTES[policy.dtype.value]
    return 2 if autocast else BYTES[settings.model.dtype.value]


def kv_cache_bytes(policy: VLLMSettings, each: int, longest: int) -> tuple[int, int]:
    """(what vLLM is given for its KV cache on a CPU, what one conversation of `longest` tokens of `each` bytes takes).

    Given is what `policy.kv_cache_gb` asks for, else what as many conversations fill as there are at once.
    """
    conversation = ceil(longest / KV_BLOCK) * KV_BLOCK * each
    spare = KV_BLOCK * each  # vLLM keeps one block to itself
    least = conversation + spare
    if policy.kv_cache_gb is not None:
        return round(policy.kv_cache_gb * 10**9), least
    return max(least, min(LARGEST_KV_CACHE, policy.max_num_seqs * conversation + spare)), least
