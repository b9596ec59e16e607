"""States of the process-wide generators: a game's own, and those of the rest of the program."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from rlpost.envs.draws import GENERATORS, Draws, Turn, Watch


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def draw() -> tuple[int, int]:
    return random.randrange(10**9), int(np.random.randint(10**9))


def seeded(seed: int, count: int) -> list[tuple[int, int]]:
    """The first draws after both generators were seeded."""
    random.seed(seed)
    np.random.seed(seed)
    return [draw() for _ in range(count)]


def begun(generators: Sequence[str] = GENERATORS) -> Turn:
    turn = Turn(generators)
    turn.begin()
    return turn


def test_two_games_that_take_turns_each_draw_as_if_alone() -> None:
    expected = [seeded(seed, 3) for seed in (5, 6)]
    games = Draws(5), Draws(6)
    drawn: list[list[tuple[int, int]]] = [[], []]
    for _ in range(3):
        for game, numbers in zip(games, drawn, strict=True):
            game.restore(GENERATORS)
            numbers.append(draw())
            game.keep(GENERATORS)
    assert drawn == expected


def test_a_turn_leaves_the_rest_of_the_program_its_draws() -> None:
    expected = seeded(1, 2)
    assert seeded(1, 1) == expected[:1]
    turn = begun()
    assert turn.enter(Draws(7))
    assert draw() == seeded(7, 1)[0]
    turn.end()
    assert draw() == expected[1]


def test_a_turn_sets_only_the_generators_it_names() -> None:
    turn = begun(("random",))
    assert turn.enter(Draws(7))
    np.random.seed(3)
    turn.end()
    assert draw()[1] == seeded(3, 1)[0][1]


def test_turns_wait_for_each_other() -> None:
    first, second = begun(), Turn(GENERATORS)
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(second.begin)
        assert not wait([beginning], 0.02).done  # a turn that did not wait would have begun by then
        first.end()
        beginning.result(60)
    second.end()


def test_a_turn_that_another_thread_has_ended_sets_nothing() -> None:
    turn = begun()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(turn.end).result(60)
    expected = seeded(2, 1)
    seeded(2, 0)
    assert not turn.enter(Draws(9))
    turn.end()
    assert [draw()] == expected
    begun().end()  # the lock was released once, not twice


def test_watched_draws_are_noticed_and_taken_back() -> None:
    expected = seeded(4, 1)
    seeded(4, 0)
    assert not Watch().end()
    for again in (lambda: random.random(), lambda: np.random.random()):
        watch = Watch()
        again()
        assert watch.end()
    assert [draw()] == expected


def test_a_watch_does_not_take_back_draws_of_a_turn() -> None:
    watch, turn = Watch(), begun()
    random.random()
    assert not watch.end()
    during = Watch()
    turn.end()
    after = random.getstate()
    random.random()
    assert not during.end()
    assert random.getstate() != after
    assert not watch.end()  # a turn has been there meanwhile
