"""Log-probabilities of the trained tokens, without logits for any other token and none kept.

Logits are the largest tensor of training: tokens x vocabulary. They exist here for one chunk of
tokens at a time, in the forward and again in the backward pass.

`READERS` are the ways to read a microbatch, fastest first. A trial on a small copy of a model's architecture
finds the ones that give its own log-probs: see `rlpost.model.families`. In a packed row, completions that share a
prompt attend to it and to themselves (`shared_prompt_attention`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rlpost.config.paths import cache_folder
from rlpost.errors import ConfigError
from rlpost.files import remembered
from rlpost.model.decoding import takes
from rlpost.model.families import LogProbs, Reader, Verdict, attending, fingerprint
from rlpost.model.packing import Gathered, Layout, Microbatch, Row, Sequences, pack
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
    hidden = _packed_body(model, microbatch).last_hidden_state
    return chunked_log_probs(hidden[0, microbatch.source], head, microbatch.target, temperature)


def _packed_log_probs_by_own_head(model: nn.Module, microbatch: Microbatch, temperature: float) -> LogProbs:
    """Read the whole row in one forward of the body; the logits are the model's own, with caps and scales."""
    output = _packed_body(model, microbatch)
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


def _packed_body(model: nn.Module, microbatch: Microbatch) -> Any:
    with attending(model.config, ATTENTION_NAME):
        return model.get_decoder()(  # type: ignore[operator]
            input_ids=_filled_up(microbatch.input_ids),
            position_ids=_filled_up(microbatch.position_ids),
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

    chunk = _chunk_on(target.device)
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


def _filled_up(tokens: torch.Tensor, dim: int = -1) -> torch.Tensor:
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
        _filled_up(hidden, dim=-2), head.weight, head.bias, _filled_up(target), temperature
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
        chunk = _chunk_on(hidden.device)
        for rows, ids in zip(hidden.split(chunk), target.split(chunk), strict=True):
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
        gradient = _HeadGradient(hidden, weight, bias, of_weight=ctx.needs_input_grad[1])
        grad = torch.zeros_like(entropy) if grad is None else grad
        chunk = _chunk_on(hidden.device)
        for start in range(0, len(target), chunk):
            part = slice(start, start + chunk)
            ids = target[part, None]
            log_p = _logits(hidden[part], weight, bias, ctx.temperature).sub_(normalisers[part, None])
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


class _HeadGradient:
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


def _logits(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """A new tensor (chunk, V), at `temperature`, in at least float32."""
    logits = nn.functional.linear(rows, weight, bias)
    logits = logits.to(_wide(logits.dtype))
    return logits if temperature == 1 else logits.div_(temperature)


def _chunk_on(device: torch.device) -> int:
    """Trained tokens whose logits exist at once: a GPU reads the head's weights once for each of these."""
    return CHUNK if device.type == "cpu" else CHUNK_ON_GPU


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums over the vocabulary or over tokens: float64 stays, all others become float32."""
    return torch.promote_types(dtype, torch.float32)


# The divergence of two models over the whole vocabulary, chunk by chunk


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
        hidden = _packed_body(model, microbatch).last_hidden_state[0, microbatch.source]
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
    states = (_filled_up(each, dim=-2) for each in (hidden, other_hidden))
    values = _ChunkedDivergence.apply(*states, *of_heads, _filled_up(target), temperature, beta)
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
        chunk, values = _chunk_on(hidden.device), []
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
        gradient = _HeadGradient(*own, of_weight=ctx.needs_input_grad[2])
        chunk = _chunk_on(grad.device)
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
    logits = _logits(hidden[part], weight, bias, temperature)
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


# Attention over a packed row

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
