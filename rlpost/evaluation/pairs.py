"""Pairs of replies from a model's own completions: of one prompt a right and a wrong one, or the best and the worst.

Both are completions of one group, sampled with the same prompt in the same step, or in the same evaluation. A pair
holds the token ids that were sampled, so that `rlpost train dpo` learns from exactly those.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rlpost.data.conversation import CUT
from rlpost.data.formats import CHOSEN, IDS, MASK, REJECTED, RENDERED, RESTARTS
from rlpost.errors import DataError
from rlpost.evaluation.saved import is_evaluation, read_sampled
from rlpost.files import replaced
from rlpost.runs.rollouts import read_rollouts, read_table
from rlpost.text import counted

Completion = dict[str, Any]  # under the names of rlpost.runs.rollouts.SCHEMA
ROUNDING = 1e-9  # 1 - 0.8 is a margin of 0.2
# why completions, or all of a prompt's, are in no pair
FAILED, TRUNCATED, REPEATED, TURNS = "reward failed", "truncated", "repeated", "several turns, of an evaluation"
ALL_RIGHT, ALL_WRONG, CLOSE = "all right", "all wrong", "rewards closer than the margin"
EMPTY, FEW, ENOUGH = "none left, or none judged", "fewer than two left", "enough pairs already"


@dataclass
class Found:
    """How many pairs were found, and how many completions and prompts gave none, by why."""

    pairs: int = 0
    prompts: int = 0  # groups of completions
    prompts_with_pairs: int = 0
    completions: int = 0
    completions_left_out: Counter[str] = field(default_factory=Counter)  # by why
    prompts_without_pairs: Counter[str] = field(default_factory=Counter)  # by why
    apart: float = 0.0  # largest difference of two rewards of a prompt

    def lines(self) -> list[str]:
        """The counts, for people."""
        lines = [
            f"{counted(self.pairs, 'pair')} of {counted(self.prompts_with_pairs, 'prompt')}, from "
            f"{counted(self.completions, 'completion')} of {counted(self.prompts, 'prompt')}"
        ]
        if self.completions_left_out:
            lines.append("completions left out: " + _listed(self.completions_left_out))
        if self.prompts_without_pairs:
            lines.append("prompts without a pair: " + _listed(self.prompts_without_pairs))
        return lines

    def refusal(self, *, judged: bool) -> str:
        """Why there is no pair, and what --margin could do; `judged`: a margin or an accuracy says what is right."""
        lines = ["there is no pair among these completions", *self.lines()[1:]]
        if not judged:
            lines = ["no accuracy was measured, which would say what is right"]
        apart = f"the rewards of a prompt differ by at most {self.apart:.3g}: a smaller --margin pairs by them"
        return "\n".join([*lines, apart if self.apart else "no two rewards of a prompt differ"])

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "apart"}


def write_pairs(file: Path, groups: Iterable[Sequence[Completion]], *, margin: float | None, most: int) -> Found:
    """Write the pairs of `groups` to a .jsonl file, which appears only when complete; returns the counts.

    Without a `margin` a pair is a right and a wrong completion (lenient accuracy 1 and 0), with one it is the best and
    the worst left whose rewards are at least that far apart. A prompt gives at most `most` pairs, and a completion is
    in one of them. Raises DataError, and writes nothing, if there is no pair.
    """
    found, of_prompt = Found(), Counter[str]()
    judged = margin is not None
    with replaced(file) as making, making.open("w", encoding="utf-8") as stream:
        for group in groups:
            found.prompts += 1
            found.completions += len(group)
            judged = judged or any(each["accuracy_lenient"] is not None for each in group)
            usable = _usable(group, found.completions_left_out)
            pairs, why = _best_and_worst(usable, margin) if margin is not None else _right_and_wrong(usable)
            prompt = group[0]["prompt"]
            rewards = [each["reward"] for each in usable]
            found.apart = max(found.apart, max(rewards, default=0.0) - min(rewards, default=0.0))
            kept = pairs[: most - of_prompt[prompt]]
            of_prompt[prompt] += len(kept)
            for chosen, rejected in kept:
                stream.write(json.dumps(_row(chosen, rejected), ensure_ascii=False) + "\n")
            found.pairs += len(kept)
            found.prompts_with_pairs += bool(kept)
            if not kept:
                found.prompts_without_pairs[ENOUGH if pairs else why] += 1
        stream.flush()
        if not found.pairs:
            raise DataError(found.refusal(judged=judged))
    return found


def groups_of_run(run: Path, steps: Sequence[int]) -> Iterator[list[Completion]]:
    """The completions of each prompt of these steps of a run."""
    for step in steps:
        yield from _grouped(read_rollouts(run, step))


def groups_of_table(file: Path) -> Iterator[list[Completion]]:
    """The completions of each prompt in a table: of rollouts, also exported ones, or of an evaluation's samples."""
    yield from _grouped(read_sampled(file) if is_evaluation(file) else read_table(file))


def _grouped(rows: Iterable[Completion]) -> Iterator[list[Completion]]:
    ordered = sorted(rows, key=lambda row: (row["step"], row["group"], row["sample"]))
    for _, group in groupby(ordered, key=lambda row: (row["step"], row["group"])):
        yield list(group)


def _usable(group: Sequence[Completion], left_out: Counter[str]) -> list[Completion]:
    """The whole completions whose reward is known, each text once."""
    kept: list[Completion] = []
    seen: set[tuple[int, ...]] = set()
    for each in group:
        ids = tuple(each["token_ids"])
        if not each["valid"] or each["reward"] is None:
            left_out[FAILED] += 1
        elif each["finish_reason"] in CUT:
            left_out[TRUNCATED] += 1
        elif each["mask"] is None:
            left_out[TURNS] += 1
        elif ids in seen:
            left_out[REPEATED] += 1
        else:
            seen.add(ids)
            kept.append(each)
    return kept


def _right_and_wrong(group: Sequence[Completion]) -> tuple[list[tuple[Completion, Completion]], str]:
    """A right and a wrong completion each, those with the most and the least reward first; why, if there is none."""
    ordered = sorted(group, key=lambda each: -each["reward"])
    right = [each for each in ordered if each["accuracy_lenient"] == 1]
    wrong = [each for each in reversed(ordered) if each["accuracy_lenient"] == 0]
    why = EMPTY if not right and not wrong else ALL_WRONG if not right else ALL_RIGHT
    return list(zip(right, wrong, strict=False)), why


def _best_and_worst(group: Sequence[Completion], margin: float) -> tuple[list[tuple[Completion, Completion]], str]:
    """The best with the worst, the second best with the second worst, and so on; why, if none are far enough apart."""
    ordered = sorted(group, key=lambda each: -each["reward"])
    half = len(ordered) // 2
    pairs = zip(ordered[:half], reversed(ordered[len(ordered) - half :]), strict=True)
    apart = [(best, worst) for best, worst in pairs if best["reward"] - worst["reward"] >= margin - ROUNDING]
    return [(best, worst) for best, worst in apart if best["reward"] > worst["reward"]], CLOSE if half else FEW


def _row(chosen: Completion, rejected: Completion) -> dict[str, Any]:
    """A pair as `rlpost.data.formats` reads it; messages where they were recorded, and the sampled ids."""
    row: dict[str, Any] = {}
    if chosen["prompt_messages"]:
        row["prompt"] = chosen["prompt_messages"]
    sides = {CHOSEN: chosen, REJECTED: rejected}
    row |= {name: each["turns"] for name, each in sides.items()}
    row |= {f"score_{name}": each["reward"] for name, each in sides.items()}
    row[RENDERED] = chosen["prompt"]
    for name, each in sides.items():
        row[name + IDS] = each["token_ids"]
        if not all(each["mask"]):
            row[name + MASK] = each["mask"]
        if each["restarts"]:
            row[name + RESTARTS] = each["restarts"]
    return row | {"step": chosen["step"], "group": chosen["group"]}


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {why}" for why, count in counts.most_common())
