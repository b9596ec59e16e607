"""The gate between sampler and trainer: each fault is named, clean runs are silent."""

from __future__ import annotations

import math
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
from rlpost.remote.process import WorkerProcess
from rlpost.settings.training import GateAlarm, GateSettings
from rlpost.train.assemble import GRPOParts, assemble_grpo
from rlpost.train.gate import Differences, Disagreement, Gate, fault_of, fault_of_weights
from rlpost.train.ranks import Rank, Ranks
from rlpost.train.resolve import resolve
from rlpost.train.update import Microbatches
from rlpost.weight_sync.base import named_weights
from tests.asynchronous import wait_for
from tests.trainings import FOUR_SUMS, metrics, train_in

pytestmark = pytest.mark.thorough

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
    rank = Rank(parts.model, parts.optimizer, parts.objective, settings.optim, None, microbatches)
    ranks.begin(rank, None)
    return parts, ranks


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[GRPOParts, Ranks]]:
    """Parts that sample from the trainer's own tensors, in float32."""
    parts, ranks = assembled("policy=transformers", "model.autocast=none")
    yield parts, ranks
    parts.opened.close()


def gate_of(parts: GRPOParts, ranks: Ranks) -> Gate:
    return Gate(GateSettings(), parts.policy, ranks, lambda text: None)


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


class Changed:
    """A policy whose completions are changed after they were sampled."""

    def __init__(self, policy: Any, change: Callable[[Completion], Completion]) -> None:
        self._policy, self._change = policy, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def generate(self, requests: Any, sampling: Any) -> list[Completion]:
        return [self._change(completion) for completion in self._policy.generate(requests, sampling)]


def shifted(completion: Completion) -> Completion:
    return replace(completion, log_probs=[*completion.log_probs[-1:], *completion.log_probs[:-1]])


def older(completion: Completion) -> Completion:
    return replace(completion, policy_version=-1)


def of_other_kernels(completion: Completion) -> Completion:
    off = [0.1, -0.1] * 50
    return replace(completion, log_probs=[a + b for a, b in zip(completion.log_probs, off, strict=False)])


def test_shifted_log_probs_stop_the_run_at_a_probe(shared: tuple[GRPOParts, Ranks]) -> None:
    parts, ranks = shared
    gate = gate_of(parts, ranks)
    gate.begin()
    gate.policy = Changed(parts.policy, shifted)  # type: ignore[assignment]
    with pytest.raises(PolicyError, match="step 20"):
        gate.pushed(20)
    assert gate.alarms == [Disagreement.shifted]
    gate.pushed(19)  # no probe


@pytest.mark.parametrize(
    ("change", "exact", "fault"),
    [
        (shifted, False, Disagreement.shifted),
        (older, False, Disagreement.version),
        (of_other_kernels, False, None),  # as bfloat16 may round
        (of_other_kernels, True, Disagreement.format),  # where both compute in float32 it is a fault
    ],
)
def test_fault_at_the_start_is_an_alarm(
    change: Callable[[Completion], Completion],
    exact: bool,
    fault: Disagreement | None,
    shared: tuple[GRPOParts, Ranks],
) -> None:
    parts, ranks = shared
    told: list[str] = []
    changed: Any = Changed(parts.policy, change)
    settings = GateSettings(on_alarm=GateAlarm.warn)
    gate = Gate(settings, changed, ranks, told.append, exact=exact)
    gate.begin()
    assert gate.alarms == [] if fault is None else fault in gate.alarms
    assert len(told) == len(gate.alarms)


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


def test_on_alarm_correct_goes_on_with_a_correction(
    half_right: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "begin", lambda self: None)
    monkeypatch.setattr(Gate, "compare_weights", lambda self, names: Disagreement.half)
    used: list[str] = []
    original = PolicyObjective.__call__

    def noting(self: PolicyObjective, *arguments: Any) -> Any:
        used.append(self.sampler_correction)
        return original(self, *arguments)

    monkeypatch.setattr(PolicyObjective, "__call__", noting)
    words = [f"model.path={half_right}", "policy=transformers", *FOUR_SUMS, *SUMS[1:], "prompts_per_step=4"]
    assert train_in(TRAIN_GRPO, tmp_path, [*words, "steps=3", "gate.on_alarm=correct"]) == 0
    assert "tis_token" in used
    assert used[0] == "none"
    assert "loss.sampler_correction=tis_token" in (tmp_path / "log.txt").read_text()
    assert len(metrics(tmp_path)) == 3


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


def test_engine_has_all_weights_after_a_push(apart: tuple[GRPOParts, Ranks]) -> None:
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


INCOMPLETE = {
    "stale": (lambda name: False, Disagreement.stale),
    "half": (lambda name: "layers.0" in name, Disagreement.half),
    "head": (lambda name: name != "lm_head.weight", Disagreement.head),
}


def weights_with(parts: GRPOParts, kept: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Move the weights; those whose names are `kept` as they are now, the others as they were."""
    before = {name: weight.clone() for name, weight in named_weights(parts.model).items()}
    moved(parts)
    return {name: weight if kept(name) else before[name] for name, weight in named_weights(parts.model).items()}


@pytest.mark.parametrize("case", INCOMPLETE)
@pytest.mark.parametrize("steps_between", [1, 20])
def test_incomplete_push_is_named(case: str, steps_between: int, apart: tuple[GRPOParts, Ranks]) -> None:
    parts, ranks = apart
    parts.collector.update_policy_weights_(parts.model)
    gate = gate_of(parts, ranks)
    gate.begin()
    kept, fault = INCOMPLETE[case]
    parts.collector.update_policy_weights_(weights_with(parts, kept))
    with pytest.raises(PolicyError, match=f"step {steps_between}"):
        gate.pushed(steps_between)
    assert gate.alarms == [fault]


# With players in processes of their own


@pytest.fixture(scope="module")
def two_players() -> Iterator[tuple[GRPOParts, Ranks]]:
    words = ["policy=transformers", "model.autocast=none", "collector=async", "collector.players=2"]
    parts, ranks = assembled(*words)
    assert isinstance(parts.policy, RemotePolicy)
    players = parts.policy.players
    wait_for(lambda: len(players.ready) == 2)
    yield parts, ranks
    parts.opened.close()


def test_every_player_has_all_weights_after_a_push(two_players: tuple[GRPOParts, Ranks]) -> None:
    parts, ranks = two_players
    parts.collector.update_policy_weights_(parts.model)
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


@pytest.mark.parametrize("case", ["stale", "half"])
def test_incomplete_push_to_one_player_is_named(
    case: str,
    two_players: tuple[GRPOParts, Ranks],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts, ranks = two_players
    parts.collector.update_policy_weights_(parts.model)
    gate = gate_of(parts, ranks)
    gate.begin()
    kept, fault = INCOMPLETE[case]
    wrong = weights_with(parts, kept)
    original = WorkerProcess.call

    def faulty(self: WorkerProcess, method: str, *arguments: Any, **named: Any) -> Any:
        if method == "push" and self is parts.policy.players.seats[1].worker:  # type: ignore[attr-defined]
            save_one_by_one(wrong.items(), tmp_path)
            arguments = (tmp_path, *arguments[1:])
        return original(self, method, *arguments, **named)

    monkeypatch.setattr(WorkerProcess, "call", faulty)
    parts.collector.update_policy_weights_(parts.model)
    with pytest.raises(PolicyError, match="step 1"):
        gate.pushed(1)
    assert gate.alarms == [fault]
    assert "2 of 2" in caplog.text
