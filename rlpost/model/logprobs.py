"""Log-probabilities of the trained tokens, without logits for any other token and none kept.

Logits are the largest tensor of training: tokens x vocabulary. They exist here for one chunk of
tokens at a time, in the forward and again in the backward pass.

`READERS` are the ways to read a microbatch, fastest first. Which of them gives a model's own
log-probs is found on a small copy of it: see `rlpost.model.families`.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rlpost.errors import ConfigError
from rlpost.model.decoding import takes
from rlpost.model.families import Verdict, attending, examine
from rlpost.model.packing import Microbatch, Row, pack
from rlpost.model.shards import is_sharded
from rlpost.model.shared_prompt import ATTENTION_NAME, shared_prompt_attention

AttentionInterface.register(ATTENTION_NAME, shared_prompt_attention)

CHUNK = 256  # tokens whose logits exist at once
HEAD_ROWS = 8192  # of the head, whose gradient from one chunk exists at once
LENGTHS = 32  # a CPU reads a multiple of so many tokens


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(hidden W^T / T)[target] and the entropy, chunk by chunk, in products of `hidden`'s format."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,  # (M, D)
        weight: torch.Tensor,  # (V, D)
        bias: torch.Tensor | None,
        target: torch.Tensor,  # (M,)
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.weight_dtype, ctx.temperature = weight.dtype, temperature
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
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
        ctx.set_materialize_grads(False)  # an entropy that is only measured costs the backward nothing
        return torch.cat(log_probs), entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, entropy_grad: torch.Tensor | None) -> Any:  # type: ignore[override]
        hidden, weight, bias, target, normalisers, entropy = ctx.saved_tensors
        wide = _wide(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        # a head that an adapter leaves as it is needs none
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None else None
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
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:  # part by part: no second tensor of its size
                for total, columns in zip(grad_weight.split(HEAD_ROWS), grad_logits.split(HEAD_ROWS, 1), strict=True):
                    total += columns.t() @ rows
        grads = (None if total is None else total.to(ctx.weight_dtype) for total in (grad_weight, grad_bias))
        return grad_hidden, *grads, None, None


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
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    log_probs, entropy = _ChunkedLogProbs.apply(  # type: ignore[misc]
        _filled_up(hidden, dim=-2), head.weight, head.bias, _filled_up(target), temperature
    )
    return log_probs[: len(target)], entropy[: len(target)]


def token_log_probs(model: nn.Module, microbatch: Microbatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log π_θ of every trained token of `microbatch` at `temperature`, and the entropy there, both (M,).

    The first time, the fastest way that is right for `model` is found out. Raises ConfigError where none is.
    """
    verdict = trainable_verdict(model)
    read = READERS[verdict.reading]
    with attending(model.config, verdict.attention):
        if not is_sharded(model):
            return read(model, microbatch, temperature)

        def copied() -> tuple[torch.Tensor, ...]:  # FSDP2 cannot hook what is a view
            return tuple(values.clone() for values in read(model, microbatch, temperature))

        with _forward_is(model, copied):
            return model()  # whose hooks gather the weights


def microbatches_of(
    model: nn.Module, rows: Sequence[Row], tokens_per_microbatch: int, device: torch.device
) -> Iterator[Microbatch]:
    """`rows` as `pack` splits them, a prompt counted as often as `model` reads it."""
    shared = verdict_of(model).reads_packed
    return pack(rows, tokens_per_microbatch, device, share_prompts=shared)


def verdict_of(model: nn.Module) -> Verdict:
    """How `model` is read and sampled."""
    if model not in _VERDICTS:
        _VERDICTS[model] = examine(model, READERS)
    return _VERDICTS[model]


def trainable_verdict(model: nn.Module) -> Verdict:
    """The same. Raises ConfigError for a model that cannot be trained."""
    verdict = verdict_of(model)
    if verdict.reading not in READERS:
        raise ConfigError(f"{type(model).__name__} cannot be trained: {verdict.reason}; choose another model")
    return verdict


def packed_log_probs(model: nn.Module, microbatch: Microbatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole row in one forward of the body; the logits are the head's alone."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    hidden = _packed_body(model, microbatch).last_hidden_state
    return chunked_log_probs(hidden[0, microbatch.source], head, microbatch.target, temperature)


def packed_log_probs_by_own_head(
    model: nn.Module, microbatch: Microbatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole row in one forward of the body; the logits are the model's own, caps and scales included."""
    output = _packed_body(model, microbatch)
    output["last_hidden_state"] = output.last_hidden_state[0, microbatch.source]
    return _own_head(model, output, microbatch.target, temperature)


def plain_log_probs_by_own_head(
    model: nn.Module, microbatch: Microbatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence a forward of the body, then the model's own logits of all of them, chunk by chunk."""
    output, hidden = None, []
    for ids, row in _sequences(microbatch):
        output = model.get_decoder()(input_ids=ids, use_cache=False)  # type: ignore[operator]
        hidden.append(output.last_hidden_state[0, _sources(row, ids.device)])
    assert output is not None, "a microbatch has rows"
    output["last_hidden_state"] = torch.cat(hidden)
    return _own_head(model, output, microbatch.target, temperature)


def plain_log_probs(model: nn.Module, microbatch: Microbatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence a forward of the whole model: the logits of its trained tokens exist together."""
    log_probs, entropies = [], []
    for ids, row in _sequences(microbatch):
        sources = _sources(row, ids.device)
        if takes(model, "logits_to_keep"):
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=sources).logits[0]
        else:
            logits = model(input_ids=ids, use_cache=False).logits[0, sources]
        target = row.response[row.sampled].to(ids.device)
        log_prob, entropy = _of_logits(logits, target, temperature)
        log_probs.append(log_prob)
        entropies.append(entropy)
    return torch.cat(log_probs), torch.cat(entropies)


Reader = Callable[[nn.Module, Microbatch, float], tuple[torch.Tensor, torch.Tensor]]
READERS: dict[str, Reader] = {
    "packed": packed_log_probs,
    "packed, own head": packed_log_probs_by_own_head,
    "alone, own head": plain_log_probs_by_own_head,
    "alone": plain_log_probs,
}
READ_INSIDE = ("packed", "packed, own head")  # those that a sharded model can be read by: one call of each layer
_VERDICTS: weakref.WeakKeyDictionary[nn.Module, Verdict] = weakref.WeakKeyDictionary()


def _filled_up(tokens: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`tokens` with zeros after the last along `dim` (-1 or -2), so that a CPU meets few different lengths.

    oneDNN keeps a compiled product, which may be half a megabyte, for each of the last 1,024 shapes.
    """
    more = -tokens.shape[dim] % LENGTHS
    if more == 0 or tokens.device.type != "cpu":
        return tokens
    return nn.functional.pad(tokens, (0, more) if dim == -1 else (0, 0, 0, more))


def _packed_body(model: nn.Module, microbatch: Microbatch) -> Any:
    with attending(model.config, ATTENTION_NAME):
        return model.get_decoder()(  # type: ignore[operator]
            input_ids=_filled_up(microbatch.input_ids),
            position_ids=_filled_up(microbatch.position_ids),
            use_cache=False,
            prompt_blocks=microbatch.blocks,
        )


def _sequences(microbatch: Microbatch) -> Iterator[tuple[torch.Tensor, Row]]:
    """The ids (1, T) of each row and the row."""
    for row in microbatch.rows:
        yield torch.cat([row.prompt, row.response])[None].to(microbatch.input_ids.device), row


def _sources(row: Row, device: torch.device) -> torch.Tensor:
    """The positions whose logits predict the trained tokens of `row`."""
    return (row.sampled.nonzero().squeeze(-1) + row.prompt.numel() - 1).to(device)


def _own_head(
    model: nn.Module,
    output: Any,  # of the body, with last_hidden_state (M, D)
    target: torch.Tensor,  # (M,)
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π(target) and entropy, both (M,), from what `model` makes of its body's output, chunk by chunk."""

    # a sharded model is inside its own forward already
    forward = functools.partial(type(model).forward, model) if is_sharded(model) else model

    def read(hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = copy.copy(output)
        part["last_hidden_state"] = hidden[None]
        with _forward_is(model.get_decoder(), lambda *args, **kwargs: part):  # type: ignore[operator]
            logits = forward(input_ids=ids[None], use_cache=False).logits[0]
        return _of_logits(logits, ids, temperature)

    pairs = zip(output.last_hidden_state.split(CHUNK), target.split(CHUNK), strict=True)
    # the logits of a chunk are computed again in the backward pass; nothing in a head is random
    parts = [checkpoint(read, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])  # type: ignore[index]


@contextmanager
def _forward_is(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` computes `forward` meanwhile; what is hooked to its calls stays. A body may have been read already."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _of_logits(logits: torch.Tensor, target: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = (logits.to(_wide(logits.dtype)) / temperature).log_softmax(-1)
    return log_probs.gather(-1, target[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)
