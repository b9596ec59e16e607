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
from transformers import AutoModelForCausalLM

from rlpost.catalog import TRAIN_SFT
from rlpost.config.compose import compose
from rlpost.data import faults
from rlpost.data.chat_templates import jinja
from rlpost.data.encoding import Encoder
from rlpost.errors import ConfigError, DataError, DivergedError
from rlpost.objectives.supervised import SFTObjective
from rlpost.train import ranks, resolve, sft
from rlpost.train.sft import assemble as assemble_sft
from rlpost.train.sft import row_of
from tests.trainings import metrics, train_in, untimed

TINY = [
    "model=tiny",
    "model.autocast=none",
    "policy=transformers",
    "env.limit=20",
    "env.max_completion_tokens=6",
    "eval.limit=6",
    "minibatch_size=8",
    "optim.lr=3e-3",
    "checkpoint.every=0",
]


def run(folder: Path, *words: str, resume: str | None = None) -> int:
    return train_in(TRAIN_SFT, folder, [*TINY, *words], resume)


def weights(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints/latest/model", dtype=torch.float32)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_held_out_loss_falls_and_every_number_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    said = capsys.readouterr().out
    assert "20 samples, 6 held out\n" in said
    assert "work    8 steps of 8 samples (3 epochs), at most " in said
    first, last = (
        f"{line['eval/loss']:.3f} [{line['eval/loss_low']:.3f}, {line['eval/loss_high']:.3f}] of 6 rows"
        for line in (start, steps[-1])
    )
    assert "before and after training, held out, 95% intervals\n" in said
    assert f"  loss per token    {first}  ->  {last}\n" in said
    assert "the held-out loss will rest on 6 rows, which is few; raise eval.limit\n" in said


def test_every_epoch_holds_every_sample_once_in_an_order_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sft, "row_of", lambda sample: seen.append(sample.where) or row_of(sample))
    assert run(tmp_path / "r", "epochs=2", "eval.enabled=false") == 0
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


def test_the_loss_is_the_mean_over_the_tokens_of_the_minibatch(tmp_path: Path) -> None:
    words = ["env.limit=3", "minibatch_size=3", "steps=1", "eval.enabled=false"]
    assert run(tmp_path / "r", *words) == 0
    parts = assemble_sft(compose(TRAIN_SFT, [*TINY, *words]).settings)
    total, count = 0.0, 0
    for sample in parts.samples.rows:
        ids = torch.tensor(sample.ids)
        log_probs = parts.model(ids[None]).logits[0].log_softmax(-1)
        for place, trained in enumerate(sample.mask):
            if trained:
                total -= log_probs[place - 1, ids[place]].item()
                count += 1
    assert metrics(tmp_path / "r")[0]["loss/sft"] == pytest.approx(total / count, abs=1e-5)


def stop_in_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process Ctrl-C while `step` is being done."""
    original, seen = ranks.update, []

    def counting(*args: Any, **named: Any) -> Any:
        seen.append(None)
        if len(seen) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **named)

    monkeypatch.setattr(ranks, "update", counting)


def test_a_resumed_run_is_bitwise_the_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["epochs=2", "deterministic=true", "optim.schedule=cosine", "eval.every=2"]
    assert run(tmp_path / "whole", *words) == 0
    with monkeypatch.context() as patch:
        stop_in_step(3, patch)
        assert run(tmp_path / "broken", *words) == 130
    assert (
        f"stopped after step 3; to go on: rlpost train sft --resume {tmp_path / 'broken'}\n" in capsys.readouterr().out
    )
    assert run(tmp_path / "broken", *words, resume="latest") == 0
    assert untimed(tmp_path / "broken") == untimed(tmp_path / "whole")
    assert torch.equal(weights(tmp_path / "broken"), weights(tmp_path / "whole"))


def test_a_template_that_writes_the_day_keeps_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dated = "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}"
    (tmp_path / "dated.jinja").write_text(dated + jinja("chatml"))
    words = ["epochs=2", "deterministic=true", f"model.chat_template={tmp_path / 'dated.jinja'}"]
    monkeypatch.setattr(resolve, "today", lambda: "2024-02-03")
    assert run(tmp_path / "whole", *words) == 0
    with monkeypatch.context() as patch:
        stop_in_step(3, patch)
        assert run(tmp_path / "broken", *words) == 130
    monkeypatch.setattr(resolve, "today", lambda: "2024-02-04")
    assert run(tmp_path / "broken", *words, resume="latest") == 0
    assert untimed(tmp_path / "broken") == untimed(tmp_path / "whole")


def test_other_rows_are_not_resumed_with(tmp_path: Path) -> None:
    assert run(tmp_path, "steps=1", "eval.enabled=false") == 0
    with pytest.raises(DataError, match=r"the run has 8 different rows drawn, shuffled.* this data gives 2"):
        run(tmp_path, "steps=2", "eval.enabled=false", "env.limit=2", resume="auto")
    with pytest.raises(ConfigError, match="began with minibatch_size=8, not 4"):
        run(tmp_path, "steps=2", "eval.enabled=false", "minibatch_size=4", resume="auto")


def test_accuracy_is_measured_with_the_trained_weights_and_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlpost.envs.arithmetic import ArithmeticEnv
    from rlpost.rewards.score import Score

    played: list[int] = []

    def score(self: ArithmeticEnv, conversation: Any) -> Score:
        played.append(1)
        right = float(len(played) > 40)  # wrong before training and after step 2, right after step 4
        return Score(reward=right, accuracy_strict=right, accuracy_lenient=right)

    monkeypatch.setattr(ArithmeticEnv, "score", score)
    words = ["steps=20", "eval.every=2", "eval.accuracy=true", "eval.stop_at_accuracy=0.9"]
    words += ["eval.limit=20"]
    assert run(tmp_path, *words) == 0
    evaluated = [line for line in metrics(tmp_path) if "eval/loss" in line]
    assert [(line["step"], line["eval/accuracy_lenient"]) for line in evaluated] == [(0, 0), (2, 0), (4, 1)]
    assert [line.get("eval/ends_training") for line in evaluated] == [None, None, 1.0]
    assert (tmp_path / "checkpoints/latest").resolve().name == "step-000004"
    said = capsys.readouterr().out
    why = "the accuracy on the 10 prompts that decide, 100.0% [68.8%, 100.0%], has reached eval.stop_at_accuracy=0.9"
    assert f"training ended early, after step 4: {why}\n" in said
    assert "  accuracy          0.0% [0.0%, 31.2%]  ->  100.0% [68.8%, 100.0%]\n" in said
    assert run(tmp_path, *words, resume="auto") == 0
    assert "nothing is left to do: 4 steps are done; it ended early: the accuracy on the 10" in capsys.readouterr().out


def test_without_accuracy_nothing_samples() -> None:
    parts = assemble_sft(compose(TRAIN_SFT, [*TINY, "policy=vllm"]).settings)
    assert parts.policy is None


def test_bad_rows_are_counted_shown_and_past_a_share_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n}?", "completion": "ok" if n else "a long answer " * 40} for n in range(10)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["env=dataset", f"env.path={file}", "max_tokens=120", "eval.enabled=false", "steps=1", "env.limit=null"]
    assert run(tmp_path / "r", *words, "env.held_out=0.0", "max_bad_share=0.1") == 0
    assert "bad rows: cut: " in capsys.readouterr().out
    with pytest.raises(DataError, match="1 of 10 rows are bad"):
        run(tmp_path / "strict", *words, "env.held_out=0.0", "max_bad_share=0.05")


def test_a_loss_that_is_not_finite_stops_the_run_with_what_is_needed_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SFTObjective.__call__

    def poisoned(self: SFTObjective, *args: Any) -> Any:
        output = original(self, *args)
        output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(SFTObjective, "__call__", poisoned)
    with pytest.raises(DivergedError, match="step 1: loss nan"):
        run(tmp_path, "steps=3", "eval.enabled=false")
    lines = (tmp_path / "diverged-step-000001/minibatch.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert sum(json.loads(lines[0])["sampled"]) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps=3", "epochs=2"], "steps=3 and epochs=2 both say when training ends: take one of them out"),
        (["eval.stop_at_accuracy=0.5"], "eval.stop_at_accuracy needs replies to be scored: add eval.accuracy=true"),
        (["eval.stop_at_accuracy=0.5", "eval.accuracy=true"], "needs evaluations between the first step and the last"),
        (["loss=grpo"], "loss=grpo is for rlpost train grpo; rlpost train sft takes one of minor_sft, sft"),
        (["loss.beta=0.1"], "loss.beta is not a setting of loss=sft: it belongs to loss=minor_sft"),
        (["env.split=test"], "would train on what is held out"),
    ],
)
def test_what_cannot_work_is_refused_on_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(TRAIN_SFT, words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


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
    return [
        "env=dataset",
        f"env.path={file}",
        "env.held_out=0.0",
        "env.limit=null",
        "eval.enabled=false",
        "max_tokens=120",
        "max_bad_share=0.5",
        "deterministic=true",
    ]


def test_many_rows_are_encoded_when_drawn_and_bad_ones_told_then(
    tmp_path: Path, many_rows: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoded: list[str] = []
    original = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, d: encoded.append(d.where) or original(self, d))
    parts = assemble_sft(compose(TRAIN_SFT, [*TINY, *many_rows]).settings)
    assert [where.rpartition(" ")[2] for where in encoded] == ["1", "10", "18", "26", "34"]  # the 3rd is malformed
    assert parts.samples.count() == 39
    seen: list[str] = []
    monkeypatch.setattr(sft, "row_of", lambda sample: seen.append(sample.where) or row_of(sample))
    assert run(tmp_path / "whole", *many_rows, "epochs=1") == 0
    said = capsys.readouterr().out
    file = tmp_path / "many.jsonl"
    assert f"bad rows: {file}, row 3, field " in said
    assert f"bad row: {file}, row 12: cut: " in said
    assert said.count(": the rest is trained on\n") == 1
    assert f"bad row: {file}, row 30: cut: " in said
    assert said.count(": skipped\n") == 1
    assert "bad rows met in training: 2, 1 of all drawn were skipped\n" in said
    assert f"{file}, row 30" not in seen
    assert len(seen) == 39
    assert len(set(seen)) == 38  # one of the next pass stands in for the row that was skipped


def test_a_run_on_many_rows_goes_on_bitwise(
    tmp_path: Path, many_rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*many_rows, "epochs=2", "minibatch_size=6", "optim.schedule=cosine"]
    assert run(tmp_path / "whole", *words) == 0
    with monkeypatch.context() as patch:
        stop_in_step(9, patch)  # in the second pass
        assert run(tmp_path / "broken", *words) == 130
    assert run(tmp_path / "broken", *words, resume="latest") == 0
    assert untimed(tmp_path / "broken") == untimed(tmp_path / "whole")
    assert torch.equal(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    with pytest.raises(DataError, match="resume with the data, the tokenizer and the env settings it began with"):
        run(tmp_path / "broken", *words, "epochs=3", "env.system_prompt=Be brief.", resume="latest")


def test_too_many_bad_rows_end_a_run_on_many_rows(tmp_path: Path, many_rows: list[str]) -> None:
    with pytest.raises(DataError, match=r"1 of 24 rows are bad \(with 1 malformed more than the 5% allowed\)"):
        run(tmp_path / "r", *many_rows, "max_bad_share=0.05", "epochs=1")  # 1 / 24 + 1 / 40
    with pytest.raises(DataError, match=r"1 of 40 rows are bad \(more than the 2% allowed\)"):
        run(tmp_path / "s", *many_rows, "max_bad_share=0.02", "epochs=1")
