"""Fine-tuning on the tiny model: learning, packing, records, resuming, stopping."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.catalog import TRAIN_SFT
from rlpost.config.compose import compose
from rlpost.data import faults
from rlpost.data.chat_templates import jinja
from rlpost.data.encoding import Encoder
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.errors import ConfigError, DataError, DivergedError
from rlpost.rewards.score import Score
from rlpost.train import ranks, resolve, sft
from rlpost.train.sft import assemble as assemble_sft
from rlpost.train.sft import row_of
from tests.says import Says
from tests.trainings import ends_alike, metrics, printed, train_in

TINY = [
    *["model=tiny", "model.autocast=none", "policy=transformers", "env.limit=20", "env.max_completion_tokens=6"],
    *["eval.limit=6", "minibatch_size=8", "optim.lr=3e-3", "checkpoint.every=0"],
]
NO_EVAL = "eval.enabled=false"


def run(folder: Path, *words: str, resume: str | None = None) -> int:
    return train_in(TRAIN_SFT, folder, [*TINY, *words], resume)


def stop_in_update(number: int, folder: Path, *words: str) -> None:
    """Train, and send this process Ctrl-C during that update."""
    original, seen = ranks.update, []

    def counting(*args: Any, **named: Any) -> Any:
        seen.append(None)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "update", counting)
        assert run(folder, *words) == 130


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places of the samples that are trained on, in their order."""
    places: list[str] = []
    monkeypatch.setattr(sft, "row_of", lambda sample: places.append(sample.where) or row_of(sample))
    return places


def test_held_out_loss_falls_and_every_number_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    assert run(tmp_path / "r", "epochs=3") == 0
    start, *steps = metrics(tmp_path / "r")
    assert [line["step"] for line in steps] == list(range(1, 9))  # 60 samples by 8: the last step has 4
    assert [line["epoch"] for line in steps] == pytest.approx([*(8 * n / 20 for n in range(1, 8)), 3.0])
    # a random model gives each of 259 tokens about the same chance
    assert start["eval/loss"] == pytest.approx(math.log(259), abs=0.1)
    assert steps[-1]["eval/loss"] < start["eval/loss"] - 0.5
    assert steps[0]["loss/sft"] == pytest.approx(math.log(259), abs=0.1)
    assert [line["lr"] for line in steps] == pytest.approx([3e-3 * (1 - n / 8) for n in range(8)])
    assert all(line["grad_norm"] > 0 for line in steps)
    parts = assemble_sft(compose(TRAIN_SFT, TINY).settings)
    assert start["eval/tokens"] == sum(sum(s.mask) for s in parts.held_out)
    assert sum(line["tokens/trained"] for line in steps) == 3 * sum(sum(s.mask) for s in parts.samples.rows)
    assert sum(line["tokens/read"] for line in steps) == 3 * sum(len(s.ids) for s in parts.samples.rows)
    shown = capsys.readouterr().out.splitlines()
    says("train", "\n".join(line for line in shown if line.startswith(("data ", "work ", "the held-out loss "))))
    [compared] = [line for line in shown if line.startswith("  loss ")]
    figures = [f"{line[f'eval/loss{end}']:.3f}" for line in (start, steps[-1]) for end in ("", "_low", "_high")]
    assert [compared.index(figure) for figure in figures] == sorted(compared.index(figure) for figure in figures)


def test_every_epoch_holds_every_sample_once_in_its_own_order(tmp_path: Path, seen: list[str]) -> None:
    assert run(tmp_path / "r", "epochs=2", NO_EVAL) == 0
    first, second = seen[:20], seen[20:]
    assert len(set(first)) == 20
    assert Counter(first) == Counter(second)
    assert first != second


@pytest.mark.parametrize("loss", ["loss=sft", "loss.aggregation=sequence_mean", "loss.kl_coef=0.2", "loss=minor_sft"])
def test_packing_changes_no_loss(tmp_path: Path, loss: str) -> None:
    for name, words in (("packed", ["tokens_per_microbatch=150"]), ("alone", ["packing=false"])):
        assert run(tmp_path / name, loss, *words, "steps=2", "eval.every=1") == 0
    packed, alone = metrics(tmp_path / "packed"), metrics(tmp_path / "alone")
    assert packed[0]["eval/loss"] == pytest.approx(alone[0]["eval/loss"], abs=1e-4)
    for one, other in zip(packed[1:], alone[1:], strict=True):
        for key in ("loss/sft", "eval/loss", "grad_norm", "kl/ref", "loss/kl"):
            assert one.get(key) == (None if key not in other else pytest.approx(other[key], abs=1e-4)), key
    assert ("kl/ref" in packed[1]) == (loss in ("loss.kl_coef=0.2", "loss=minor_sft"))
    if "kl/ref" in packed[1]:
        assert packed[1]["kl/ref"] == pytest.approx(0.0, abs=1e-6)  # the reference is the starting model
        assert packed[2]["kl/ref"] > 1e-6
    if loss == "loss=minor_sft":
        assert packed[1]["loss/sft"] == pytest.approx(math.log(2), abs=1e-5)  # -log sigmoid(0)


def test_loss_is_the_mean_over_the_tokens_of_the_minibatch(tmp_path: Path) -> None:
    words = ["env.limit=3", "minibatch_size=3", "steps=1", NO_EVAL]
    assert run(tmp_path / "r", *words) == 0
    parts = assemble_sft(compose(TRAIN_SFT, [*TINY, *words]).settings)
    losses = []
    for sample in parts.samples.rows:
        ids = torch.tensor(sample.ids)
        log_probs = parts.model(ids[None]).logits[0].log_softmax(-1)
        losses += [-log_probs[place - 1, ids[place]].item() for place, trained in enumerate(sample.mask) if trained]
    assert metrics(tmp_path / "r")[0]["loss/sft"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_run_resumed_on_another_day_is_bitwise_the_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its template writes the day into every prompt; the run keeps its first one."""
    dated = "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}"
    (tmp_path / "dated.jinja").write_text(dated + jinja("chatml"))
    words = ["epochs=2", "deterministic=true", "optim.schedule=cosine", "eval.every=2"]
    words += [f"model.chat_template={tmp_path / 'dated.jinja'}"]
    monkeypatch.setattr(resolve, "today", lambda: "2024-02-03")
    assert run(tmp_path / "whole", *words) == 0
    stop_in_update(3, tmp_path / "broken", *words)
    assert f"sft --resume {tmp_path / 'broken'}" in printed(capsys, "after step 3")
    monkeypatch.setattr(resolve, "today", lambda: "2024-02-04")
    assert run(tmp_path / "broken", *words, resume="latest") == 0
    assert ends_alike(tmp_path / "broken", tmp_path / "whole")


def test_resumed_run_keeps_its_minibatch_size(tmp_path: Path) -> None:
    assert run(tmp_path, "steps=1", NO_EVAL) == 0
    with pytest.raises(ConfigError, match="minibatch_size=8, not 4"):
        run(tmp_path, "steps=2", NO_EVAL, "minibatch_size=4", resume="auto")


def test_accuracy_is_of_the_trained_weights_and_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    played: list[int] = []

    def score(self: ArithmeticEnv, conversation: Any) -> Score:
        played.append(1)
        right = float(len(played) > 40)  # wrong before training and after step 2, right after step 4
        return Score(reward=right, accuracy_strict=right, accuracy_lenient=right)

    monkeypatch.setattr(ArithmeticEnv, "score", score)
    words = ["steps=20", "eval.every=2", "eval.limit=20", "eval.accuracy=true", "eval.stop_at_accuracy=0.9"]
    assert run(tmp_path, *words) == 0
    evaluated = [line for line in metrics(tmp_path) if "eval/loss" in line]
    assert [(line["step"], line["eval/accuracy_lenient"]) for line in evaluated] == [(0, 0), (2, 0), (4, 1)]
    assert [line.get("eval/ends_training") for line in evaluated] == [None, None, 1.0]
    assert (tmp_path / "checkpoints/latest").resolve().name == "step-000004"
    lines = capsys.readouterr().out.splitlines()
    says("train", "\n".join(line for line in lines if line.startswith(("training ended", "  accuracy"))))
    assert run(tmp_path, *words, resume="auto") == 0
    assert metrics(tmp_path)[-1]["step"] == 4


def test_without_accuracy_nothing_samples() -> None:
    assert assemble_sft(compose(TRAIN_SFT, [*TINY, "policy=vllm"]).settings).policy is None


def test_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    """The first step of this rate makes all weights so large that the second has no loss."""
    with pytest.raises(DivergedError, match=r"step 2: .* nan"):
        run(tmp_path, "steps=3", NO_EVAL, "optim.lr=1e38")
    lines = (tmp_path / "diverged-step-000002/minibatch.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert sum(json.loads(lines[0])["sampled"]) > 0


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["steps=3", "epochs=2"], "epochs=2"),
        (["eval.stop_at_accuracy=0.5"], "eval.accuracy=true"),
        (["eval.stop_at_accuracy=0.5", "eval.accuracy=true"], "eval.every"),
        (["loss=grpo"], "loss=grpo"),
        (["loss.beta=0.1"], "loss.beta"),
        (["env.split=test"], "env.split=test"),
    ],
    ids=["two ends", "no accuracy", "no evaluations", "another loss", "a key of another loss", "held out"],
)
def test_impossible_settings_are_refused_in_one_line(words: list[str], key: str, says: Says) -> None:
    with says.refused("train", ConfigError, key):
        compose(TRAIN_SFT, words)


# Rows that are encoded when they are drawn


@pytest.fixture
def many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words that train on 40 rows, 5 looked at first; row 3 is malformed, 12 is cut, 30's prompt alone is too long."""
    monkeypatch.setattr(faults, "ALL_UP_TO", 10)
    monkeypatch.setattr(faults, "SAMPLE", 5)
    rows: list[dict[str, Any]] = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(1, 41)]
    rows[2] = {"prompt": 3, "completion": "x"}
    rows[11] = {"prompt": "Long?", "completion": "a long answer " * 40}
    rows[29] = {"messages": None, "prompt": "Nothing " * 200, "completion": "cut whole"}
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["env=dataset", f"env.path={file}", "env.held_out=0", "env.limit=null", "max_tokens=120"]
    return [*words, NO_EVAL, "deterministic=true"]


def test_many_rows_are_encoded_when_drawn_and_bad_ones_told_then(
    tmp_path: Path,
    many_rows: list[str],
    seen: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    says: Says,
) -> None:
    encoded: list[str] = []
    original, words = Encoder.encode, [*many_rows, "max_bad_share=0.5"]
    monkeypatch.setattr(Encoder, "encode", lambda self, d: encoded.append(d.where) or original(self, d))
    parts = assemble_sft(compose(TRAIN_SFT, [*TINY, *words]).settings)
    assert [where.rpartition(" ")[2] for where in encoded] == ["1", "10", "18", "26", "34"]  # the 3rd is malformed
    assert parts.samples.count() == 39
    assert run(tmp_path / "whole", *words, "epochs=1") == 0
    says("train", printed(capsys, "bad row"))
    assert f"{tmp_path / 'many.jsonl'}, row 30" not in seen
    assert len(seen) == 39
    assert len(set(seen)) == 38  # one of the next pass stands in for the row that was skipped


def test_run_on_many_rows_is_resumed_bitwise(tmp_path: Path, many_rows: list[str]) -> None:
    words = [*many_rows, "max_bad_share=0.5", "epochs=2", "minibatch_size=6", "optim.schedule=cosine"]
    assert run(tmp_path / "whole", *words) == 0
    stop_in_update(9, tmp_path / "broken", *words)  # in the second pass
    assert run(tmp_path / "broken", *words, resume="latest") == 0
    assert ends_alike(tmp_path / "broken", tmp_path / "whole")
    with pytest.raises(DataError, match="env settings"):
        run(tmp_path / "broken", *words, "epochs=3", "env.system_prompt=Be brief.", resume="latest")


@pytest.mark.parametrize(("most", "counts"), [("0.05", "1 of 24 .*1 malformed.* 5%"), ("0.02", "1 of 40 .* 2%")])
def test_too_many_bad_rows_end_a_run_on_many_rows(most: str, counts: str, tmp_path: Path, many_rows: list[str]) -> None:
    """Shares add up: 1 / 24 of the rows drawn so far, and 1 / 40 malformed."""
    with pytest.raises(DataError, match=counts):
        run(tmp_path / "r", *many_rows, f"max_bad_share={most}", "epochs=1")
