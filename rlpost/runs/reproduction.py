"""Runs beside each other: what they ran on, and a run beside the same run again. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.catalog import CHOICES
from rlpost.config.schema import as_text, flat
from rlpost.record import CODE, DATA, LEFT_OPEN, PRECISION, is_apart
from rlpost.runs.reader import RunRecord

IMPORTANT = ("loss/", "reward/mean", "grad_norm", "eval/", "accuracy/", "entropy")  # how names of figures begin
UNTIMED = ("time/", "memory/")  # how the names of figures begin that are never equal
NOT_COMPARED = ("tracking.",)  # settings that say where output goes
VERSIONS = ("rlpost", "python")  # keys of environment.json
MACHINE = ("platform", "cpu", "cpu_count", "threads", "cuda")
PRECISION_KEYS = ("model.autocast", "policy.dtype")  # keys of its `PRECISION`
Figure = float | None  # None: not finite


@dataclass(frozen=True)
class Difference:
    """One thing on which two runs do not agree; None where one of them lacks it."""

    kind: str  # version, code, data, machine, precision, setting
    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        """As one line, without what both sides of a long list of words share."""
        was, now = (as_text(value) for value in (self.was, self.now))
        if self.name == "cpu":
            was, now = _apart(was, now), _apart(now, was)
        return f"{self.kind} {self.name}: {was} -> {now}"


@dataclass(frozen=True)
class Apart:
    """The most by which a figure differs over the steps, and in which."""

    name: str
    step: int
    was: Figure
    now: Figure

    @property
    def size(self) -> float:
        """The distance; infinite where one of them is missing."""
        return float("inf") if self.was is None or self.now is None else abs(self.was - self.now)


@dataclass(frozen=True)
class Steps:
    """The figures of two runs beside each other, all but time and memory."""

    steps: int  # that are compared
    first_step: int | None  # the first in which any figure differs; None: all are equal bit for bit
    first_figures: list[Apart]  # the figures that differ in that step, the important ones first
    apart: list[Apart]  # each figure that differs anywhere, where it does so most, in the same order


def what_differs(
    was: Mapping[str, Any], now: Mapping[str, Any], config_was: Mapping[str, Any], config_now: Mapping[str, Any]
) -> list[Difference]:
    """The differences between two runs by environment.json and config.yaml; what the first did not record is passed."""
    before, after = parts_of(was, config_was), parts_of(now, config_now)
    return [
        Difference(kind, name, value, after[kind].get(name))
        for kind, values in before.items()
        for name, value in values.items()
        if value != after[kind].get(name)
    ]


def parts_of(environment: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The values of a run that are compared, by the kind of a difference."""
    precision = environment.get(PRECISION) or {}
    return {
        "version": _some(environment, VERSIONS) | environment.get("packages", {}),
        "code": environment.get(CODE) or {},
        "data": environment.get(DATA) or {},
        "machine": _some(environment, MACHINE),
        "precision": _some(precision, PRECISION_KEYS),
        "setting": {k: v for k, v in flat(config).items() if k not in LEFT_OPEN or v not in (None, "auto")},
    }


def differences(records: Sequence[RunRecord]) -> dict[str, dict[str, list[str]]]:
    """The differences between runs, each with the runs' values: settings that all of them have, settings that only some
    have, and the environment (versions, code, data, machine and precision).

    A chosen option counts as a setting, as does the command; where output goes does not.
    """
    known = [{"command": r.verb or "unknown", **dict.fromkeys(CHOICES, "unknown"), **r.settings} for r in records]
    compared = [{key: its[key] for key in its if not key.startswith(NOT_COMPARED)} for its in known]
    settings, of_some = _differing(compared)
    kinds = [parts_of(record.environment, {}) for record in records]
    environment = [{f"{kind} {n}": v for kind, its in each.items() for n, v in its.items()} for each in kinds]
    return {"settings": settings, "settings_of_some": of_some, "environment": _differing(environment)[0]}


def _differing(sides: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The keys of all sides whose values differ, and the keys that only some sides have."""
    shared: dict[str, list[str]] = {}
    of_some: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for side in sides for key in side):
        texts = [as_text(side[key]) if key in side else "-" for side in sides]
        if not all(key in side for side in sides):
            of_some[key] = texts
        elif is_apart(key, [side[key] for side in sides]):
            shared[key] = texts
    return shared, of_some


def _some(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def compare_steps(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], last: int) -> Steps:
    """Compare rows of metrics.jsonl up to the step `last`.

    An evaluation that only one of them has at `last` is left out: a run that ends there measures more, or less.
    """
    before, after = ({row["step"]: row for row in rows if row["step"] <= last} for rows in (was, now))
    found: list[Apart] = []
    for step in sorted(before.keys() | after.keys()):
        one, other = before.get(step, {}), after.get(step, {})
        for name in sorted(one.keys() | other.keys()):
            is_extra = step == last and name.startswith("eval/") and not (name in one and name in other)
            if name.startswith(UNTIMED) or is_extra:
                continue
            if name not in one or name not in other or one[name] != other[name]:
                found.append(Apart(name, step, one.get(name), other.get(name)))
    first = min((each.step for each in found), default=None)
    most: dict[str, Apart] = {}
    for each in found:
        if each.name not in most or each.size > most[each.name].size:
            most[each.name] = each
    found.sort(key=_rank)
    steps = len({step for step in before if step > 0})
    return Steps(steps, first, [each for each in found if each.step == first], sorted(most.values(), key=_rank))


def _rank(each: Apart) -> tuple[bool, float, str]:
    """Sort key of a figure: important figures first, and the largest difference first among equals."""
    return not each.name.startswith(IMPORTANT), -each.size, each.name


def _apart(text: str, other: str) -> str:
    """The words of `text` that `other` lacks."""
    shared = set(other.split())
    return " ".join(word for word in text.split() if word not in shared) or "none besides"
