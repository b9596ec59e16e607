"""Evaluation folders made by hand, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpost.data.conversation import Completion, Conversation
from rlpost.evaluation.play import summarise
from rlpost.evaluation.saved import write_evaluation


def answered(task: str, marks: str, number: int = 0, *, reward: float | None = None) -> list[Conversation]:
    """One finished completion of `task` for each of `marks`: r(ight), w(rong) or f(ailed)."""
    made = []
    for sample, mark in enumerate(marks):
        conversation = Conversation(
            {"question": task, "answer": "so\nr"}, [{"role": "user", "content": task}], number, sample
        )
        conversation.prompt_text = f"<user>{task}"
        conversation.add_completion(Completion([7, 8], [-0.5, -0.5], mark, "stop", 0))
        right = float(mark == "r")
        conversation.reward = (right if reward is None else reward) if mark != "f" else None
        conversation.valid, conversation.terminated = mark != "f", True
        conversation.error = "ValueError: x" if mark == "f" else None
        if mark != "f":
            conversation.accuracy_lenient = conversation.accuracy_strict = right
            conversation.answer = mark
        made.append(conversation)
    return made


def write(folder: Path, marks: Sequence[str], *, first: int = 0, choice: str = "arithmetic", **settings: Any) -> Path:
    """An evaluation of tasks `q0`, `q1`, ... from `first` on, one for each of `marks`."""
    played = [c for i, row in enumerate(marks) for c in answered(f"q{first + i}", row, i)]
    result = summarise(played, k=[1]).as_dict()
    about = {"folder": str(folder), "model": "builtin:tiny", "choices": {"env": choice}}
    record = {**about, "settings": {"env": {"limit": None}, **settings}, "result": result}
    write_evaluation(folder, record, played)
    return folder


def keep_held_out(run: Path, step: int, marks: Sequence[str]) -> None:
    """In the run folder `run` the completions of an evaluation after `step`, one for each of `marks`."""
    made = write(run / "kept", marks) / "samples.parquet"
    (run / "held-out").mkdir(exist_ok=True)
    made.rename(run / "held-out" / f"step-{step:06d}.parquet")
