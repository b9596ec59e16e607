"""Attention over a packed row: completions that share a prompt attend to it and to themselves."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rlpost.errors import ConfigError
from rlpost.model.packing import Gathered, Layout, Sequences

ATTENTION_NAME = "rlpost_shared_prompt"  # in transformers' attention interface
SHORT = 512  # keys up to which a CPU attends faster without the flash kernel
LARGEST_HEAD = 256  # numbers in a query that the kernel for sequences takes
HAS_KERNEL = "enable_gqa" in inspect.signature(varlen_attn).parameters  # earlier ones take other arguments


def shared_prompt_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, H, N, D)
    key: torch.Tensor,  # (1, H_kv, N, D)
    value: torch.Tensor,  # (1, H_kv, N, D)
    attention_mask: torch.Tensor | None,
    *,
    packed: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a packed row, in the form transformers' attention interface calls.

    Each prompt's keys and values are computed once, with gradient, and serve all of its completions.
    Returns (1, N, H, D), with zeros for tokens after the last block. Raises ConfigError for an attention feature
    that would change the result and is missing here.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if other.get(name) is not None:
            raise ConfigError(
                f"the model's {type(module).__name__} uses {name}, which rlpost cannot train: choose another"
            )
    if dropout == 0 and takes_sequences(query):
        return _attend_in_sequences(query, key, value, packed.sequences, scaling, sliding_window), None
    on_cpu, dtype = query.device.type == "cpu", _products(query)
    if not on_cpu:  # before they are padded and expanded: rotary leaves float32 under autocast
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if (repeat := query.shape[1] // key.shape[1]) > 1:  # each key head serves `repeat` query heads
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    sizes = [size for block in packed.blocks for size in (block.num_prompts * block.prompt_length, sum(block.lengths))]
    sizes.append(query.shape[2] - sum(sizes))  # padding after the last block
    # (tokens, H, D) a segment; split rather than slices, whose gradients would each span the whole row
    queries, keys, values = (states[0].transpose(0, 1).split(sizes) for states in (query, key, value))
    outputs = []
    for index, block in enumerate(packed.blocks):
        length, longest = block.prompt_length, max(block.lengths)
        beside = dropout == 0 and on_cpu and length + longest <= SHORT
        parts = [(states[2 * index], states[2 * index + 1]) for states in (queries, keys, values)]
        if not beside:
            parts = [(at_prompts.to(dtype), at_completions.to(dtype)) for at_prompts, at_completions in parts]
        # up to the window, causal attention without a mask gives the same and is faster
        in_window = sliding_window is None or length <= sliding_window
        causal = None if in_window else causal_mask(length, 0, sliding_window, query.device)
        q_prompt, k_prompt, v_prompt = (block.prompts(at_prompts) for at_prompts, _ in parts)
        attended = attend_padded(q_prompt, k_prompt, v_prompt, causal, dropout, scaling)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
        padded = [block.pad(at_completions) for _, at_completions in parts]  # (G, H, T, D)
        # pads follow their row's tokens, so a causal mask alone hides them
        if on_cpu or sliding_window is not None:
            mask = causal_mask(longest, length, sliding_window, query.device)
        else:  # the same, in a form that the flash kernel takes
            mask = causal_lower_right(longest, length + longest)
        if beside:
            attended = _attend_beside(k_prompt, v_prompt, padded, mask, scaling)
        else:
            all_keys = torch.cat([block.of_each_completion(k_prompt), padded[1]], 2)
            all_values = torch.cat([block.of_each_completion(v_prompt), padded[2]], 2)
            attended = attend_padded(padded[0], all_keys, all_values, mask, dropout, scaling)
        outputs.append(block.unpad(attended))
    outputs.append(torch.zeros_like(values[-1]))  # nothing reads these
    return torch.cat(outputs).unsqueeze(0), None


def takes_sequences(query: torch.Tensor) -> bool:
    """Whether torch's kernel for sequences of any length takes these queries: on a GPU from Ampere on, in 16 bits."""
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    width = query.shape[-1]
    fits = width % 8 == 0 and width <= LARGEST_HEAD
    return fits and _products(query) in (torch.bfloat16, torch.float16) and HAS_KERNEL


def _attend_in_sequences(
    query: torch.Tensor,  # (1, H, N, D)
    key: torch.Tensor,  # (1, H_kv, N, D)
    value: torch.Tensor,  # (1, H_kv, N, D)
    sequences: Sequences,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention over a packed row in one call of the kernel, (1, N, H, D): no mask, no padding, no key expanded.

    A completion's keys end where its queries end, so causal attention that is aligned at the end hides later tokens.
    """
    dtype = _products(query)
    q, k, v = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))  # (N, heads, D)
    attended = varlen_attn(
        q[: sequences.num_tokens],
        Gathered.apply(k, sequences.keys, True),  # type: ignore[arg-type]
        Gathered.apply(v, sequences.keys, True),  # type: ignore[arg-type]
        sequences.query_ends,
        sequences.key_ends,
        sequences.most_queries,
        sequences.most_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return nn.functional.pad(attended, (0, 0, 0, 0, 0, len(q) - sequences.num_tokens))[None]  # type: ignore[arg-type]


def _products(states: torch.Tensor) -> torch.dtype:
    """The dtype in which attention computes: autocast's, where that is on, since rotary leaves float32."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _attend_beside(
    prompt_key: torch.Tensor,  # (Q, H, P, D)
    prompt_value: torch.Tensor,
    completions: Sequence[torch.Tensor],  # queries, keys and values, (G, H, T, D)
    mask: torch.Tensor,  # (T, P + T) bool
    scaling: float | None,
) -> torch.Tensor:
    """Attention of each prompt's completions to it and to themselves, (G, H, T, D), in at least float32.

    The prompt's keys and values are not expanded over the completions: that would be most of the memory that a layer
    keeps for its gradient.
    """
    dtype = completions[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(mask.device.type, enabled=False):
        query, key, value = (states.to(wide) for states in completions)
        prompt_key, prompt_value = prompt_key.to(wide), prompt_value.to(wide)
        query = query * (scaling if scaling is not None else query.shape[-1] ** -0.5)
        together = _by_prompt(query, prompt_key.shape[0])  # (Q, H, G / Q * T, D)
        to_prompt = _by_completion(together @ prompt_key.transpose(-1, -2), query.shape)  # (G, H, T, P)
        scores = torch.cat([to_prompt, query @ key.transpose(-1, -2)], -1).masked_fill(~mask, -torch.inf)
        on_prompt, on_own = scores.softmax(-1).split([prompt_key.shape[2], key.shape[2]], -1)
        from_prompt = _by_prompt(on_prompt, prompt_key.shape[0]) @ prompt_value
        return (_by_completion(from_prompt, query.shape) + on_own @ value).to(dtype)


def _by_prompt(states: torch.Tensor, num_prompts: int) -> torch.Tensor:
    """(G, H, T, X) -> (Q, H, G / Q * T, X): a prompt's completions one after the other."""
    return states.unflatten(0, (num_prompts, -1)).transpose(1, 2).flatten(2, 3)


def _by_completion(states: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """(Q, H, G / Q * T, X) -> (G, H, T, X); `shape` begins with G, H, T."""
    return states.unflatten(2, (-1, shape[2])).transpose(1, 2).flatten(0, 1)


def attend_padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """torch's attention on (B, H, T, D); causal without a mask."""
    short_on_cpu = query.device.type == "cpu" and key.shape[2] <= SHORT
    # the CPU's flash kernel is slow backward on short sequences; on long ones it saves the memory
    with sdpa_kernel(SDPBackend.MATH) if short_on_cpu else nullcontext():
        return scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None, scale=scaling)


def causal_mask(length: int, offset: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(length, offset + length) bool: query t stands at position offset + t."""
    distance = torch.arange(offset, offset + length, device=device)[:, None] - torch.arange(
        offset + length, device=device
    )
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


AttentionInterface.register(ATTENTION_NAME, shared_prompt_attention)
