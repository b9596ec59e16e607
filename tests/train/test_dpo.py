"""Direct preference optimisation on the tiny model: learning, records, the reference, splits, resuming, bad rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from rlpost.catalog import TRAIN_DPO
from rlpost.config.compose import compose
from rlpost.data import faults
from rlpost.errors import DataError
from rlpost.model.packing import Row, filler, pack, shares_of
from rlpost.model.trainable import load_trainable
from rlpost.objectives.preference import PreferenceObjective, pair_loss
from rlpost.settings import Autocast, DPOLossSettings, OptimSettings
from rlpost.train.dpo import assemble as assemble_dpo
from rlpost.train.dpo import rows_of
from rlpost.train.update import Learner, Microbatches, gradient_of, read_log_probs
from tests.says import Says
from tests.trainings import ends_alike, metrics, train_in, train_in_parts

CPU = torch.device("cpu")
SMALL = ["model=tiny", "model.autocast=none", "minibatch_size=8", "optim.lr=1e-2", "checkpoint.every=0"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Settings with a file of 40 pairs; two neighbouring ones have one prompt."""
    rows = [
        {"prompt": f"Say {number // 2}.", "chosen": "yes" + "!" * (number % 3), "rejected": "no" + "?" * (number % 4)}
        for number in range(40)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*SMALL, f"env.path={file}", "env.held_out=0.3"]


def run(folder: Path, words: Sequence[str], resume: str | None = None) -> int:
    return train_in(TRAIN_DPO, folder, words, resume)


def test_chosen_replies_become_likelier_in_every_number(tmp_path: Path, words: list[str]) -> None:
    assert run(tmp_path / "r", [*words, "epochs=3"]) == 0
    start, *steps = metrics(tmp_path / "r")
    assert start["eval/loss"] == pytest.approx(math.log(2))  # the model is its own reference
    assert (start["eval/reward_margin"], start["eval/pair_accuracy"]) == (0.0, 0.5)
    assert steps[0]["loss/dpo"] == pytest.approx(math.log(2))
    assert (steps[0]["reward_margin"], steps[0]["pair_accuracy"]) == (0.0, 0.5)
    last = steps[-1]
    assert last["epoch"] == 3.0
    assert last["reward_margin"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])
    assert last["eval/pair_accuracy"] == 1.0
    assert 0 < last["eval/reward_margin_low"] < last["eval/reward_margin"]
    assert last["eval/loss_low"] < last["eval/loss"] < last["eval/loss_high"] < math.log(2)
    assert {"grad_norm", "lr", "tokens/trained", "tokens/read"} <= last.keys()
    assert 0 < last["eval/rows"] == start["eval/rows"] < 40


def test_resumed_run_is_the_unbroken_one(tmp_path: Path, words: list[str]) -> None:
    more = ["loss=ipo", "loss.sft_coef=0.5", "eval.every=2", "optim.schedule=constant"]
    whole, parted = train_in_parts(TRAIN_DPO, tmp_path, [*words, *more])
    assert ends_alike(whole, parted)
    assert metrics(whole)[1]["loss/sft"] > 0


def test_the_reference_of_an_adapter_is_the_model_without_it(tmp_path: Path, words: list[str]) -> None:
    adapted = [*words, "lora.enabled=true", "eval.enabled=false", "loss=dpo_norm", "optim.schedule=constant"]
    assert run(tmp_path / "r", [*adapted, "steps=2"]) == 0
    assert run(tmp_path / "r", [*adapted, "steps=4"], resume="auto") == 0
    first, *_, last = metrics(tmp_path / "r")
    assert first["loss/dpo"] == pytest.approx(math.log(2))
    assert last["reward_margin"] > 0.1


def test_gradient_is_the_same_however_pairs_are_split(words: list[str]) -> None:
    settings = compose(TRAIN_DPO, [*words, "loss.sft_coef=0.3"]).settings
    parts = assemble_dpo(settings)
    model, parameters = parts.model.double(), list(parts.model.parameters())
    with torch.no_grad():  # away from the reference
        for parameter in parameters:
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.manual_seed(0))
    pairs = sorted(parts.samples.rows, key=lambda pair: pair.where)[:10]
    rows = [row for pair in pairs for row in rows_of(pair)]
    whole_at_once = Microbatches(10_000, CPU, Autocast.none)
    reference = load_trainable(settings, None, with_reference=False).model.double()
    for row, log_probs in zip(rows, read_log_probs(reference, whole_at_once, rows), strict=True):
        row.ref_log_probs = log_probs

    def gradient(rows: Sequence[Row], tokens: int) -> torch.Tensor:
        learner = Learner(model, parts.optimizer, parts.objective, OptimSettings(), None)
        gradient_of(learner, Microbatches(tokens, CPU, Autocast.none), rows)
        found = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        parts.optimizer.zero_grad(set_to_none=True)
        return found * (len(rows) / 20)  # of a share: its part of the whole minibatch's mean

    whole = gradient(rows, 10_000)
    assert whole.norm() > 1e-3
    ids = [torch.cat([row.prompt, row.response]) for row in rows]
    logits = model(input_ids=pad_sequence(ids, batch_first=True)).logits.log_softmax(-1)  # pads are behind all
    own = [
        values[len(row.prompt) - 1 :][: len(row.response)].gather(-1, row.response[:, None])[:, 0]
        for values, row in zip(logits, rows, strict=True)
    ]
    masks, known = [row.sampled for row in rows], [row.ref_log_probs for row in rows if row.ref_log_probs is not None]
    padded = [pad_sequence(each, batch_first=True) for each in (own, known, masks)]
    loss, _ = pair_loss("dpo", padded[0], padded[1], padded[2], **parts.objective.coefficients)
    plain = torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])
    shares = shares_of(rows, 2)
    assert all([place + 1 for place in share[::2]] == share[1::2] for share in shares)  # whole pairs
    halves = sum(gradient([rows[place] for place in share], 120) for share in shares)
    for other in (plain, gradient(rows, 1), gradient(rows, 90), halves):
        assert (other - whole).norm() < 1e-6 * whole.norm()


def test_pair_stays_in_one_microbatch_with_its_prompt_once() -> None:
    def pair(prompt: list[int], *lengths: int) -> list[Row]:
        return [
            Row(torch.tensor(prompt), torch.ones(n, dtype=torch.int64), torch.ones(n) > 0, torch.zeros(n), 1.0)
            for n in lengths
        ]

    rows = [*pair([5, 6, 7], 2, 3), *pair([5, 6, 7], 4, 1), *pair([8, 9], 30, 1)]
    packed = list(pack(rows, 12, CPU, together=2))
    assert [(len(each.rows), each.num_packed) for each in packed] == [(2, 8), (2, 8), (2, 33)]
    packed = list(pack(rows, 13, CPU, together=2))  # both pairs of one prompt: 3 + 2 + 3 + 4 + 1
    assert [(len(each.rows), each.num_packed) for each in packed] == [(4, 13), (2, 33)]
    assert [len(each.rows) for each in pack(rows, 12, CPU)] == [3, 1, 1, 1]


def test_a_filler_of_pairs_is_a_pair_and_has_a_loss() -> None:
    log_probs = torch.zeros(2, requires_grad=True)
    loss = PreferenceObjective(DPOLossSettings(sft_coef=1.0)).of(filler(CPU, together=2), 4, log_probs).loss
    (0 * loss).backward()
    assert loss.isfinite()


def test_bad_pairs_are_counted_and_too_many_stop_the_run(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    file = tmp_path / "pairs.jsonl"
    bad = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "b" * 200, "rejected": "c"}]
    with file.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in bad)
    some = [*words, "max_tokens=100", "eval.enabled=false", "env.held_out=0"]
    assert run(tmp_path / "r", [*some, "steps=1"]) == 0
    with says.refused("train", DataError, "2 of 42"):
        run(tmp_path / "refused", [*some, "max_bad_share=0.02"])
    monkeypatch.setattr(faults, "ALL_UP_TO", 5)
    monkeypatch.setattr(faults, "SAMPLE", 10)
    assert run(tmp_path / "many", [*some, "max_bad_share=0.5", "steps=5"]) == 0  # rows are encoded as they are drawn
    assert metrics(tmp_path / "many")[-1]["epoch"] == pytest.approx(40 / 41)
