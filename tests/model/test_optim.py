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

HALF = math.sqrt(0.5)
COSINE = [8, 4 * (1 + HALF), 4, 4 * (1 - HALF), 0]  # (1 + cos(k pi / 4)) / 2 of 8


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "expected"),
    [
        (Schedule.constant, 0, [8, 8, 8, 8]),
        (Schedule.constant, 4, [2, 4, 6, 8, 8, 8, 8]),
        (Schedule.linear, 0, [8, 6, 4, 2, 0]),
        (Schedule.linear, 2, [4, 8, 8, 6, 4, 2, 0]),
        (Schedule.linear, 8, [1, 2, 3, 4]),  # a warm-up longer than the training
        (Schedule.cosine, 0, COSINE),
        (Schedule.cosine, 1, [8, *COSINE]),
    ],
)
def test_the_rate_rises_over_the_warm_up_and_follows_the_schedule(
    schedule: Schedule, warmup_steps: int, expected: list[float]
) -> None:
    settings, total = OptimSettings(lr=8.0, schedule=schedule, warmup_steps=warmup_steps), len(expected) - 1
    assert [learning_rate(update, total, settings) for update in range(total + 1)] == pytest.approx(expected)


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


def test_a_rate_is_set_for_every_parameter() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimSettings(lr=0.1))
    set_learning_rate(optimizer, 0.025)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]


@pytest.mark.skipif(not is_installed("bitsandbytes"), reason="bitsandbytes is not installed")
def test_8_bit_adamw_keeps_a_byte_a_number_and_goes_alike() -> None:
    layers = [nn.Linear(96, 64, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    start = layers[0].weight.detach().clone()
    settings = AdamW8bitSettings(lr=1e-2, weight_decay=0.1)
    small, full = build_optimizer(layers[0], settings), build_optimizer(layers[1], OptimSettings(**vars(settings)))
    for layer, optimizer in zip(layers, (small, full), strict=True):
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            layer.weight.grad = torch.randn(layer.weight.shape, generator=generator)
            optimizer.step()
    assert [small.state[layers[0].weight][key].dtype for key in ("state1", "state2")] == [torch.uint8] * 2
    moved, expected = layers[0].weight - start, layers[1].weight - start
    assert torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), 0) > 0.99


def test_the_8_bit_form_is_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"optim=adamw_8bit .*rlpost\[bitsandbytes\]"):
        build_optimizer(nn.Linear(2, 2), AdamW8bitSettings())
