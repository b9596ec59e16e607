"""Log-probabilities of the trained tokens, without logits for any other token and none kept.

Logits are the largest tensor of training: tokens x vocabulary. They exist here for one chunk of
tokens at a time, in the forward and again in the backward pass.

`READERS` are the ways to read a microbatch, fastest first. A trial on a small copy of a model's architecture
finds the ones that give its own log-probs: see `rlpost.model.families`.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlpost.config.paths import cache_folder
from rlpost.errors import ConfigError
from rlpost.files import remembered
from rlpost.model.attention import ATTENTION_NAME
from rlpost.model.decoding import takes
from rlpost.model.families import LogProbs, Reader, Verdict, attending, fingerprint
from rlpost.model.packing import Microbatch, Row, pack
from rlpost.model.weights import is_sharded

CHUNK, CHUNK_ON_GPU = 256, 1024  # trained tokens whose logits exist at once
HEAD_ROWS = 8192  # rows of the head whose gradient from one chunk exists at once, on a CPU
LENGTHS = 32  # a CPU reads a multiple of this many tokens
READ_INSIDE = ("packed", "packed, own head")  # work on a sharded model: each layer is called once
_VERDICTS: weakref.WeakKeyDictionary[nn.Module, Verdict] = weakref.WeakKeyDictionary()


def token_log_probs(model: nn.Module, microbatch: Microbatch, temperature: float) -> LogProbs:
    """log π_θ of every trained token of `microbatch` at `temperature`, and the entropy there, both (M,).

    The first call finds out the fastest reader that is right for `model`. Raises ConfigError if none is.
    """
    verdict = trainable_verdict(model)
    read = READERS[verdict.reading]
    with attending(model.config, verdict.attention):
        if not is_sharded(model):
            return read(model, microbatch, temperature)

        def copied(_: None) -> tuple[torch.Tensor, ...]:  # FSDP2 cannot hook views
            return tuple(values.clone() for values in read(model, microbatch, temperature))

        with _forward_is(model, copied):
            return model(None)  # its hooks gather the weights; on CUDA those of torch 2.11 need an argument


def microbatches_of(
    model: nn.Module, rows: Sequence[Row], tokens_per_microbatch: int, device: torch.device
) -> Iterator[Microbatch]:
    """`rows` as `pack` splits them, counting a prompt as often as `model` reads it."""
    shared = verdict_of(model).reads_packed
    return pack(rows, tokens_per_microbatch, device, share_prompts=shared)


def verdict_of(model: nn.Module) -> Verdict:
    """How to read and sample `model`."""
    if model not in _VERDICTS:
        _VERDICTS[model] = examine(model)
    return _VERDICTS[model]


def examine(model: nn.Module) -> Verdict:
    """The verdict on the architecture of `model`: from the cache, or found out on a small copy and cached."""
    file = cache_folder() / "families" / f"{fingerprint(model)}.json"

    def found_out() -> dict[str, Any]:
        from rlpost.model.family_probe import tried_on_a_small_copy

        return asdict(tried_on_a_small_copy(model, READERS))

    return remembered(file, found_out, lambda kept: Verdict(**kept), "what is right for the model is found out")


def trainable_verdict(model: nn.Module) -> Verdict:
    """Like `verdict_of`, but raises ConfigError for a model that cannot be trained."""
    verdict = verdict_of(model)
    if verdict.reading not in READERS:
        raise ConfigError(f"{type(model).__name__} cannot be trained: {verdict.reason}; choose another model")
    return verdict


# The ways to read a microbatch


def _packed_log_probs(model: nn.Module, microbatch: Microbatch, temperature: float) -> LogProbs:
    """Read the whole row in one forward of the body, and compute the logits with the head alone."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    hidden = packed_body(model, microbatch).last_hidden_state
    return chunked_log_probs(hidden[0, microbatch.source], head, microbatch.target, temperature)


def _packed_log_probs_by_own_head(model: nn.Module, microbatch: Microbatch, temperature: float) -> LogProbs:
    """Read the whole row in one forward of the body; the logits are the model's own, with caps and scales."""
    output = packed_body(model, microbatch)
    output["last_hidden_state"] = output.last_hidden_state[0, microbatch.source]
    return _own_head(model, output, microbatch.target, temperature)


def _plain_log_probs_by_own_head(model: nn.Module, microbatch: Microbatch, temperature: float) -> LogProbs:
    """Read one sequence per forward of the body, then compute the model's own logits chunk by chunk."""
    output, hidden = None, []
    for ids, row in _sequences(microbatch):
        output = model.get_decoder()(input_ids=ids, use_cache=False)  # type: ignore[operator]
        hidden.append(output.last_hidden_state[0, _sources(row, ids.device)])
    assert output is not None, "a microbatch has rows"
    output["last_hidden_state"] = torch.cat(hidden)
    return _own_head(model, output, microbatch.target, temperature)


def _plain_log_probs(model: nn.Module, microbatch: Microbatch, temperature: float) -> LogProbs:
    """Read one sequence per forward of the whole model: the logits of its trained tokens exist together."""
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


READERS: dict[str, Reader] = {
    "packed": _packed_log_probs,
    "packed, own head": _packed_log_probs_by_own_head,
    "alone, own head": _plain_log_probs_by_own_head,
    "alone": _plain_log_probs,
}


def packed_body(model: nn.Module, microbatch: Microbatch) -> Any:
    """The output of the body of `model`, without its head, for the whole row."""
    with attending(model.config, ATTENTION_NAME):
        return model.get_decoder()(  # type: ignore[operator]
            input_ids=filled_up(microbatch.input_ids),
            position_ids=filled_up(microbatch.position_ids),
            use_cache=False,
            packed=microbatch.layout,
        )


def _sequences(microbatch: Microbatch) -> Iterator[tuple[torch.Tensor, Row]]:
    """The ids (1, T) of each piece of each row, and the piece."""
    for piece in (piece for row in microbatch.rows for piece in row.pieces):
        yield torch.cat([piece.prompt, piece.response])[None].to(microbatch.input_ids.device), piece


def _sources(row: Row, device: torch.device) -> torch.Tensor:
    """The positions whose logits predict the trained tokens of `row`."""
    return (row.sampled.nonzero().squeeze(-1) + row.prompt.numel() - 1).to(device)


def _own_head(
    model: nn.Module,
    output: Any,  # of the body, with last_hidden_state (M, D)
    target: torch.Tensor,  # (M,)
    temperature: float,
) -> LogProbs:
    """log π(target) and entropy, both (M,), from the model's own logits of its body's `output`, chunk by chunk."""

    # a sharded model already runs inside its own forward
    forward = functools.partial(type(model).forward, model) if is_sharded(model) else model

    def read(hidden: torch.Tensor, ids: torch.Tensor) -> LogProbs:
        part = copy.copy(output)
        part["last_hidden_state"] = hidden[None]
        with _forward_is(model.get_decoder(), lambda *args, **kwargs: part):  # type: ignore[operator]
            logits = forward(input_ids=ids[None], use_cache=False).logits[0]
        return _of_logits(logits, ids, temperature)

    chunk = chunk_on(target.device)
    pairs = zip(output.last_hidden_state.split(chunk), target.split(chunk), strict=True)
    # the logits of a chunk are computed again in the backward pass; nothing in a head is random
    parts = [checkpoint(read, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])  # type: ignore[index]


@contextmanager
def _forward_is(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of `module` inside the block; its hooks stay. Blocks may nest."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _of_logits(logits: torch.Tensor, target: torch.Tensor, temperature: float) -> LogProbs:
    log_probs = (logits.to(_wide(logits.dtype)) / temperature).log_softmax(-1)
    return log_probs.gather(-1, target[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def filled_up(tokens: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`tokens` padded with zeros at the end of `dim` (-1 or -2), so that a CPU meets few different lengths.

    oneDNN keeps a compiled product, up to half a megabyte, for each of the last 1,024 shapes.
    """
    more = -tokens.shape[dim] % LENGTHS
    if more == 0 or tokens.device.type != "cpu":
        return tokens
    return nn.functional.pad(tokens, (0, more) if dim == -1 else (0, 0, 0, more))


# Log-probs from hidden states, chunk by chunk


def chunked_log_probs(hidden: torch.Tensor, head: nn.Linear, target: torch.Tensor, temperature: float) -> LogProbs:
    """log π(target) and entropy at `temperature`, both (M,), from hidden states (M, D).

    Both carry a gradient, and both are float32, or float64 for a model in float64.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    log_probs, entropy = _ChunkedLogProbs.apply(  # type: ignore[misc]
        filled_up(hidden, dim=-2), head.weight, head.bias, filled_up(target), temperature
    )
    return log_probs[: len(target)], entropy[: len(target)]


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
    ) -> LogProbs:
        ctx.weight_dtype, ctx.temperature = weight.dtype, temperature
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
        log_probs, entropies, normalisers = [], [], []
        chunk = chunk_on(hidden.device)
        for rows, ids in zip(hidden.split(chunk), target.split(chunk), strict=True):
            logits = logits_of(rows, weight, bias, temperature)
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
        gradient = HeadGradient(hidden, weight, bias, of_weight=ctx.needs_input_grad[1])
        grad = torch.zeros_like(entropy) if grad is None else grad
        chunk = chunk_on(hidden.device)
        for start in range(0, len(target), chunk):
            part = slice(start, start + chunk)
            ids = target[part, None]
            log_p = logits_of(hidden[part], weight, bias, ctx.temperature).sub_(normalisers[part, None])
            scaled = grad[part, None] / ctx.temperature
            if entropy_grad is None:
                # d log p[target] / d logits = onehot(target) - p
                grad_logits = log_p.exp_().mul_(-scaled)
            else:
                # and d H / d logits = -p (log p + H)
                p = log_p.exp()
                log_p.add_(entropy[part, None]).mul_(entropy_grad[part, None] / ctx.temperature).add_(scaled)
                grad_logits = p.mul_(log_p).neg_()
            gradient.add(part, grad_logits.scatter_add_(-1, ids, scaled))
        return *gradient.of(ctx.weight_dtype), None, None


class HeadGradient:
    """The gradient of hidden states (M, D) and of a head, from that of their logits chunk by chunk."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, of_weight: bool
    ) -> None:
        wide = _wide(hidden.dtype)
        self._hidden, self._head = hidden, weight
        self._of_hidden = torch.empty_like(hidden)
        # a frozen head, under an adapter, needs no gradient
        self._of_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        self._of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None else None
        self._at_once = HEAD_ROWS if hidden.device.type == "cpu" else len(weight)

    def add(self, part: slice, of_logits: torch.Tensor) -> None:
        """Add the gradient (chunk, V) of the logits of a part of the tokens."""
        if self._of_bias is not None:
            self._of_bias += of_logits.sum(0)
        of_logits, rows = of_logits.to(self._head.dtype), self._hidden[part]
        torch.mm(of_logits, self._head, out=self._of_hidden[part])
        if self._of_weight is not None:  # part by part, without a second tensor of its size
            for total, columns in zip(
                self._of_weight.split(self._at_once), of_logits.split(self._at_once, 1), strict=True
            ):
                total += columns.t() @ rows

    def of(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        """The gradients of hidden states, weight and bias, the latter two in `dtype`."""
        totals = (self._of_weight, self._of_bias)
        return self._of_hidden, *(None if total is None else total.to(dtype) for total in totals)


def logits_of(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """A new tensor (chunk, V), at `temperature`, in at least float32."""
    logits = nn.functional.linear(rows, weight, bias)
    logits = logits.to(_wide(logits.dtype))
    return logits if temperature == 1 else logits.div_(temperature)


def chunk_on(device: torch.device) -> int:
    """Trained tokens whose logits exist at once: a GPU reads the head's weights once for each of these."""
    return CHUNK if device.type == "cpu" else CHUNK_ON_GPU


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums over the vocabulary or over tokens: float64 stays, all others become float32."""
    return torch.promote_types(dtype, torch.float32)
