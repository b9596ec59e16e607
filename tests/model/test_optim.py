"""AdamW, in full and in 8 bits, and its learning rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlpost.errors import MissingExtraError
from rlpost.imports import is_installed
from rlpost.model.optim import build_optimizer, learning_rate, set_learning_rate
from rlpost.settings import AdamW8bitSettings, OptimSettings, Schedule


def rates(schedule: Schedule, warmup_steps: int, total: int) -> list[float]:
    settings = OptimSettings(lr=8.0, schedule=schedule, warmup_steps=warmup_steps)
    return [learning_rate(update, total, settings) for update in range(total + 1)]


def test_a_constant_rate_stays_after_its_warm_up() -> None:
    assert rates(Schedule.constant, 0, 3) == [8, 8, 8, 8]
    assert rates(Schedule.constant, 4, 6) == [2, 4, 6, 8, 8, 8, 8]


def test_a_linear_rate_falls_to_zero() -> None:
    assert rates(Schedule.linear, 0, 4) == [8, 6, 4, 2, 0]
    assert rates(Schedule.linear, 2, 6) == [4, 8, 8, 6, 4, 2, 0]


def test_a_cosine_rate_falls_to_zero() -> None:
    half = math.sqrt(0.5)
    expected = [8, 4 * (1 + half), 4, 4 * (1 - half), 0]  # (1 + cos(k pi / 4)) / 2 of 8
    assert rates(Schedule.cosine, 0, 4) == pytest.approx(expected)
    assert rates(Schedule.cosine, 1, 5) == pytest.approx([8, *expected])


def test_a_warm_up_longer_than_the_training_never_gets_to_the_rate() -> None:
    assert rates(Schedule.linear, 8, 3) == [1, 2, 3, 4]


def test_beyond_the_last_update_the_rate_is_that_of_the_end() -> None:
    for schedule in (Schedule.linear, Schedule.cosine):
        assert learning_rate(9, 4, OptimSettings(lr=8.0, schedule=schedule)) == pytest.approx(0.0)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = build_optimizer(model, OptimSettings(lr=0.5, weight_decay=0.1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # without a gradient AdamW only decays: times 1 - lr * weight_decay
    for name, parameter in model.named_parameters():
        factor = 0.95 if name in ("0.weight", "1.weight") else 1.0
        assert torch.allclose(parameter, before[name] * factor), name


def test_the_first_step_has_the_size_of_the_rate() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0]]))
    optimizer = build_optimizer(model, OptimSettings(lr=0.25))
    model.weight.grad = torch.tensor([[3.0, -0.01]])
    optimizer.step()  # Adam's first step is lr * sign(gradient)
    assert model.weight.tolist()[0] == pytest.approx([0.75, -0.75], abs=1e-5)


def test_the_settings_reach_the_optimizer() -> None:
    settings = OptimSettings(lr=0.1, beta1=0.5, beta2=0.75, eps=1e-3, weight_decay=0.2)
    matrices, vectors = build_optimizer(nn.Linear(2, 2), settings).param_groups
    assert [group["weight_decay"] for group in (matrices, vectors)] == [0.2, 0.0]
    for group in (matrices, vectors):
        assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.5, 0.75), 1e-3)
        assert len(group["params"]) == 1


def test_frozen_and_tied_parameters_are_held_at_most_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model[2].weight = model[1].weight
    held = [p for group in build_optimizer(model, OptimSettings()).param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in (model[1].weight, model[1].bias, model[2].bias)]


def test_a_rate_is_set_for_every_parameter() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimSettings(lr=0.1))
    set_learning_rate(optimizer, 0.025)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]


def stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, seeds: range) -> None:
    for seed in seeds:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()


@pytest.mark.skipif(not is_installed("bitsandbytes"), reason="bitsandbytes is not installed")
def test_the_8_bit_form_keeps_a_byte_a_number_and_goes_where_adamw_goes() -> None:
    layers = [nn.Linear(96, 64, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    start = layers[0].weight.detach().clone()
    settings = AdamW8bitSettings(lr=1e-2, weight_decay=0.1)
    small, full = build_optimizer(layers[0], settings), build_optimizer(layers[1], OptimSettings(**vars(settings)))
    for layer, optimizer in zip(layers, (small, full), strict=True):
        stepped(optimizer, layer.weight, range(5))
    assert [small.state[layers[0].weight][key].dtype for key in ("state1", "state2")] == [torch.uint8] * 2
    moved, expected = layers[0].weight - start, layers[1].weight - start
    assert torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), 0) > 0.99


def test_the_8_bit_form_is_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"optim=adamw_8bit needs bitsandbytes.*rlpost\[bitsandbytes\]"):
        build_optimizer(nn.Linear(2, 2), AdamW8bitSettings())
