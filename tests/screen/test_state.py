"""What the screen knows: time, phases, figures; worked out by hand."""

from __future__ import annotations

import pytest

from rlpost.screen.state import Shown, State

EVALUATION = {"eval/accuracy_lenient": 0.25}
SAMPLE = Shown(1, "p", "c", 1.0, {}, "stop")


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> State:
    return State(now=clock)


def test_the_time_left_is_that_of_the_last_eight_steps(state: State) -> None:
    state.begin(0, 40)
    assert state.left() is None
    left = []
    for step in range(1, 21):
        state.end_step(step, {"time/step": 90.0 if step <= 10 else 10.0}, None)
        left.append(state.left())
    assert left[0] == 39 * 90
    assert left[10] == 29 * 80  # (7 * 90 + 10) / 8
    assert left[19] == 20 * 10
    assert state.step_seconds() == 10


def test_the_time_left_falls_only_during_steps(state: State, clock: Clock) -> None:
    state.begin(0, 3)
    state.end_step(1, {"time/step": 10.0}, None)
    clock.time += 1000  # an evaluation
    assert state.left() == 20
    state.begin_step()
    clock.time += 4
    assert state.left() == 16
    clock.time += 60  # a slow step is not counted below its end
    assert state.left() == 10


def test_each_kind_of_phase_has_its_seconds(state: State, clock: Clock) -> None:
    clock.time += 5  # before anything is told
    for kind, seconds in [("sampling", 2.0), ("training", 3.0), ("sampling", 4.0)]:
        state.begin_phase(kind)
        clock.time += seconds
    assert state.seconds == {"sampling": 2.0, "training": 3.0}  # the last one is under way
    state.begin_phase("saving checkpoint")
    assert state.seconds == {"sampling": 6.0, "training": 3.0}


def test_progress_within_a_phase_does_not_begin_it_anew(state: State, clock: Clock) -> None:
    state.begin_phase("training", done=0, total=64)
    began = clock.time
    clock.time += 7
    state.begin_phase("training", done=32, total=64)
    assert state.phase is not None
    assert (state.phase.since, state.phase.done, state.phase.total) == (began, 32, 64)


def test_a_resumed_run_shows_every_step_from_the_first(state: State) -> None:
    state.end_step(0, EVALUATION, None)
    recorded = [(0, EVALUATION), (1, {"reward/mean": 0.5}), (2, {"reward/mean": None})]
    state.begin(2, 9, recorded)
    state.end_step(3, {"reward/mean": 1.0}, SAMPLE)
    one, two, three = state.series["reward/mean"]
    assert (one, three) == (0.5, 1.0)
    assert two != two  # no number
    assert [step for step, _ in state.evaluations] == [0]
    assert (state.done, state.total) == (3, 9)


def test_the_first_and_the_latest_evaluation_are_kept(state: State) -> None:
    for step in (0, 5, 10):
        state.end_step(step, EVALUATION, None)
    assert [step for step, _ in state.evaluations] == [0, 10]


def test_a_sample_stays_until_there_is_another(state: State) -> None:
    state.end_step(1, {}, SAMPLE)
    state.end_step(2, {}, None)
    assert state.sample == SAMPLE
