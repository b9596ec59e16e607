"""Environments of verifiers 0.3.1, whose interface is called v0. Imports nothing of rlpost."""

from __future__ import annotations

import contextvars
import functools
import hashlib
import importlib
import inspect
import itertools
import json
import os
import sys
from typing import Any

from rlpost_plain import ONE_REPLY, plain_messages, refuse_if


class Environment:
    """The rows of a single-turn v0 environment and its rubric, as `Tasks`."""

    def __init__(self, name: str, arguments: dict[str, Any], most: int | None) -> None:
        vf = importlib.import_module("verifiers")
        self.env = env = vf.load_environment(name, **arguments)
        kind = type(env).__name__
        refuse_if(
            not isinstance(env, vf.SingleTurnEnv),
            f"{kind} is not a SingleTurnEnv: it has several turns, tools or environments. {ONE_REPLY}",
        )
        refuse_if(env.tool_defs, f"{kind} gives the model tools. {ONE_REPLY}")
        refuse_if(
            env.rubric.has_group_rewards, f"{kind} has a reward that compares several replies to a prompt. {ONE_REPLY}"
        )
        env.timeout_seconds = None  # rlpost has a deadline of its own; a rollout that is late here would earn 0
        self.rubrics = list(_rubrics(env.rubric))
        for rubric in self.rubrics:
            rubric.HARD_TIMEOUT_SECONDS = None  # MathRubric's, the same
        watched = [_watch(rubric) for rubric in self.rubrics]
        refuse_if(not any(watched), f"{kind} has no reward with a weight, so nothing scores a reply")
        self.tasks: dict[str, tuple[Any, str]] = {}  # row, and its split
        train, test = env.build_dataset(), env.build_eval_dataset()
        for split, rows in (("train", train), ("test", test)):
            for row in itertools.islice(rows or (), most):
                key = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()
                self.tasks.setdefault(key, (row, split))
        self.has_splits = len({split for _, split in self.tasks.values()}) == 2  # not if both list the same rows
        self.client = _reply_client()

    def rows(self) -> Any:
        """See `Tasks.rows`."""
        for key, (row, split) in self.tasks.items():
            messages = plain_messages(row["prompt"], row.get("example_id"))
            fields = {name: value for name, value in row.items() if name != "prompt"}
            yield {"key": key, "messages": messages, "fields": fields, "split": split if self.has_splits else None}

    async def score(self, item: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """See `Tasks.score`; raises too what a reward function raised, for which verifiers counts 0."""
        notes: list[tuple[str, float, Any]] = []
        NOTES.set(notes)
        row = {**self.tasks[item["key"]][0], "prompt": item["messages"]}
        state = await self.env.rollout(row, self.client(item), "rlpost", {})
        if state.get("error") is not None:
            raise state["error"]
        if state.get("timed_out") or not state["trajectory"]:
            raise TimeoutError("the rollout ended without the reply")
        await self.env.rubric.score_rollout(state)
        for rubric in self.rubrics:  # one with a broken pool of processes gives 0 to every reply from now on
            if broken := getattr(getattr(rubric, "executor", None), "_broken", False):
                print(f"{type(rubric).__name__} has lost its processes: {broken}", file=sys.stderr, flush=True)
                os._exit(1)
        await self.env.rubric.cleanup(state)
        parts: dict[str, tuple[float, float]] = {}
        for name, weight, noted in notes:
            if weight and isinstance(noted, Exception):
                raise noted
            if weight:
                parts[name if name not in parts else f"{name}_{len(parts)}"] = noted, weight
        total = float(state["reward"])
        ours = sum(score * weight for score, weight in parts.values())
        return parts if abs(total - ours) <= 1e-6 * max(1.0, abs(total)) else {"reward": (total, 1.0)}

    async def validate(self, key: str) -> bool | None:
        """None: v0 has no such check."""
        return None


NOTES: contextvars.ContextVar[list[tuple[str, float, Any]]] = contextvars.ContextVar("NOTES")


def _rubrics(rubric: Any) -> Any:
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from _rubrics(part)


def _watch(rubric: Any) -> bool:
    """Note what each function of `rubric` returns or raises; returns whether one has a weight."""
    pairs = list(zip(rubric.funcs, rubric.weights, strict=True))
    rubric.funcs = [_watched(function, float(weight)) for function, weight in pairs]
    return any(weight for _, weight in pairs)


def _watched(function: Any, weight: float) -> Any:
    name = getattr(function, "__name__", repr(function))

    @functools.wraps(function)
    async def call(*arguments: Any, **named: Any) -> float:
        noted: Any = None
        try:
            result = function(*arguments, **named)
            noted = float(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            noted = error
            raise
        finally:
            NOTES.get().append((name, weight, noted))
        return noted

    return call


def _reply_client() -> Any:
    """A class of verifiers' clients that answer with the reply of an item."""
    base: Any = importlib.import_module("verifiers.clients").Client
    types = importlib.import_module("verifiers.types")

    class Reply(base):
        def __init__(self, item: dict[str, Any]) -> None:
            super().__init__(None)
            self.item = item

        async def get_response(self, *arguments: Any, **named: Any) -> Any:
            item = self.item
            used = {"prompt_tokens": item["prompt_tokens"], "completion_tokens": item["tokens"], "reasoning_tokens": 0}
            usage = types.Usage(**used, total_tokens=item["prompt_tokens"] + item["tokens"])
            message = types.ResponseMessage(
                content=item["reply"],
                finish_reason="length" if item["truncated"] else "stop",
                is_truncated=item["truncated"],
            )
            return types.Response(id="rlpost", created=0, model="rlpost", usage=usage, message=message)

        async def close(self) -> None:
            pass

    Reply.__abstractmethods__ = frozenset()  # the others serve requests over the network
    return Reply
