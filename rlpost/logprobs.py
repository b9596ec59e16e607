"""Log-probabilities of the trained tokens, without logits for any other token and none kept.

Logits are the largest tensor of training: tokens x vocabulary. They exist here for one chunk of
tokens at a time, in the forward and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from rlpost.batching import ATTENTION_NAME, Microbatch, shared_prompt_attention
from rlpost.errors import ConfigError

AttentionInterface.register(ATTENTION_NAME, shared_prompt_attention)

CHUNK = 256  # tokens whose logits exist at once
# what some models do to their logits before or behind the head, by its name in their configuration
MORE_THAN_A_HEAD = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(hidden W^T / T)[target] and the entropy, chunk by chunk."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,  # (M, D)
        weight: torch.Tensor,  # (V, D)
        bias: torch.Tensor | None,
        target: torch.Tensor,  # (M,)
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropies, normalisers = [], [], []
        for rows, ids in zip(hidden.split(CHUNK), target.split(CHUNK), strict=True):
            logits = _logits(rows, weight, bias, temperature)
            normaliser = logits.logsumexp(-1)
            log_probs.append(logits.gather(-1, ids[:, None]).squeeze(-1) - normaliser)
            logits.sub_(normaliser[:, None])
            entropies.append(-logits.exp().mul_(logits).sum(-1))
            normalisers.append(normaliser)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, target, torch.cat(normalisers), entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an entropy that is only measured costs the backward nothing
        return torch.cat(log_probs), entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, entropy_grad: torch.Tensor | None) -> Any:  # type: ignore[override]
        hidden, weight, bias, target, normalisers, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        grad_bias = torch.zeros_like(bias) if bias is not None else None
        grad = torch.zeros_like(entropy) if grad is None else grad
        for start in range(0, len(target), CHUNK):
            part = slice(start, start + CHUNK)
            rows, ids = hidden[part], target[part, None]
            log_p = _logits(rows, weight, bias, ctx.temperature).sub_(normalisers[part, None])
            scaled = grad[part, None] / ctx.temperature
            if entropy_grad is None:
                # d log p[target] / d logits = onehot(target) - p
                grad_logits = log_p.exp_().mul_(-scaled)
            else:
                # and d H / d logits = -p (log p + H)
                p = log_p.exp()
                log_p.add_(entropy[part, None]).mul_(entropy_grad[part, None] / ctx.temperature).add_(scaled)
                grad_logits = p.mul_(log_p).neg_()
            grad_logits.scatter_add_(-1, ids, scaled)
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:  # a head that an adapter leaves as it is needs none
                update = grad_logits.t() @ rows
                grad_weight = update.to(_wide(update.dtype)) if grad_weight is None else grad_weight.add_(update)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias, None, None


def _logits(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """A new tensor (chunk, V), at `temperature`, in at least float32."""
    logits = nn.functional.linear(rows, weight, bias)
    return logits.to(_wide(logits.dtype)).div_(temperature)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums over the vocabulary or over tokens are taken: float64 stays, all else is float32."""
    return torch.promote_types(dtype, torch.float32)


def chunked_log_probs(
    hidden: torch.Tensor, head: nn.Linear, target: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π(target) and entropy at `temperature`, both (M,), from hidden states (M, D).

    Both carry a gradient, and both are float32, or float64 for a model in float64.
    """
    weight, bias = head.weight, head.bias
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _ChunkedLogProbs.apply(hidden, weight, bias, target, temperature)  # type: ignore[return-value]


def token_log_probs(model: nn.Module, microbatch: Microbatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log π_θ of every trained token of `microbatch` at `temperature`, and the entropy there, both (M,).

    Raises ConfigError for a model whose logits are more than its head times its hidden states.
    """
    _check_head(model.config)
    with attending(model.config, ATTENTION_NAME):
        hidden = model.get_decoder()(  # type: ignore[operator]
            input_ids=microbatch.input_ids,
            position_ids=microbatch.position_ids,
            use_cache=False,
            prompt_blocks=microbatch.blocks,
        ).last_hidden_state
    head = model.get_output_embeddings()  # type: ignore[operator]
    return chunked_log_probs(hidden[0, microbatch.source], head, microbatch.target, temperature)


def _check_head(config: Any) -> None:
    config = config.get_text_config()
    for name in MORE_THAN_A_HEAD:
        value = getattr(config, name, None)
        if value not in (None, 1):
            raise ConfigError(
                f"the model scales its logits ({name}={value}), which rlpost cannot train: choose another"
            )


@contextmanager
def attending(config: Any, attention: str) -> Iterator[None]:
    """Let the model of `config` attend with the function that transformers knows as `attention`, and no other code."""
    before = config._attn_implementation
    config._attn_implementation = attention
    try:
        yield
    finally:
        config._attn_implementation = before
