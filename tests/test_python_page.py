"""docs/python.md: each of its loops trains, and does what `rlpost train grpo` does."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from figures import code_lines
from test_docs import blocks

LOOPS = {name: text for _, name, text in blocks("python.md") if name}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_has_forty_lines_and_public_names(name: str) -> None:
    assert code_lines(LOOPS[name]) <= 40
    nodes = list(ast.walk(ast.parse(LOOPS[name])))
    statements = [node.lineno for node in nodes if isinstance(node, ast.stmt)]
    assert len(statements) == len(set(statements))  # each on a line of its own
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module != "pathlib":
            assert node.module is not None
            assert node.module in ("rlpost.rewards.score", "rlpost.settings") or node.module.count(".") == 1
            shown = importlib.import_module(node.module)
            assert all(hasattr(shown, alias.name) for alias in node.names)


@pytest.mark.parametrize("name", ["transformers_loop.py", pytest.param("vllm_loop.py", marks=pytest.mark.vllm)])
def test_a_loop_trains_as_the_command_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlpost.models import load_model

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    training, _, saving = LOOPS[name].rpartition("\n\n")
    loop: dict[str, Any] = {"__name__": "loop"}
    exec(compile(training, name, "exec"), loop)
    model, policy, steps = loop["model"], loop["policy"], loop["STEPS"]
    begun = load_model(loop["folder"])

    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.rpartition(" ")[2] for line in printed] == [str(number) for number in range(1, steps + 1)]
    assert policy.version == steps
    assert loop["batch"]["policy_version"].tolist() == [steps - 1] * len(loop["batch"])
    assert all(not torch.equal(old, new) for old, new in zip(begun.parameters(), model.parameters(), strict=True))

    loop["collector"].fill(loop["PROMPTS"])
    batch = loop["buffer"].take(loop["PROMPTS"])  # under the weights pushed last
    assert batch["policy_version"].unique().tolist() == [steps]
    assert batch["group_id"].unique(return_counts=True)[1].tolist() == [loop["GROUP"]] * loop["PROMPTS"]
    assert gap(model, batch) < 1e-3 < gap(begun, batch)
    for mine, commands in zip(gradient_of_the_page(loop, batch), gradient_of_the_command(model, batch), strict=True):
        torch.testing.assert_close(mine, commands, rtol=1e-3, atol=1e-6)
    assert max(p.grad.abs().max().item() for p in model.parameters()) > 1e-3

    exec(compile(saving, name, "exec"), loop)
    [folder] = tmp_path.glob("trained-*")
    saved = load_model(folder).state_dict()
    assert all(torch.equal(saved[key], weight) for key, weight in model.state_dict().items())


def gap(model: Any, batch: Any) -> float:
    """The largest |log π - log µ| over the sampled tokens, read row by row without any of rlpost's packing."""
    furthest = 0.0
    fields = (batch["tokens", "full"], batch["log_probs", "full"], batch["masks", "all_assistant_mask"])
    for ids, sampled, mask in zip(*(field.unbind() for field in fields), strict=True):
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        furthest = max(furthest, (log_probs - sampled[1:])[mask[1:]].abs().max().item())
    return furthest


def gradient_of_the_page(loop: dict[str, Any], batch: Any) -> list[torch.Tensor]:
    loop["model"].zero_grad()
    loop["objective"](batch).loss.backward()
    return [p.grad.clone() for p in loop["model"].parameters()]


def gradient_of_the_command(model: Any, batch: Any) -> list[torch.Tensor]:
    """As `rlpost train grpo` computes it with its defaults."""
    from rlpost.catalog import TRAIN_GRPO
    from rlpost.config.compose import compose
    from rlpost.model.packing import pack, rows_of
    from rlpost.objectives.policy_loss import PolicyObjective
    from rlpost.train.grpo import fill_advantages

    rows, settings = rows_of(batch), compose(TRAIN_GRPO, ["model=tiny"]).settings
    fill_advantages(batch, rows, settings.advantage, settings.loss, settings.seed)
    objective = PolicyObjective(settings.loss, temperature=1.0, max_completion_tokens=16)
    model.zero_grad()
    for microbatch in pack(rows, 64, model.device):
        objective(model, microbatch, objective.normaliser(rows)).loss.backward()
    return [p.grad.clone() for p in model.parameters()]
