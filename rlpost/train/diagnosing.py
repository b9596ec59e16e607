"""A training that looks at its own figures and texts after each step, and says once what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

from rlpost.runs.diagnosis import AT_LEAST, Diagnosis, Symptom, repeated_text
from rlpost.train.progress import Progress

TEXTS_EVERY = 5  # steps


def symptoms_after(
    step: int, diagnosis: Diagnosis, metrics: Mapping[str, float], batch: Any, progress: Progress
) -> list[Symptom]:
    """What shows for the first time after `step`, which trained on `batch`; `progress` remembers that it was told."""
    found = diagnosis.after({"step": step, **metrics})
    if isinstance(batch, TensorDictBase) and step >= AT_LEAST and step % TEXTS_EVERY == 0:
        texts = repeated_text(step, list(batch["text", "response"]), list(batch["query"]))
        found += [texts] if texts is not None else []
    new = [symptom for symptom in found if symptom.name not in progress.symptoms]
    progress.symptoms += [symptom.name for symptom in new]
    return new
