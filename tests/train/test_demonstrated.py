"""`rlpost eval` of a model fine-tuned on rows without a reward: the loss of the held-out demonstrations."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlpost.cli.main import run
from rlpost.errors import DataError
from rlpost.evaluation.comparison import compare
from rlpost.evaluation.saved import demonstration_row, read_evaluation, write_evaluation, write_rows
from rlpost.record import LOSS, read_metrics

TINY = ["model=tiny", "policy=transformers", "model.autocast=none"]
COLOURS = ("red", "green", "blue", "yellow", "purple")


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    replies = [f"It is {COLOURS[n % 5]}" + " indeed" * (n % 4) for n in range(60)]
    rows = [{"prompt": f"Colour number {n}?", "completion": reply} for n, reply in enumerate(replies)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def evaluated(*words: str, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert run(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_fine_tuned_run_is_evaluated_by_its_held_out_loss(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env=dataset", "env.path=chats.jsonl", "env.held_out=0.2", "minibatch_size=8", "steps=3", "max_tokens=120"]
    assert run(["train", "sft", *TINY, *words, "optim.lr=0.003", "--name", "chats"]) == 0
    said = capsys.readouterr().out
    rows, _ = read_metrics(chats / "runs/chats/metrics.jsonl")
    before, after = rows[0], rows[-1]

    own = evaluated("model=runs/chats", "model.autocast=none", capsys=capsys)
    base = evaluated(*TINY, "env=runs/chats", capsys=capsys)

    assert "model=runs/chats" in said
    assert own["result"]["num_prompts"] == after["eval/rows"] > 3
    assert own["result"]["loss"] == pytest.approx(after[LOSS], rel=1e-5)
    assert base["result"]["loss"] == pytest.approx(before[LOSS], rel=1e-5)
    assert own["settings"]["max_tokens"] == 120
    for step, found in ((0, base), (3, own)):  # the run keeps the same losses, row by row
        kept = pq.read_table(chats / f"runs/chats/held-out/step-{step:06d}.parquet").to_pylist()
        again = pq.read_table(Path(found["folder"]) / "samples.parquet").to_pylist()
        assert [row["prompt_id"] for row in kept] == [row["prompt_id"] for row in again]
        assert [row["loss"] for row in kept] == pytest.approx([row["loss"] for row in again], rel=1e-4)
    capsys.readouterr()
    assert run(["eval", "compare", Path(base["folder"]).name, "chats"]) == 0
    assert f"{after[LOSS]:.3f}" in capsys.readouterr().out
    assert run(["eval", "show", Path(own["folder"]).name]) == 0
    assert f"{after[LOSS]:.3f}" in capsys.readouterr().out


def test_the_difference_of_losses_is_that_of_all_tokens(tmp_path: Path) -> None:
    """Row k has k tokens, and B reads each token 0.5 nats better than A in odd rows, 0.1 in even ones."""
    for name, gain in (("a", (0.0, 0.0)), ("b", (0.1, 0.5))):
        losses = {k: 2.0 + k / 10 - gain[k % 2] for k in range(1, 11)}
        rows = [demonstration_row(k, {"messages": [k]}, ("p", "c"), loss, tokens=k) for k, loss in losses.items()]
        write_evaluation(tmp_path / name, {}, [], rows)

    found = compare(*(read_evaluation(tmp_path / name / "samples.parquet") for name in "ab"))

    odd, even = 1 + 3 + 5 + 7 + 9, 2 + 4 + 6 + 8 + 10
    loss = found.measures["loss"]
    assert loss.difference.value == pytest.approx(-(0.5 * odd + 0.1 * even) / (odd + even))
    assert loss.a == pytest.approx(sum(k * (2 + k / 10) for k in range(1, 11)) / 55)
    assert found.verdict == "B is better"
    assert list(found.measures) == ["loss"]


def test_losses_of_two_tokenizers_are_not_compared(tmp_path: Path) -> None:
    for name, tokens in (("a", 4), ("b", 5)):
        write_rows(tmp_path / f"{name}.parquet", [demonstration_row(1, {"text": "x"}, ("", "x"), 1.0, tokens)])

    with pytest.raises(DataError, match="tokens"):
        compare(*(read_evaluation(tmp_path / f"{name}.parquet") for name in "ab"))


def test_rows_without_reply_or_reward_are_named(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (chats / "prompts.jsonl").write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')

    assert run(["eval", *TINY, "env=dataset", "env.path=prompts.jsonl"]) == 3
    said = capsys.readouterr().err
    assert "row 1" in said
    assert "env.reward=" in said
