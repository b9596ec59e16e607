"""What the screen knows: time, phases, figures; worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from tensordict import TensorDict

from rlpost.screen.state import Shown, State

EVALUATION = {"eval/accuracy_lenient": 0.25}
SAMPLE = Shown(1, "p", "c", 1.0, {}, "stop")


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(time=100.0)


@pytest.fixture
def state(clock: SimpleNamespace) -> State:
    return State(now=lambda: clock.time)


def test_the_time_left_falls_only_during_steps(state: State, clock: SimpleNamespace) -> None:
    state.begin(0, 3)
    state.end_step(1, {"time/step": 10.0})
    clock.time += 1000  # an evaluation
    assert state.left() == 20
    state.begin_step()
    clock.time += 4
    assert state.left() == 16
    clock.time += 60  # a slow step is not counted below its end
    assert state.left() == 10


def test_the_first_and_the_latest_evaluation_are_kept(state: State) -> None:
    for step in (0, 5, 10):
        state.end_step(step, EVALUATION)
    assert [step for step, _ in state.evaluations] == [0, 10]


def test_a_sample_stays_until_there_is_another(state: State) -> None:
    state.end_step(1, {}, [SAMPLE])
    state.end_step(2, {})
    assert state.samples == [SAMPLE]


def test_the_split_of_the_time_is_all_of_it(state: State, clock: SimpleNamespace) -> None:
    for kind, seconds in [("evaluating", 3.0), ("sampling", 5.0), ("evaluating", 7.0), ("training", 11.0)]:
        state.begin_phase(kind)
        clock.time += seconds
    assert state.spent(clock.time) == {"loading": 0.0, "evaluating": 10.0, "sampling": 5.0, "training": 11.0}


def test_of_a_step_its_first_best_and_worst_completions_are_shown_first(batch: Callable[..., TensorDict]) -> None:
    made = batch(2, 8)
    made["next", "reward"].fill_(0.5)
    assert [shown.rank for shown in Shown.some_of(1, made)] == [""] * 8
    made["next", "reward"][9], made["next", "reward"][5] = 1.0, 0.0
    made["valid"][3], made["next", "reward"][3] = False, 9.0
    assert [(shown.rank, shown.reward) for shown in Shown.some_of(1, made)][:4] == [
        ("", 0.5),
        ("best", 1.0),
        ("worst", 0.0),
        ("", 0.5),
    ]
    made["next", "reward"][0] = 1.0  # the first is as good as any
    assert [shown.rank for shown in Shown.some_of(1, made)][:2] == ["", "worst"]
