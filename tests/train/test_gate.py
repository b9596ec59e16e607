"""The gate between sampler and trainer: each fault is named, clean runs are silent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.data.conversation import Completion
from rlpost.errors import PolicyError
from rlpost.imports import is_installed
from rlpost.model.packing import Row
from rlpost.model.precision import this_device
from rlpost.model.weight_sums import WeightSum
from rlpost.model.weights import save_one_by_one
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.policies.remote import RemotePolicy
from rlpost.policies.vllm import vLLMWrapper
from rlpost.remote.process import WorkerProcess
from rlpost.settings.training import GateAlarm, GateSettings
from rlpost.train.assemble import GRPOParts, assemble_grpo
from rlpost.train.gate import Differences, Disagreement, Gate, fault_of, fault_of_weights
from rlpost.train.ranks import Rank, Ranks
from rlpost.train.resolve import resolve
from rlpost.train.update import Microbatches
from rlpost.weight_sync.base import named_weights
from tests.trainings import metrics, train_in

SUMS = ["env.digits=1", "env.max_completion_tokens=8", "prompts_per_step=2", "group_size=2", "eval.enabled=false"]


def assembled(*words: str) -> tuple[GRPOParts, Ranks]:
    settings = compose(TRAIN_GRPO, ["model=tiny", *SUMS, *words]).settings
    settings, _ = resolve(settings, this_device(settings.model.device), None)
    parts = assemble_grpo(settings)
    with torch.no_grad():  # a random model is nearly as sure of each token: no temperature would show
        for name, weight in parts.model.named_parameters():
            weight.mul_(1.0 if "norm" in name else 6.0)
    parts.policy.start()
    ranks = Ranks()
    microbatches = Microbatches(None, parts.model.device, settings.model.autocast)
    ranks.begin(Rank(parts.model, parts.optimizer, None, parts.objective, settings.optim, microbatches), None)
    return parts, ranks


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[GRPOParts, Ranks]]:
    """Parts that sample from the trainer's own tensors, in float32."""
    parts, ranks = assembled("policy=transformers", "model.autocast=none")
    yield parts, ranks
    parts.opened.close()


def gate_of(parts: GRPOParts, ranks: Ranks, told: list[str] | None = None, **settings: Any) -> Gate:
    note = [] if told is None else told
    return Gate(GateSettings(**settings), parts.policy, ranks, parts.model, lambda action, text: note.append(text))


# What the sampler may do to the log-probs of what it drew


def hotter(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (logits / 0.7).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


def filtered(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    least = logits.topk(3).values[:, -1:].minimum(logits.gather(-1, ids[:, None]))
    kept = logits.masked_fill(logits < least, -math.inf)
    return kept.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


def plain(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


def noisy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(len(ids), generator=torch.Generator().manual_seed(int(ids.sum())))
    return plain(logits, ids) + 0.2 * noise


def beside(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return plain(logits, ids).roll(1)


def as_sampled(model: Any, row: Row, how: Callable[..., torch.Tensor], first: list[int]) -> Row:
    prompt = torch.cat([torch.tensor(first, dtype=torch.int64), row.prompt])
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, row.response])[None]).logits[0, len(prompt) - 1 : -1]
    return replace(row, sampler_log_probs=how(logits, row.response))


FAULTS = {
    "temperature": (hotter, [], Disagreement.temperature),
    "top-p": (filtered, [], Disagreement.filtered),
    "a token too many in front": (plain, [1], Disagreement.begun_twice),
    "a mask one token off": (beside, [], Disagreement.shifted),
    "a coarser format": (noisy, [], Disagreement.format),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_by_its_differences(name: str, shared: tuple[GRPOParts, Ranks]) -> None:
    parts, ranks = shared
    how, first, expected = FAULTS[name]
    rows, clean = gate_of(parts, ranks).probe()
    assert clean.gap < 1e-3
    changed = [as_sampled(parts.model, row, how, first) for row in rows]

    def read(rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        return ranks.read_log_probs(rows, temperature=temperature)

    found = Differences.of(changed, read(changed, 1.0))
    assert found.gap > 0.01
    assert fault_of(changed, found, read, 1.0, bos=1) is expected


def test_a_sampler_with_shifted_log_probs_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: tuple[GRPOParts, Ranks]
) -> None:
    parts, ranks = shared
    gate = gate_of(parts, ranks)
    gate.begin()
    generate = parts.policy.generate

    def shifted(requests: Any, sampling: Any) -> list[Completion]:
        return [replace(c, log_probs=[*c.log_probs[-1:], *c.log_probs[:-1]]) for c in generate(requests, sampling)]

    monkeypatch.setattr(parts.policy, "generate", shifted)
    with pytest.raises(
        PolicyError, match="disagree after the push of step 20: the log-probs are those of the tokens b"
    ):
        gate.pushed(20)
    gate.pushed(19)  # no probe
    with pytest.raises(PolicyError, match=r"disagree at the start: .*is shifted"):
        gate_of(parts, ranks).begin()
    told: list[str] = []
    gate_of(parts, ranks, told, on_alarm=GateAlarm.warn).begin()
    assert len(told) == 1


def test_small_gap_at_the_start_is_a_fault_where_both_compute_in_float32(
    monkeypatch: pytest.MonkeyPatch, shared: tuple[GRPOParts, Ranks]
) -> None:
    parts, ranks = shared
    generate = parts.policy.generate

    def other_kernels(requests: Any, sampling: Any) -> list[Completion]:
        off = [0.1, -0.1] * 50
        return [
            replace(c, log_probs=[a + b for a, b in zip(c.log_probs, off, strict=False)])
            for c in generate(requests, sampling)
        ]

    monkeypatch.setattr(parts.policy, "generate", other_kernels)
    gate_of(parts, ranks).begin()  # as bfloat16 may round
    exact = Gate(GateSettings(), parts.policy, ranks, parts.model, lambda *_: None, exact=True)
    with pytest.raises(PolicyError, match="sampler and trainer disagree at the start"):
        exact.begin()


def test_a_completion_of_another_version_is_reported(
    monkeypatch: pytest.MonkeyPatch, shared: tuple[GRPOParts, Ranks]
) -> None:
    parts, ranks = shared
    generate = parts.policy.generate

    def older(requests: Any, sampling: Any) -> list[Completion]:
        return [replace(completion, policy_version=-1) for completion in generate(requests, sampling)]

    monkeypatch.setattr(parts.policy, "generate", older)
    with pytest.raises(PolicyError, match="the sampler's version is not that of the last push"):
        gate_of(parts, ranks).begin()


def test_differing_weights_name_the_fault() -> None:
    assert fault_of_weights([], 9, None) is None
    assert fault_of_weights(["lm_head.weight"], 9, True) is Disagreement.head
    assert fault_of_weights(["a", "b"], 9, True) is Disagreement.half
    assert fault_of_weights(["a", "b"], 9, False) is Disagreement.stale
    assert fault_of_weights([str(i) for i in range(9)], 9, None) is Disagreement.stale


def test_weight_sums_show_an_update_and_ignore_order_and_padding() -> None:
    weight = torch.randn(700, 300, generator=torch.Generator().manual_seed(0))
    of = WeightSum.of(weight, torch.bfloat16)
    padded = torch.cat([weight, torch.zeros(64, 300)])[torch.randperm(764)]
    assert of.is_of(WeightSum.of(padded, torch.bfloat16))
    changed = weight.clone()
    changed[3, 4] += 0.01
    assert not of.is_of(WeightSum.of(changed, torch.bfloat16))
    assert not of.is_of(WeightSum.of(weight))


def test_on_alarm_correct_goes_on_with_a_correction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "begin", lambda self: None)
    monkeypatch.setattr(Gate, "compare_weights", lambda self, names: Disagreement.half)
    used: list[str] = []
    original = PolicyObjective.__call__

    def noting(self: PolicyObjective, *arguments: Any) -> Any:
        used.append(self.sampler_correction)
        return original(self, *arguments)

    monkeypatch.setattr(PolicyObjective, "__call__", noting)
    (tmp_path / "mine.py").write_text(
        "def score(completions, **kept):\n    return [len(c) % 3.0 for c in completions]\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"question": "1?"}\n{"question": "2?"}\n{"question": "3?"}\n')
    env = ["env=dataset", f"env.path={tmp_path}/rows.jsonl", f"env.reward={tmp_path}/mine.py:score", "env.held_out=0"]
    words = ["model=tiny", "policy=transformers", *env, *SUMS[1:], "steps=3", "gate.on_alarm=correct"]
    assert train_in(TRAIN_GRPO, tmp_path / "run", words) == 0
    assert "tis_token" in used
    assert used[0] == "none"
    assert "only a part of a push has arrived in the engine" in (tmp_path / "run/log.txt").read_text()
    assert len(metrics(tmp_path / "run")) == 3


# With an engine that has weights of its own


@pytest.fixture(scope="module")
def apart() -> Iterator[tuple[GRPOParts, Ranks]]:
    if not is_installed("vllm"):
        pytest.skip("vLLM is not installed")
    parts, ranks = assembled("policy=vllm", "policy.dtype=float32", "model.autocast=none")
    parts.collector.update_policy_weights_(parts.model)
    yield parts, ranks
    parts.opened.close()


def moved(parts: GRPOParts) -> None:
    with torch.no_grad():
        for weight in parts.model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))


def test_an_engine_has_all_weights_after_a_push_and_others_before(apart: tuple[GRPOParts, Ranks]) -> None:
    parts, ranks = apart
    parts.collector.update_policy_weights_(parts.model)
    gate = gate_of(parts, ranks)
    gate.begin()
    off, compared = parts.policy.weight_sums()[0].differing(named_weights(parts.model))
    assert (off, compared) == ([], 15)
    for step in range(3):
        moved(parts)
        parts.collector.update_policy_weights_(parts.model)
        gate.pushed(step)
    gate.look(3)


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (lambda name: False, "none of a push has arrived"),
        (lambda name: "layers.0" in name or "embed" in name, "only a part of a push has arrived"),
        (lambda name: name != "lm_head.weight", "a tied head has stayed as it was"),
    ],
    ids=["stale", "half", "head"],
)
@pytest.mark.parametrize("steps_between", [1, 20])
def test_an_incomplete_push_is_named(
    kept: Callable[[str], bool],
    named: str,
    steps_between: int,
    apart: tuple[GRPOParts, Ranks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts, ranks = apart
    parts.collector.update_policy_weights_(parts.model)
    gate = gate_of(parts, ranks)
    gate.begin()
    before = {name: weight.clone() for name, weight in named_weights(parts.model).items()}
    original = vLLMWrapper.load_weights

    def faulty(self: vLLMWrapper, weights: Any) -> None:
        original(self, {name: weight if kept(name) else before[name] for name, weight in weights.items()})

    monkeypatch.setattr(vLLMWrapper, "load_weights", faulty)
    moved(parts)
    parts.collector.update_policy_weights_(parts.model)
    with pytest.raises(PolicyError, match=f"disagree after the push of step {steps_between}: .*{named}"):
        gate.pushed(steps_between)


# With players in processes of their own


@pytest.fixture(scope="module")
def two_players() -> Iterator[tuple[GRPOParts, Ranks]]:
    words = ["policy=transformers", "model.autocast=none", "collector=async", "collector.players=2"]
    parts, ranks = assembled(*words)
    assert isinstance(parts.policy, RemotePolicy)
    while len(parts.policy.players.ready) < 2:
        time.sleep(0.05)
    parts.collector.update_policy_weights_(parts.model)
    yield parts, ranks
    parts.opened.close()


def test_every_player_has_all_weights_after_a_push(two_players: tuple[GRPOParts, Ranks]) -> None:
    parts, ranks = two_players
    gate = gate_of(parts, ranks)
    gate.begin()
    told = parts.policy.weight_sums()
    assert told.keys() == {0, 1}
    for sums in told.values():
        assert sums.differing(named_weights(parts.model)) == ([], len(list(parts.model.parameters())))
    moved(parts)
    parts.collector.update_policy_weights_(parts.model)
    gate.pushed(1)
    assert gate.look(2) < 0.02


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (lambda name: False, "none of a push has arrived"),
        (lambda name: "layers.0" in name, "only a part of a push has arrived"),
    ],
    ids=["stale", "half"],
)
def test_an_incomplete_push_to_one_player_is_named(
    kept: Callable[[str], bool],
    named: str,
    two_players: tuple[GRPOParts, Ranks],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts, ranks = two_players
    parts.collector.update_policy_weights_(parts.model)
    gate = gate_of(parts, ranks)
    gate.begin()
    before = {name: weight.clone() for name, weight in named_weights(parts.model).items()}
    original = WorkerProcess.call

    def faulty(self: WorkerProcess, method: str, *arguments: Any, **named: Any) -> Any:
        if method == "push" and self is parts.policy.players.seats[1].worker:  # type: ignore[attr-defined]
            wrong = {n: w if kept(n) else before[n] for n, w in named_weights(parts.model).items()}
            save_one_by_one(wrong.items(), tmp_path)
            arguments = (tmp_path, *arguments[1:])
        return original(self, method, *arguments, **named)

    monkeypatch.setattr(WorkerProcess, "call", faulty)
    moved(parts)
    parts.collector.update_policy_weights_(parts.model)
    with pytest.raises(PolicyError, match=f"disagree after the push of step 1: .*{named}"):
        gate.pushed(1)
    assert "engine 2 of 2" in caplog.text
