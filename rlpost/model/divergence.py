"""The divergence of two models over the whole vocabulary at the trained tokens, chunk by chunk."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from rlpost.errors import ConfigError
from rlpost.model.families import Verdict, attending
from rlpost.model.logprobs import HeadGradient, chunk_on, filled_up, logits_of, packed_body, trainable_verdict
from rlpost.model.packing import Microbatch


class Compared(NamedTuple):
    """Two models at the M trained tokens, (M,) each; only `divergence` carries a gradient, to the first model."""

    divergence: torch.Tensor
    log_probs: torch.Tensor  # log π of the trained token
    other_log_probs: torch.Tensor  # the other model's
    entropy: torch.Tensor  # of the first


def plain_states(model: nn.Module, microbatch: Microbatch) -> tuple[torch.Tensor, nn.Linear]:
    """The hidden states (M, D) that predict the trained tokens, and the head that makes them logits.

    Raises as `plain_verdict`.
    """
    with attending(model.config, plain_verdict(model).attention):
        hidden = packed_body(model, microbatch).last_hidden_state[0, microbatch.source]
    return hidden, model.get_output_embeddings()  # type: ignore[operator]


def plain_verdict(model: nn.Module) -> Verdict:
    """Like `trainable_verdict`, but raises ConfigError unless `model` is read packed and its logits are its head's."""
    verdict = trainable_verdict(model)
    if verdict.reading != "packed":
        raise ConfigError(
            f"{type(model).__name__} is read {verdict.reading}: only its sampled tokens can be compared with another "
            "model's, as loss=opd does"
        )
    return verdict


def chunked_divergence(
    hidden: torch.Tensor,
    head: nn.Linear,
    other_hidden: torch.Tensor,
    other_head: nn.Linear,
    target: torch.Tensor,
    temperature: float,
    beta: float,
) -> Compared:
    """The generalised Jensen-Shannon divergence of two models at M tokens, from hidden states (M, D) and (M, D').

    π and q are the distributions of the two at `temperature`. With m = βq + (1 − β)π it is β KL(q ‖ m) +
    (1 − β) KL(π ‖ m) (GKD, arXiv:2306.13649, eq. 1). At its ends, where that is 0, it is KL(q ‖ π) for β = 0 and
    KL(π ‖ q) for β = 1, as in TRL. Both are distributions over the ids that both heads have: the rows by which one head
    is padded beyond the other are left out. The second model gets no gradient.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, other_hidden = hidden.to(dtype), other_hidden.to(dtype)
    ids = min(len(head.weight), len(other_head.weight))
    of_heads = [None if each is None else each[:ids] for own in (head, other_head) for each in (own.weight, own.bias)]
    states = (filled_up(each, dim=-2) for each in (hidden, other_hidden))
    values = _ChunkedDivergence.apply(*states, *of_heads, filled_up(target), temperature, beta)
    return Compared(*(each[: len(target)] for each in values))  # type: ignore[union-attr]


class _ChunkedDivergence(torch.autograd.Function):
    """See `chunked_divergence`. Logits of both models exist for one chunk at a time, forward and backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,  # (M, D)
        other_hidden: torch.Tensor,  # (M, D')
        weight: torch.Tensor,  # (V, D)
        bias: torch.Tensor | None,
        other_weight: torch.Tensor,  # (V, D')
        other_bias: torch.Tensor | None,
        target: torch.Tensor,  # (M,)
        temperature: float,
        beta: float,
    ) -> tuple[torch.Tensor, ...]:
        ctx.weight_dtype, ctx.temperature, ctx.beta = weight.dtype, temperature, beta
        own, other = (
            (states, head.to(states.dtype), None if b is None else b.to(states.dtype))
            for states, head, b in ((hidden, weight, bias), (other_hidden, other_weight, other_bias))
        )
        chunk, values = chunk_on(hidden.device), []
        for start in range(0, len(target), chunk):
            part = slice(start, start + chunk)
            log_p, log_q = _log_softmax(own, part, temperature), _log_softmax(other, part, temperature)
            chosen = [each.gather(-1, target[part, None]).squeeze(-1) for each in (log_p, log_q)]
            entropy = -(log_p.exp() * log_p).sum(-1)
            values.append((_divergence(log_p, log_q, beta), *chosen, entropy))
        ctx.save_for_backward(*own, *other)
        divergence, log_probs, other_log_probs, entropy = (torch.cat(each) for each in zip(*values, strict=True))
        ctx.mark_non_differentiable(log_probs, other_log_probs, entropy)
        return divergence, log_probs, other_log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:  # type: ignore[override]
        own, other, beta = ctx.saved_tensors[:3], ctx.saved_tensors[3:], ctx.beta
        gradient = HeadGradient(*own, of_weight=ctx.needs_input_grad[2])
        chunk = chunk_on(grad.device)
        for start in range(0, len(grad), chunk):
            part = slice(start, start + chunk)
            log_p, log_q = (_log_softmax(each, part, ctx.temperature) for each in (own, other))
            scaled, p = grad[part, None] / ctx.temperature, log_p.exp()
            if beta == 0:  # d KL(q || p) / d logits = p - q
                grad_logits = p.sub_(log_q.exp_()).mul_(scaled)
            else:  # x = (1 - beta) (log p - log m), or log p - log q; d / d logits = p (x - sum of p x)
                apart = log_p.sub_(log_q if beta == 1 else _log_mixture(log_p, log_q, beta))
                apart.sub_((p * apart).sum(-1, keepdim=True))
                grad_logits = p.mul_(apart).mul_(scaled if beta == 1 else scaled * (1 - beta))
            gradient.add(part, grad_logits)
        of_hidden, of_weight, of_bias = gradient.of(ctx.weight_dtype)
        return of_hidden, None, of_weight, of_bias, None, None, None, None, None


def _log_softmax(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], part: slice, temperature: float
) -> torch.Tensor:
    """log-probs (chunk, V) of a part of the hidden states of (hidden, weight, bias), a new tensor."""
    hidden, weight, bias = states
    logits = logits_of(hidden[part], weight, bias, temperature)
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _log_mixture(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    """log(βq + (1 − β)p)."""
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


def _divergence(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    """See `chunked_divergence`: (chunk,) from log-probs (chunk, V)."""
    if beta == 0:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = _log_mixture(log_p, log_q, beta)
    of_other = (log_q.exp() * (log_q - log_m)).sum(-1)
    return beta * of_other + (1 - beta) * (log_p.exp() * (log_p - log_m)).sum(-1)
