"""Requests under way in an engine that is a stand-in: each ends once, whatever becomes of the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from rlpost.data.conversation import Completion
from rlpost.errors import PolicyError
from rlpost.policies import vllm
from rlpost.policies.vllm import RequestsInFlight

LIMIT = 20.0


class StandIn:
    """An engine that is dead, or whose requests get on, as it is told."""

    def __init__(self) -> None:
        self.dead = False
        self.tokens: Iterator[int] | None = iter(range(10**9))  # None: nothing comes

    def died(self) -> bool:
        return self.dead

    def progress(self) -> tuple[Any, ...]:
        return () if self.tokens is None else (next(self.tokens),)


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> tuple[RequestsInFlight, StandIn, list[Future[Any]], list[Any]]:
    """The requests, their engine, what was asked of it, and the futures."""
    monkeypatch.setattr(vllm, "LOOK_EVERY", 0.01)

    def failed(error: BaseException) -> None:
        requests.end(PolicyError(f"all at once: {error}"))

    requests, engine = RequestsInFlight(0.1, failed), StandIn()
    asked: list[Future[Any]] = [Future() for _ in range(3)]
    futures = [requests.add(engine, one, completion) for one in asked]  # type: ignore[arg-type]
    return requests, engine, asked, futures


def completion(output: str) -> Completion:
    return Completion([1], [0.0], output, "stop", 0)


Parts = tuple[RequestsInFlight, StandIn, list[Future[Any]], list[Any]]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("forgotten", "^all at once: .* died$"),
        ("hangs", r"^all at once: .* 3 requests .*policy\.timeout_seconds"),
        ("closed", "^closed$"),
    ],
)
def test_an_engine_that_fails_ends_all_of_them_by_one_error(under_way: Parts, how: str, said: str) -> None:
    requests, engine, asked, futures = under_way
    if how == "forgotten":
        engine.dead = True
    elif how == "hangs":
        engine.tokens = None
    else:
        requests.end(PolicyError("closed"))
    for future in futures:
        with pytest.raises(PolicyError, match=said):
            future.result(LIMIT)
    assert asked[0].cancelled()
    assert len(requests) == 0


def test_a_request_after_all_have_ended_is_looked_after(under_way: Parts) -> None:
    requests, engine, asked, _ = under_way
    for one in asked:
        one.set_result("said")
    for thread in threading.enumerate():
        if thread.name == "rlpost-vllm-requests":
            thread.join(LIMIT)
    late = requests.add(engine, Future(), completion)  # type: ignore[arg-type]
    engine.dead = True
    with pytest.raises(PolicyError, match="died"):
        late.result(LIMIT)
