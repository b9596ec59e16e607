"""A training that looks at its own figures after each step, and says once what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from rlpost.runs.diagnosis import AT_LEAST, Symptom, diagnose, repeated_text

ROWS_KEPT = 2000  # steps that are looked at
TEXTS_EVERY = 5  # steps


class Watch:
    """The symptoms of one training; those that its earlier steps show already are not told again."""

    def __init__(self, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self._rows: list[Mapping[str, Any]] = list(rows)
        self._told = {symptom.name for symptom in diagnose(self._rows)}

    def after(self, step: int, metrics: Mapping[str, float], batch: Any) -> list[Symptom]:
        """What shows for the first time after `step`, which trained on `batch`."""
        self._rows = [*self._rows[-ROWS_KEPT:], {"step": step, **metrics}]
        found = diagnose(self._rows)
        if isinstance(batch, TensorDictBase) and step >= AT_LEAST and step % TEXTS_EVERY == 0:
            texts, prompts = list(batch["text", "response"]), list(batch["query"])
            found += filter(None, [repeated_text(step, texts, prompts)])
        new = [symptom for symptom in found if symptom.name not in self._told]
        self._told |= {symptom.name for symptom in new}
        return new
