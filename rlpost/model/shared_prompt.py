"""Attention over a packed row: completions that share a prompt attend to it and to themselves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rlpost.errors import ConfigError
from rlpost.model.packing import PromptBlock

ATTENTION_NAME = "rlpost_shared_prompt"  # in transformers' attention interface
SHORT = 512  # tokens up to which a CPU attends faster without the flash kernel


def shared_prompt_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, H, N, D)
    key: torch.Tensor,  # (1, H_kv, N, D)
    value: torch.Tensor,  # (1, H_kv, N, D)
    attention_mask: torch.Tensor | None,
    *,
    prompt_blocks: list[PromptBlock],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a packed row, in the form transformers' attention interface calls.

    Each prompt's keys and values are computed once, with gradient, and serve all of its completions.
    Returns (1, N, H, D), zeros for tokens after the last block. Raises ConfigError for attention features
    that would change the result and that this function does not have.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if other.get(name) is not None:
            raise ConfigError(
                f"the model's {type(module).__name__} uses {name}, which rlpost cannot train: choose another"
            )
    if (repeat := query.shape[1] // key.shape[1]) > 1:  # each key head serves so many query heads
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    sizes = [size for block in prompt_blocks for size in (block.num_prompts * block.prompt_length, sum(block.lengths))]
    sizes.append(query.shape[2] - sum(sizes))  # tokens after the last block only fill the row up
    # (tokens, H, D) a segment; split rather than slices, whose gradients would each span the whole row
    queries, keys, values = (states[0].transpose(0, 1).split(sizes) for states in (query, key, value))
    outputs = []
    for index, block in enumerate(prompt_blocks):
        at_prompts, at_completions = 2 * index, 2 * index + 1
        length = block.prompt_length
        # without a mask, plain causal attention is the same thing up to the window, and faster
        in_window = sliding_window is None or length <= sliding_window
        causal = None if in_window else _causal_mask(length, 0, sliding_window, query.device)
        q_prompt, k_prompt, v_prompt = (block.prompts(states[at_prompts]) for states in (queries, keys, values))
        attended = _attend(q_prompt, k_prompt, v_prompt, causal, dropout, scaling)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
        padded = [block.pad(states[at_completions]) for states in (queries, keys, values)]  # (G, H, T, D)
        # pads follow their row's tokens, so a causal mask alone hides them
        mask = _causal_mask(max(block.lengths), length, sliding_window, query.device)
        if dropout == 0 and query.device.type == "cpu" and mask.shape[1] <= SHORT:
            attended = _attend_beside(k_prompt, v_prompt, padded, mask, scaling)
        else:
            all_keys = torch.cat([block.of_each_completion(k_prompt), padded[1]], 2)
            all_values = torch.cat([block.of_each_completion(v_prompt), padded[2]], 2)
            attended = _attend(padded[0], all_keys, all_values, mask, dropout, scaling)
        outputs.append(block.unpad(attended))
    outputs.append(torch.zeros_like(queries[-1]))  # which nothing reads
    return torch.cat(outputs).unsqueeze(0), None


def _attend_beside(
    prompt_key: torch.Tensor,  # (Q, H, P, D)
    prompt_value: torch.Tensor,
    completions: Sequence[torch.Tensor],  # queries, keys and values, (G, H, T, D)
    mask: torch.Tensor,  # (T, P + T) bool
    scaling: float | None,
) -> torch.Tensor:
    """Attention of each prompt's completions to it and to themselves, (G, H, T, D), in at least float32.

    The prompt's keys and values are read where they are: expanded over the completions they would be
    most of what a layer keeps for its gradient.
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
    """(Q, H, G / Q * T, X) -> (G, H, T, X), `shape` beginning with G, H and T."""
    return states.unflatten(2, (-1, shape[2])).transpose(1, 2).flatten(0, 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """torch's attention on (B, H, T, D); causal where there is no mask."""
    short_on_cpu = query.device.type == "cpu" and key.shape[2] <= SHORT
    # the CPU's flash kernel is slow backward on short sequences; on long ones it saves the memory
    with sdpa_kernel(SDPBackend.MATH) if short_on_cpu else nullcontext():
        return scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None, scale=scaling)


def _causal_mask(length: int, offset: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(length, offset + length) bool: query t stands at position offset + t."""
    distance = torch.arange(offset, offset + length, device=device)[:, None] - torch.arange(
        offset + length, device=device
    )
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)
