"""Which of the fast ways are right for an architecture, found out on a small random copy of it.

A packed row is right for models whose tokens meet in attention alone, and whose attention is the
one that rlpost replaces. Log-probs and a gradient of two short completions of one prompt are
compared with the model's own forward on each, in float32, and so is sampling them token by token.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlpost.model.decoding import DECODINGS
from rlpost.model.families import REFUSED, Reader, Verdict, attending, plain_model, tried_on
from rlpost.model.packing import Row, pack
from rlpost.model.small_copy import VOCABULARY, CannotCopyError, small_copy, widths_to_try

LOG_PROBS_OFF, GRADIENT_OFF = 1e-3, 1e-2  # nats, and of its norm: above what float32 rounds, far below a fault
TEMPERATURE = 0.8
# what a model's own code raises for what it was not written for
FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError, AssertionError)
BUILT_ON = ("sdpa", "eager")  # the attention functions that a copy in float32 can be tried with


@dataclass(frozen=True)
class Reading:
    """What a way of reading gives: log-probs and a gradient; and how far it is from another's."""

    log_probs: torch.Tensor  # (M,)
    gradient: torch.Tensor  # (parameters,)

    def fault(self, other: Reading) -> str:
        """In words how far `other` is from this; empty where rounding explains it."""
        off = (other.log_probs - self.log_probs).abs().max().item()
        gradient_off = ((other.gradient - self.gradient).norm() / self.gradient.norm()).item()
        if not off <= LOG_PROBS_OFF:  # NaN is a fault too
            return f"has its log-probs off by {off:.2g}"
        return "" if gradient_off <= GRADIENT_OFF else f"has its gradient off by {gradient_off:.0%}"


def tried_on_a_small_copy(model: nn.Module, readers: Mapping[str, Reader]) -> Verdict:
    """The fastest ways that are right for `model`: those of a small random copy of it."""
    own = plain_model(model)
    implementation: Any = own.config._attn_implementation
    unknown = ""
    device = tried_on(own)
    devices = [device] if device.type == "cuda" else []
    widths = widths_to_try(own)
    for heads in widths:
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            torch.manual_seed(0)
            try:
                small = small_copy(own, heads, device)
            except CannotCopyError as error:
                unknown = f"no small copy of it can be tried: {error}"
                continue
            try:
                verdict = _tried(small, readers)
            except FAULTS as error:
                unknown = f"its own forward fails: {_told(error)}"
                if len(widths) == 1:  # the copy is no other than the model
                    return Verdict(REFUSED, "anew", implementation, unknown)
                continue
        if implementation in BUILT_ON:
            return verdict
        return dataclasses.replace(verdict, attention=implementation)
    return Verdict(list(readers)[-1], "anew", implementation, unknown)


def _tried(small: Any, readers: Mapping[str, Reader]) -> Verdict:
    """The verdict on a small copy. Raises what its own forward raises."""
    rows = _rows()
    attention = "eager"  # does all that an architecture asks for, or says that it cannot
    own = small.config._attn_implementation if small.config._attn_implementation in BUILT_ON else "sdpa"
    try:
        right = _plain(small, rows, "eager")
    except FAULTS as error:  # a model may have its own attention alone
        _told(error)
        attention, right = own, _plain(small, rows, own)
    if reason := _unsound(small, rows, right, attention):
        return Verdict(REFUSED, "anew", own, reason)
    if own != attention:
        with contextlib.suppress(*FAULTS):  # one that it has not; the right one stays
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
    """Two completions of one prompt, and a token that is not trained."""
    generator = torch.Generator().manual_seed(1)
    prompt, *responses = (torch.randint(8, VOCABULARY, (n,), generator=generator) for n in (7, 6, 9))
    sampled = [torch.ones(len(ids), dtype=torch.bool) for ids in responses]
    sampled[1][3] = False
    return [Row(prompt, ids, mask, torch.zeros(len(ids)), 0.0) for ids, mask in zip(responses, sampled, strict=True)]


def _plain(small: Any, rows: Sequence[Row], attention: str) -> Reading:
    """What the model's own forward of each sequence alone says."""
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
    """Why a policy gradient on this model would mean nothing; empty for a causal model with a gradient."""
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
        return f"ends in {_told(error)}"


@torch.no_grad()
def _sampling(small: Any, rows: Sequence[Row], attention: str) -> str:
    """The fastest way to decode that gives the logits of whole sequences, one row ending before the other."""
    sequences = [torch.cat([row.prompt[skipped:], row.response]) for row, skipped in zip(rows, (3, 0), strict=True)]
    lengths = [row.prompt.numel() - skipped for row, skipped in zip(rows, (3, 0), strict=True)]
    with attending(small.config, attention):
        right = [_own_logits(small, ids).log_softmax(-1) for ids in sequences]
        for name, way in DECODINGS.items():
            off = 0.0
            try:
                decoding = way(small, [ids[:n].tolist() for ids, n in zip(sequences, lengths, strict=True)])
                under_way = [0, 1]
                for step in range(6):
                    logits = decoding.next_logits().log_softmax(-1)
                    expected = torch.stack([right[row][lengths[row] + step - 1] for row in under_way])
                    off = max(off, (logits - expected).abs().max().nan_to_num(torch.inf).item())
                    chosen = torch.stack([sequences[row][lengths[row] + step] for row in under_way]).to(logits.device)
                    going = torch.tensor([row == 1 or step != 2 for row in under_way], device=logits.device)
                    decoding.go_on(chosen, going)
                    under_way = [row for row, goes in zip(under_way, going.tolist(), strict=True) if goes]
            except FAULTS as error:
                _told(error)
                continue
            if off <= LOG_PROBS_OFF:
                return name
    return list(DECODINGS)[-1]


def _told(error: Exception) -> str:
    """What a model's own code raised, in a line. Raises it again where it says nothing of the model."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
