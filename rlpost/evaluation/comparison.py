"""Two saved evaluations compared prompt by prompt: which model is better, or how many prompts it takes to know."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rlpost.config.schema import as_text, flat
from rlpost.errors import DataError
from rlpost.evaluation.saved import SavedEvaluation
from rlpost.evaluation.statistics import (
    CONFIDENCE,
    FEWEST_DIFFERING,
    POWER,
    Difference,
    difference,
    shown,
    signed,
)
from rlpost.text import counted

MEASURES = {
    "accuracy_lenient": "accuracy, lenient",
    "accuracy_strict": "accuracy, strict",
    "reward": "reward",
    "loss": "loss",
}
LOWER_IS_BETTER = ("loss",)
# settings under comparison, and settings that change neither prompts nor sampling
MAY_DIFFER = ("model.", "policy.", "env.limit", "eval.", "plugin", "seed")
Key = tuple[str, int]  # a prompt's id, and which of its occurrences in the dataset


def compare(a: SavedEvaluation, b: SavedEvaluation) -> Comparison:
    """Compare B with A, prompt by prompt. Raises DataError unless they share environment, a prompt and a measure."""
    environments = [evaluation.record.get("choices", {}).get("env") for evaluation in (a, b)]
    if None not in environments and environments[0] != environments[1]:
        raise DataError(
            f"A was asked env={environments[0]} and B env={environments[1]}: evaluate both on the same environment"
        )
    of_a, of_b = _by_prompt(a.samples), _by_prompt(b.samples)
    both = [key for key in of_a if key in of_b]
    if not both:
        raise DataError(
            f"{a.name} and {b.name} have no prompt in common ({len(of_a)} and {len(of_b)} scored): evaluate both with "
            "the same env settings"
        )
    measures = {}
    for name in MEASURES:
        pairs = [(_mean(of_a[key], name), _mean(of_b[key], name)) for key in both]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        if name == "loss" and known:  # of a token, so that a row weighs as many as it has
            known = _by_token(known, [(of_a[key][0]["tokens"], of_b[key][0]["tokens"]) for key in both])
        if known:
            found = difference([y - x for x, y in known])
            conclusion = verdict(found, name)
            measures[name] = Measured(fmean(x for x, _ in known), fmean(y for _, y in known), found, conclusion)
    if not measures:
        raise DataError(
            f"{a.name} and {b.name} have no measure in common, as losses of demonstrations and scores of replies: "
            "evaluate both with the same env settings"
        )
    return Comparison(
        a.name,
        b.name,
        len(both),
        len(of_a) - len(both),
        len(of_b) - len(both),
        _differing(a.record, b.record),
        measures,
    )


@dataclass(frozen=True)
class Comparison:
    """The result of comparing B with A.

    `only_a` and `only_b` count the prompts without a scored completion in the other evaluation;
    `differing_settings` maps each setting that differs and may explain a difference to both values.
    """

    name_a: str
    name_b: str
    prompts: int
    only_a: int
    only_b: int
    differing_settings: dict[str, tuple[Any, Any]]
    measures: dict[str, Measured]

    @property
    def verdict(self) -> str:
        """The verdict of lenient accuracy, or of the reward where there is no accuracy."""
        return next(iter(self.measures.values())).verdict

    def sentence(self, a: str, b: str) -> str:
        """The verdict in one sentence: `B is better than A: +4.2% [+1.0%, +7.4%], 500 prompts`.

        It is about accuracy, or about the reward if there is no accuracy or no answer is right.
        """
        known = list(self.measures.items())
        name, measured = next(((n, m) for n, m in known if m.a or m.b), known[0])
        found = measured.difference
        unit = "row" if name in LOWER_IS_BETTER else "prompt"
        size = f"{_signed(found, name)}, {counted(found.prompts, unit)}"
        what = f" in {name}" if name in ("reward", "loss") else ""
        if found.is_significant:
            return f"{measured.verdict.replace('B', b, 1)} than {a}{what}: {size}"
        return f"{b} against {a}{what}: {size}; {measured.verdict}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = asdict(self)
        for name, measured in self.measures.items():
            plain["measures"][name]["difference"] = measured.difference.as_dict()
        return {**plain, "verdict": self.verdict, "confidence": CONFIDENCE, "power": POWER}

    def lines(self) -> list[str]:
        """A table for people, at most 80 columns wide except for long names and settings; the verdicts come last."""
        lines = [f"A  {self.name_a}", f"B  {self.name_b}"]
        unit, done = ("row", "read") if "loss" in self.measures else ("prompt", "answered")
        lines.append(f"{counted(self.prompts, unit)} that both {done}, paired; 95% intervals")
        left_out = [f"{count} only in {side}" for side, count in (("A", self.only_a), ("B", self.only_b)) if count]
        if left_out:
            lines.append(f"left out: {', '.join(left_out)}")
        for key, (a, b) in self.differing_settings.items():
            lines.append(f"beware: {key} differs, {as_text(a)} in A and {as_text(b)} in B")
        lines.append(f"  {'':<18}{'A':>8}{'B':>8}    B - A")
        lines += [_row(MEASURES[name], name, measured) for name, measured in self.measures.items()]
        lines += [f"{name.removeprefix('accuracy_'):<9}{measured.verdict}" for name, measured in self.measures.items()]
        first = next(iter(self.measures.values())).difference
        if not first.is_significant and not first.within_noise and first.detectable is not None:
            power = f"{POWER:.0%} power, {1 - CONFIDENCE:.0%} significance"
            unit = "rows" if "loss" in self.measures else "prompts"
            lines.append(f"{first.needed:,} {unit} would show a difference of this size ({power})")
        return lines


@dataclass(frozen=True)
class Measured:
    """One measure of A and of B on the prompts that both have, and the difference B - A; `verdict` in words."""

    a: float
    b: float
    difference: Difference
    verdict: str


def verdict(found: Difference, measure: str) -> str:
    """The verdict in words: B is better, B is worse, or no difference found, with the size that would be found."""
    if found.is_significant:
        return "B is better" if (found.value > 0) is (measure not in LOWER_IS_BETTER) else "B is worse"
    unit = "row" if measure in LOWER_IS_BETTER else "prompt"
    if found.differing < FEWEST_DIFFERING or found.detectable is None:  # or all differ alike
        differ = f"{found.differing} of {counted(found.prompts, unit)} differ{'s' if found.differing == 1 else ''}"
        return f"no difference found: {differ}, and it takes {FEWEST_DIFFERING} to show one"
    return (
        f"no difference found: {found.prompts} {unit}s cannot show one below about {_figure(found.detectable, measure)}"
    )


def prompt_means(evaluation: SavedEvaluation, measure: str) -> dict[Key, float]:
    """The mean of a measure, such as `reward`, over the scored completions of each prompt that has any."""
    means = {key: _mean(samples, measure) for key, samples in _by_prompt(evaluation.samples).items()}
    return {key: mean for key, mean in means.items() if mean is not None}


def _by_prompt(samples: Sequence[Mapping[str, Any]]) -> dict[Key, list[Mapping[str, Any]]]:
    """The scored completions of each prompt; one that the dataset holds twice is two prompts."""
    numbers: dict[str, list[int]] = defaultdict(list)
    found: dict[Key, list[Mapping[str, Any]]] = {}
    for sample in samples:
        seen = numbers[sample["prompt_id"]]
        if sample["prompt_number"] not in seen:
            seen.append(sample["prompt_number"])
        if sample["valid"]:
            found.setdefault((sample["prompt_id"], seen.index(sample["prompt_number"])), []).append(sample)
    return found


def _mean(samples: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for sample in samples if (value := sample.get(name)) is not None and math.isfinite(value)]
    return fmean(values) if values else None


def _by_token(losses: Sequence[tuple[float, float]], tokens: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Losses per token of each row, weighted so that their mean is that of all tokens.

    Raises DataError for rows that A and B read as different numbers of tokens.
    """
    if any(a != b for a, b in tokens):
        raise DataError(
            "A and B read these rows as different tokens, whose losses cannot be compared: take models of one tokenizer"
        )
    mean = fmean(count for count, _ in tokens)
    return [(x * count / mean, y * count / mean) for (x, y), (count, _) in zip(losses, tokens, strict=True)]


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted settings, and the resolved temperature, that differ between two records."""
    settings = [flat(record.get("settings", {})) | _drawn(record) for record in (a, b)]
    if not all(settings):
        return {}
    keys = dict.fromkeys([*settings[0], *settings[1]])
    both = {key: (settings[0].get(key), settings[1].get(key)) for key in keys if not key.startswith(MAY_DIFFER)}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _drawn(record: Mapping[str, Any]) -> dict[str, Any]:
    """The temperature that completions were sampled at, also if the setting is null."""
    result = record.get("result", {})
    return {"sampling.temperature": result["temperature"]} if "temperature" in result else {}


def _row(title: str, name: str, measured: Measured) -> str:
    a, b = _figure(measured.a, name), _figure(measured.b, name)
    return f"  {title:<18}{a:>8}{b:>8}    {_signed(measured.difference, name)}"


def _signed(found: Difference, name: str) -> str:
    return signed(found.value, found.low, found.high, is_share=_is_share(name))


def _figure(value: float, name: str) -> str:
    return shown(value, is_share=_is_share(name))


def _is_share(name: str) -> bool:
    return name.startswith("accuracy")
