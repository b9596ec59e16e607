"""Finds the fast ways that are right for an architecture, on a small random copy of it.

A packed row is right for models whose tokens meet in attention alone, and whose attention is the
one that rlpost replaces. The probe compares log-probs and a gradient of two short completions of one prompt
with the model's own forward on each, in float32, and the logits of sampling them token by token.

The copy has one layer of every kind, is narrow, and has a small vocabulary and short windows.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from rlpost.model.decoding import DECODINGS
from rlpost.model.families import REFUSED, Reader, Verdict, attending, plain_model, tried_on
from rlpost.model.packing import Row, pack
from rlpost.text import first_line

LOG_PROBS_OFF, GRADIENT_OFF = 1e-3, 1e-2  # nats, and relative norm: above float32 rounding, far below a fault
TEMPERATURE = 0.8
# raised by a model's own code for inputs that it does not support
FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError, AssertionError)
BUILT_ON = ("sdpa", "eager")  # attention functions that run in float32 on any device


class CannotCopyError(Exception):
    """The architecture does not allow a small copy."""


@dataclass(frozen=True)
class Reading:
    """The log-probs and the gradient that one way of reading gives."""

    log_probs: torch.Tensor  # (M,)
    gradient: torch.Tensor  # (parameters,)

    def fault(self, other: Reading) -> str:
        """How far `other` is from this, in words; empty if rounding explains it."""
        off = (other.log_probs - self.log_probs).abs().max().item()
        gradient_off = ((other.gradient - self.gradient).norm() / self.gradient.norm()).item()
        if not off <= LOG_PROBS_OFF:  # NaN is a fault too
            return f"has its log-probs off by {off:.2g}"
        return "" if gradient_off <= GRADIENT_OFF else f"has its gradient off by {gradient_off:.0%}"


def tried_on_a_small_copy(model: nn.Module, readers: Mapping[str, Reader]) -> Verdict:
    """The fastest ways that are right for a small random copy of `model`."""
    own = plain_model(model)
    implementation: Any = own.config._attn_implementation
    unknown = ""
    device = tried_on(own)
    devices = [device] if device.type == "cuda" else []
    widths = _widths_to_try(own)
    for heads in widths:
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            torch.manual_seed(0)
            try:
                small = _small_copy(own, heads, device)
            except CannotCopyError as error:
                unknown = f"no small copy of it can be tried: {error}"
                continue
            try:
                verdict = _tried(small, readers)
            except FAULTS as error:
                unknown = f"its own forward fails: {_reason(error)}"
                if len(widths) == 1:  # the copy is as wide as the model
                    return Verdict(REFUSED, "anew", implementation, unknown)
                continue
        if implementation in BUILT_ON:
            return verdict
        return dataclasses.replace(verdict, attention=implementation)
    return Verdict(list(readers)[-1], "anew", implementation, unknown)


def _tried(small: Any, readers: Mapping[str, Reader]) -> Verdict:
    """The verdict on a small copy. Raises whatever its own forward raises."""
    rows = _rows()
    attention = "eager"  # supports every feature of an architecture, or raises
    own = small.config._attn_implementation if small.config._attn_implementation in BUILT_ON else "sdpa"
    try:
        right = _plain(small, rows, "eager")
    except FAULTS as error:  # some models have their own attention only
        _reason(error)
        attention, right = own, _plain(small, rows, own)
    if reason := _unsound(small, rows, right, attention):
        return Verdict(REFUSED, "anew", own, reason)
    if own != attention:
        with contextlib.suppress(*FAULTS):  # the model may lack it: keep the right one
            attention = attention if right.fault(_plain(small, rows, own)) else own
    reading, reason = "", ""
    for name, reader in readers.items():
        fault = _fault_of(small, reader, rows, right, attention)
        if not fault:
            reading = name
            break
        reason = reason or f"a packed row {fault}"
    assert reading, f"{type(small).__name__} is not read as it reads itself: {reason}"
    return Verdict(
        reading, _sampling(small, rows, attention), attention, "" if reading.startswith("packed") else reason
    )


def _rows() -> list[Row]:
    """Two completions of one prompt, with one token that is not trained."""
    generator = torch.Generator().manual_seed(1)
    prompt, *responses = (torch.randint(8, VOCABULARY, (n,), generator=generator) for n in (7, 6, 9))
    sampled = [torch.ones(len(ids), dtype=torch.bool) for ids in responses]
    sampled[1][3] = False
    return [Row(prompt, ids, mask, torch.zeros(len(ids)), 0.0) for ids, mask in zip(responses, sampled, strict=True)]


def _plain(small: Any, rows: Sequence[Row], attention: str) -> Reading:
    """The reading of the model's own forward, one sequence at a time."""
    log_probs = []
    with attending(small.config, attention):
        for row in rows:
            logits = _own_logits(small, torch.cat([row.prompt, row.response]))[row.prompt.numel() - 1 : -1]
            chosen = (logits / TEMPERATURE).log_softmax(-1).gather(-1, row.response[:, None].to(logits.device))
            log_probs.append(chosen.squeeze(-1)[row.sampled.to(logits.device)])
        return _with_gradient(small, torch.cat(log_probs))


def _own_logits(small: Any, ids: torch.Tensor) -> torch.Tensor:
    return small(input_ids=ids[None].to(small.device), use_cache=False).logits[0]


def _with_gradient(small: Any, log_probs: torch.Tensor) -> Reading:
    weights = torch.linspace(-1, 1.5, log_probs.numel(), device=log_probs.device)
    parameters = [p for p in small.parameters() if p.requires_grad]
    gradients = torch.autograd.grad((weights * log_probs).sum(), parameters, allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    flat = [(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs]
    return Reading(log_probs.detach(), torch.cat(flat))


def _unsound(small: Any, rows: Sequence[Row], right: Reading, attention: str) -> str:
    """Why this model cannot be trained; empty for a causal model with a finite gradient."""
    if not (right.log_probs.isfinite().all() and right.gradient.isfinite().all() and right.gradient.any()):
        return "its own log-probs have no finite gradient"
    ids = torch.cat([rows[1].prompt, rows[1].response])
    with torch.no_grad(), attending(small.config, attention):
        until, whole = _own_logits(small, ids[:-4]), _own_logits(small, ids)[:-4]
    off = (until.log_softmax(-1) - whole.log_softmax(-1)).abs().max().item()
    return "" if off <= LOG_PROBS_OFF else f"its log-probs of a token depend on later ones (by {off:.2g})"


def _fault_of(small: Any, reader: Reader, rows: Sequence[Row], right: Reading, attention: str) -> str:
    [microbatch] = pack(rows, 1000, small.device)
    try:
        with attending(small.config, attention):
            log_probs, _ = reader(small, microbatch, TEMPERATURE)
            return right.fault(_with_gradient(small, log_probs))
    except FAULTS as error:
        return f"ends in {_reason(error)}"


@torch.no_grad()
def _sampling(small: Any, rows: Sequence[Row], attention: str) -> str:
    """The fastest way to sample that gives the logits of whole sequences when one row ends before the other."""
    sequences = [torch.cat([row.prompt[skipped:], row.response]) for row, skipped in zip(rows, (3, 0), strict=True)]
    lengths = [row.prompt.numel() - skipped for row, skipped in zip(rows, (3, 0), strict=True)]
    with attending(small.config, attention):
        right = [_own_logits(small, ids).log_softmax(-1) for ids in sequences]
        for name, way in DECODINGS.items():
            off = 0.0
            try:
                decoding = way(small, [ids[:n].tolist() for ids, n in zip(sequences, lengths, strict=True)])
                active = [0, 1]
                for step in range(6):
                    logits = decoding.next_logits().log_softmax(-1)
                    expected = torch.stack([right[row][lengths[row] + step - 1] for row in active])
                    off = max(off, (logits - expected).abs().max().nan_to_num(torch.inf).item())
                    chosen = torch.stack([sequences[row][lengths[row] + step] for row in active]).to(logits.device)
                    going = torch.tensor([row == 1 or step != 2 for row in active], device=logits.device)
                    decoding.go_on(chosen, going)
                    active = [row for row, goes in zip(active, going.tolist(), strict=True) if goes]
            except FAULTS as error:
                _reason(error)
                continue
            if off <= LOG_PROBS_OFF:
                return name
    return list(DECODINGS)[-1]


def _reason(error: Exception) -> str:
    """A model's own error in one line. Raises it again if memory ran out, which says nothing about the model."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# The small copy

VOCABULARY = 64
WINDOW = 4  # shorter than the sequences of the probe, so that a window has an effect
EVEN = 16  # the hidden size stays a multiple of this, as some kernels require
WIDE = 256  # models up to this hidden size are not narrowed
MOST_PARAMETERS = 40_000_000  # with two sets of gradients, this stays within 0.5 GB
NOT_ITS_KIND = ("idx", "index", "layer_id", "layer_num", "training")  # parts of names that only number the layer
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
# sizes by their names in configs: all of these are divided by one number, which keeps their ratios
DIVIDED = (
    *HIDDEN,
    *HEADS,
    *["mamba_n_heads", "mamba_num_heads", "mamba_d_ssm", "linear_num_key_heads", "linear_num_value_heads"],
    *["attention_hidden_size", "lru_width", "word_embed_proj_dim", "mamba_intermediate"],
    *["block_dim", "conv_dim", "conv_dim_out"],
)
# divided too, but rounded and at least 1
ROUNDED = ("num_key_value_heads", "num_kv_heads", "n_groups", "mamba_n_groups")
# divided too; they need not fit the other sizes
FREE = (
    *["intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size"],
    *["intermediate_size_mlp", "shared_intermediate_size", "ffn_hidden_size", "block_ff_dim"],
    *["prefix_dense_intermediate_size", "moe_shared_expert_intermediate_size", "dense_intermediate_size"],
    "expert_ffn_hidden_size",
)
# sizes that are at most this large in the copy
AT_MOST = (
    (4, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    (2, ("moe_topk", "moe_top_k", "moe_k", "num_experts_per_tok", "num_experts_per_token")),
    (2, ("experts_per_token", "top_k_experts")),
    (1, ("n_group", "topk_group")),
    (WINDOW, ("sliding_window", "sliding_window_size", "local_window_size", "max_window_size", "keep_window_size")),
    (WINDOW, ("window_size", "attention_window_size", "attention_chunk_size", "index_topk")),
)
CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "logit_softcapping")
TIGHT = 1.0  # low enough that the probe's logits reach the cap
DEPTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers")


def _small_copy(model: PreTrainedModel, heads: int | None, device: torch.device) -> PreTrainedModel:
    """A random float32 copy of the architecture of `model` on `device`, with `heads` heads or as wide as it is.

    The caller guards torch's random state. Raises CannotCopyError if the copy cannot be built.
    """
    config = small_config(model, heads)
    try:
        with torch.device("meta"), no_init_weights():
            size = sum(p.numel() for p in type(model)(copy.deepcopy(config)).parameters())
        if size > MOST_PARAMETERS:
            raise CannotCopyError(f"its smallest copy has {size / 1e6:.0f} million parameters")
        small: Any = type(model)._from_config(config, dtype=torch.float32)
    except CannotCopyError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        # raised by the model's own code for unexpected sizes
        raise CannotCopyError(f"{type(error).__name__}: {first_line(error)}") from error
    _draw_wide(small)
    return small.to(device).eval()


def _widths_to_try(model: PreTrainedModel) -> list[int | None]:
    """Numbers of heads to try for the copy, in order; None: as wide as the model, always the last."""
    wide = _first(model.config.get_text_config(decoder=True), HIDDEN) > WIDE
    return [2, 8, None] if wide else [None]


def small_config(model: PreTrainedModel, heads: int | None) -> Any:
    """The configuration of the copy."""
    config: Any = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    _keep_layers(text, _layers_until_every_kind(model))
    for part in _parts(config):
        _cut_words(part)
        if part is not text and part is not config:
            for name in DEPTHS:
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, 1)
    for name in CAPS:
        if isinstance(getattr(text, name, None), float):
            setattr(text, name, TIGHT)
    for most, names in AT_MOST:
        for name in names:
            _at_most(text, name, most)
    if heads is not None:
        _narrow(text, heads)
        for part in _parts(config):
            if isinstance(getattr(part, "out_hidden_size", None), int):
                part.out_hidden_size = _first(text, HIDDEN)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _layers_until_every_kind(model: PreTrainedModel) -> int:
    """How many of the first layers, at least two, include every kind of layer of `model`."""
    text = model.config.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if not stacks:
        return depth
    listed = [
        value
        for value in vars(text).values()
        if isinstance(value, (list, tuple, str)) and len(value) == depth and list(value) != list(range(depth))
    ]
    first_of: dict[Any, int] = {}
    for number, layer in enumerate(stacks[0]):
        first_of.setdefault((layer_kind(layer), *(repr(values[number]) for values in listed)), number)
    return min(depth, max(2, *(number + 1 for number in first_of.values())))


def layer_kind(layer: nn.Module) -> str:
    """A layer's modules, their plain attributes and the shapes of their weights, as text that identifies its kind."""
    made_of: list[Any] = []
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, str, type(None)))
            and not key.startswith("_")
            and not any(part in key for part in NOT_ITS_KIND)
        }
        shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
        made_of.append((name, type(module).__name__, sorted(plain.items()), shapes))
    return repr(made_of)


def _parts(config: Any) -> list[Any]:
    """A config and all configs inside it."""
    inside = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for sub in inside if sub is not None for part in _parts(sub))]


def _keep_layers(text: Any, count: int) -> None:
    depth = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple, str)) and len(value) == depth:
            setattr(text, name, value[:count])
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if getattr(text, name, None) == depth:
            setattr(text, name, count)
    for name, value in list(vars(text).items()):  # layers named by their numbers
        if name.endswith(("_indices", "_only_layers", "_idxs")) and isinstance(value, (list, tuple)):
            setattr(text, name, type(value)(number for number in value if number < count))
    _at_most(text, "num_kv_shared_layers", 0)
    _at_most(text, "max_window_layers", count)


def _cut_words(config: Any) -> None:
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, VOCABULARY)
    for name, value in list(vars(config).items()):
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            setattr(config, name, None if name == "pad_token_id" else 0)
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = 0


def _narrow(text: Any, fewest_heads: int) -> None:
    """Divide the sizes of `text` by the largest number that leaves `fewest_heads` and the ratios of sizes.

    A number of heads that shares no divisor with the other sizes is divided by itself.
    """
    hidden, heads = _first(text, HIDDEN), _first(text, HEADS)
    values = {name: getattr(text, name) for name in DIVIDED if _is_own_size(text, name)}
    widest = hidden // EVEN if hidden % EVEN == 0 else hidden
    fitting = [
        by
        for by in range(1, (heads or hidden // 64) + 1)
        if widest % by == 0 and all(value % by == 0 for value in values.values())
    ]
    by = next((by for by in reversed(fitting) if not heads or heads // by >= fewest_heads), 1)
    if by == 1:
        by = fitting[-1]
    for name, value in values.items():
        setattr(text, name, value // by)
    for inside in [value for value in vars(text).values() if isinstance(value, dict)]:
        inside.update({name: max(1, inside[name] // by) for name in HEADS if isinstance(inside.get(name), int)})
    new_heads = max(1, _first(text, HEADS))
    for name in ROUNDED:
        if _is_own_size(text, name):
            rounded = max(1, getattr(text, name) // by)
            setattr(text, name, rounded if new_heads % rounded == 0 else 1)
    for name in FREE:
        if _is_own_size(text, name):
            setattr(text, name, max(32, getattr(text, name) // by // 32 * 32))


def _is_own_size(text: Any, name: str) -> bool:
    """Whether `name` is a size of `text` itself, not an alias."""
    value = getattr(text, name, None)
    return isinstance(value, int) and not isinstance(value, bool) and name in vars(text)


def _first(text: Any, names: tuple[str, ...]) -> int:
    return next((value for name in names if isinstance(value := getattr(text, name, None), int)), 0)


def _at_most(config: Any, name: str, most: int) -> None:
    value = getattr(config, name, None)
    if isinstance(value, int) and not isinstance(value, bool) and value > most:
        setattr(config, name, most)


@torch.no_grad()
def _draw_wide(model: nn.Module) -> None:
    """Draw weights so wide that every part of the model affects its logits; caps, scales and decays stay sensible."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if parameter.ndim >= 2:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        else:  # gains, biases, sinks: around their initial values
            parameter.add_(0.3 * noise)
