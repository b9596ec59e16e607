"""What `rlpost reward test` does to a reward function inside its process: threads, a fork, a watch on its inputs."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import Any

from rlpost.rewards.calls import RewardFunction, about, answer, find

THREADS = 4


def serve(
    reference: str, path: str, name: str, registered: bool
) -> tuple[Callable[[Mapping[str, Any]], Any], dict[str, Any]]:
    """As `rlpost.rewards.calls.serve`, and it takes requests with a `probe` too: threads, fork or watch."""
    reward = find(reference, path, name, registered=registered)
    return partial(_answer_or_probe, reward), about(reward)


def _answer_or_probe(reward: RewardFunction, request: Mapping[str, Any]) -> Any:
    probes = {"threads": _in_threads, "fork": _in_a_fork, "watch": _watched}
    probe = probes.get(request.get("probe", ""))
    return answer(reward, request) if probe is None else probe(reward, request)


def _in_threads(reward: RewardFunction, request: Mapping[str, Any]) -> list[Any]:
    """What the calls told in each of several threads that make them at the same time."""
    with ThreadPoolExecutor(THREADS) as pool:
        copies = [deepcopy(request) for _ in range(THREADS)]
        return list(pool.map(partial(answer, reward), copies))


def _in_a_fork(reward: RewardFunction, request: Mapping[str, Any]) -> Any:
    """What the calls told in a fork of this process; None if it ended without a word."""
    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(outside, json.dumps(answer(reward, request)).encode())
        finally:
            os._exit(0)
    os.close(outside)
    with os.fdopen(inside, "rb") as said:
        text = said.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def _watched(reward: RewardFunction, request: Mapping[str, Any]) -> dict[str, Any]:
    """Which of its arguments the first call changed, and the kinds of the values it returned."""
    given, _ = request["calls"][0]
    before = deepcopy(given)
    result = reward.invoke({**given, "log_metric": lambda name, value: None})
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    kinds = sorted({type(value).__name__ for value in result}) if isinstance(result, list | tuple) else []
    return {"changed": [name for name, value in given.items() if value != before[name]], "kinds": kinds}
