"""Calls of games in threads: one left behind ends and disturbs no other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlpost.envs.draws import Draws
from rlpost.envs.game_calls import Called, make_calls


class Playing(Called):
    """A game with one pending call."""

    def __init__(self, act: Callable[[], Any], seconds: float = 60.0) -> None:
        super().__init__("Game", Draws(1))
        self.calls = [("step", seconds, act)]


def test_a_call_left_behind_ends_with_its_thread() -> None:
    threads: list[threading.Thread] = []

    def spin() -> None:
        threads.append(threading.current_thread())
        while True:
            pass

    late = Playing(spin, 0.05)
    make_calls([late])
    assert late.error is not None
    assert "within 0.05 s" in late.error
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_a_call_left_behind_draws_nothing_when_it_wakes() -> None:
    woken, drawn = threading.Event(), list[float]()

    def sleep() -> None:
        try:
            time.sleep(0.2)
            drawn.append(random.random())
        finally:
            woken.set()

    late = Playing(sleep, 0.05)
    make_calls([late], ("random",))
    assert late.error is not None
    assert woken.wait(30)
    assert drawn == []


def test_many_calls_left_behind_hit_no_call_behind_them() -> None:
    def swallow() -> None:
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            with suppress(SystemExit):
                time.sleep(0.001)

    for _ in range(20):
        late, made = Playing(swallow, 0.005), Playing(lambda: time.sleep(0.002))
        make_calls([late, made])
        assert late.error is not None
        assert made.error is None
    done = [Playing(lambda: time.sleep(0.001)) for _ in range(50)]
    for each in done:
        make_calls([each])
    assert all(each.error is None and not each.calls for each in done)
