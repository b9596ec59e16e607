"""Which fault it looks like where sampler and trainer give the same tokens other log-probs.

Each fault leaves its own trace in the differences: another temperature or a token too many in front explains them
wholly, a filter makes the sampler the surer one of every token, rounding pulls both ways alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from rlpost.model.packing import Row
from rlpost.model.sums import EMBEDDINGS

EXPLAINED = 0.3  # of the gap may remain where a fault explains it
LEAST = 2e-3  # nats a token: below this nothing is wrong
ONE_SIDED = 0.9  # of the tokens that differ, as a filter has it
ROUND = 0.35  # mean difference over mean absolute difference at most, where it is rounding
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.4, 1.6, 2.0)

ENDS = ("lm_head.weight", "embed_out.weight", *EMBEDDINGS)  # of names of the head and of what it may be tied to

Read = Callable[[Sequence[Row], float], list[torch.Tensor]]  # rows and a temperature -> log-probs, 0 where not sampled


class Disagreement(Enum):
    """What sampler and trainer can disagree by; the value is how a message says it."""

    stale = "the engine samples with other weights than the trainer's: none of a push has arrived"
    half = "only a part of a push has arrived in the engine"
    head = "the engine's output head is not the trainer's: a tied head has stayed as it was"
    temperature = "the sampler draws at another temperature than its log-probs are read at"
    filtered = (
        "the sampler draws from a part of the distribution (top_p, top_k or min_p) and the trainer reads all of it"
    )
    begun_twice = "one of them reads the prompt with a token more in front: bos_token twice"
    shifted = "the log-probs are those of the tokens beside: the mask of what was sampled is shifted"
    format = "the formats of sampler and trainer differ by more than at the start"
    version = "the sampler's version is not that of the last push"
    unknown = "the cause is not known"


@dataclass(frozen=True)
class Differences:
    """log-probs of the same sampled tokens by sampler and trainer, (N,) each."""

    sampler: torch.Tensor
    trainer: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], read: Sequence[torch.Tensor]) -> Differences:
        """Of `rows` whose log-probs the trainer has `read`."""
        return cls(
            torch.cat([row.sampler_log_probs[row.sampled] for row in rows]),
            torch.cat([log_probs[row.sampled] for row, log_probs in zip(rows, read, strict=True)]),
        )

    @property
    def gap(self) -> float:
        """Mean absolute difference, in nats a token."""
        return (self.sampler - self.trainer).abs().mean().item()


def fault_of(rows: Sequence[Row], found: Differences, read: Read, temperature: float, bos: int | None) -> Disagreement:
    """What the differences of a probe look like; what is known of the weights is asked before."""
    enough = EXPLAINED * found.gap
    for shift in (1, -1):
        if _shifted_gap(rows, found, shift) < enough:
            return Disagreement.shifted
    for other in TEMPERATURES:
        if other != temperature and Differences.of(rows, read(rows, other)).gap < enough:
            return Disagreement.temperature
    for changed in _begun_otherwise(rows, bos):
        if Differences.of(changed, read(changed, temperature)).gap < enough:
            return Disagreement.begun_twice
    difference = found.sampler - found.trainer
    differ = difference.abs() > LEAST / 10
    surer = (difference[differ] > 0).float().mean().item() if differ.any() else 0.0
    if surer >= ONE_SIDED:
        return Disagreement.filtered
    if abs(difference.mean().item()) <= ROUND * found.gap:
        return Disagreement.format
    return Disagreement.unknown


def fault_of_weights(differing: Sequence[str], compared: int, moved: bool | None) -> Disagreement | None:
    """What it looks like where these of the engine's weights are not the trainer's; None where none is.

    `moved` is whether any of them is another than at the last look, None where this is the first.
    """
    if not differing:
        return None
    if all(name.endswith(ENDS) for name in differing) and compared > len(differing):
        return Disagreement.head
    arrived = moved if moved is not None else len(differing) < compared
    return Disagreement.half if arrived else Disagreement.stale


def _shifted_gap(rows: Sequence[Row], found: Differences, shift: int) -> float:
    """The gap where each token's log-prob is compared with that of the token beside it in its row."""
    gaps: list[torch.Tensor] = []
    begin = 0
    for row in rows:
        end = begin + row.num_trained
        sampler, trainer = found.sampler[begin:end], found.trainer[begin:end]
        begin = end
        if len(sampler) > 1:
            pair = (sampler[1:], trainer[:-1]) if shift > 0 else (sampler[:-1], trainer[1:])
            gaps.append((pair[0] - pair[1]).abs())
    return torch.cat(gaps).mean().item() if gaps else float("inf")


def _begun_otherwise(rows: Sequence[Row], bos: int | None) -> list[list[Row]]:
    """The rows with one more bos in front, and with one less where they begin with one."""
    if bos is None:
        return []
    more = [_with_prompt(row, torch.cat([torch.tensor([bos]), row.prompt])) for row in rows]
    fewer = [
        _with_prompt(row, row.prompt[1:]) for row in rows if row.prompt[:1].tolist() == [bos] and len(row.prompt) > 1
    ]
    return [more, *([fewer] if len(fewer) == len(rows) else [])]


def _with_prompt(row: Row, prompt: torch.Tensor) -> Row:
    return Row(prompt, row.response, row.sampled, row.sampler_log_probs, 0.0)
