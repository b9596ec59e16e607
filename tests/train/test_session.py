"""A step that leaves out a call of the session is an error that says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.model.packing import rows_of
from rlpost.settings.commands import RunRequest
from rlpost.train.assemble import assemble_grpo
from rlpost.train.grpo import fill_advantages
from rlpost.train.session import Session

SMALL = ["model=tiny", "policy=transformers", "steps=1", "prompts_per_step=2", "group_size=2", "eval.enabled=false"]


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("collected", r"step 1: the loop has come to session\.update without session\.collected"),
        ("trained", r"step 1: the loop has come to session\.finish without session\.trained"),
        ("push", r"step 1: the weights have changed and were not pushed"),
        ("finish", r"step 1: the loop has come to the end without session\.finish"),
        ("", ""),
    ],
)
def test_a_call_that_is_left_out_is_named(left_out: str, said: str, tmp_path: Path) -> None:
    composed = compose(TRAIN_GRPO, [*SMALL, "env.max_completion_tokens=4"])
    request = RunRequest(tmp_path / "run", None, composed.overrides, ["rlpost", "train", "grpo"], composed.yaml)

    def learn() -> None:
        session: Session[Any, Any]
        with Session(composed.settings, request) as session:
            parts = session.load(assemble_grpo)
            session.ranks.over(1)
            for _ in session.steps():
                batch = parts.buffer.take(2, 0)
                if left_out != "collected":
                    session.collected(batch)
                rows = rows_of(batch)
                fill_advantages(session.settings, batch, rows)
                for number, row in enumerate(rows):
                    row.advantage = (-1.0) ** number
                updates = [session.update(rows, batch)]
                session.metrics["grad_norm"] = updates[0].grad_norm
                if left_out != "trained":
                    session.trained(updates)
                if left_out != "push":
                    parts.collector.update_policy_weights_(parts.model)
                if left_out != "finish":
                    session.finish(batch)

    if not said:
        return learn()
    with pytest.raises(RuntimeError, match=said):
        learn()
    return None
