"""Loads a verifiers taskset and scores replies to its tasks: `PYTHON verifiers_child`, see `envs/verifiers.py`.

It runs in the interpreter that has verifiers, so it imports nothing of rlpost. Requests come on stdin and answers go to
stdout, a line of JSON each; whatever the package prints goes to stderr.

    {"do": "load", "id", "args", "tasks"}           -> {"row": {...}} for each task, {"end"}
    {"do": "score", "seconds", "items": [{...}]}    -> {"item": number, "result" or "error"} for each, {"end"}
    {"do": "validate", "seconds", "items": [key]}   -> the same

A request that cannot be carried out gets {"refused": why}. Scoring runs in the main thread: checks that set an alarm,
such as math-verify's, fail elsewhere, and verifiers counts that as a wrong answer. All replies of a request are scored
in one event loop, so that judges and subprocesses overlap. The next scoring begins once the one before is done or
waits, so that rewards that wait for nothing do not use up each other's time.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlpost_plain import RefusedError, refuse_if
from rlpost_v0 import Environment
from rlpost_v1 import Tasks

AT_ONCE = 128  # replies scored at the same time
ROUNDS = 30  # of the event loop, after which a scoring that is not done waits for a judge, a process or a thread
LAST_V0 = "0.3.1"
OF_V0 = re.compile(r"module 'verifiers' has no attribute|from 'verifiers'|No module named 'verifiers\.")


def opened(name: str, arguments: dict[str, Any], most: int | None) -> Tasks | Environment:
    """The taskset or environment `name`; which of the two its module says. Raises RefusedError."""
    installed, has_v0 = version("verifiers"), importlib.util.find_spec("verifiers.legacy") is not None
    refuse_if(
        importlib.util.find_spec("verifiers.v1") is None,
        f"verifiers {installed} is too old: install verifiers==0.4.0, or =={LAST_V0} for packages written for v0",
    )
    module_name = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    module, of_v0 = None, ""
    if importlib.util.find_spec("verifiers.v1.tasksets." + module_name) is None:  # else verifiers brings it
        try:
            module = importlib.import_module(module_name)
        except (AttributeError, ImportError) as error:
            missing = getattr(error, "name", None) == module_name
            refuse_if(missing, f"{sys.executable} has no module {module_name}: install the package there")
            if has_v0 or not OF_V0.search(str(error)):
                raise
            of_v0 = str(error)
    if hasattr(module, "load_environment"):
        if has_v0:
            return Environment(name, arguments, most)
        of_v0 = "it has load_environment"
    refuse_if(
        bool(of_v0),
        f"it was written for verifiers' v0 ({of_v0}), and verifiers {installed} is installed: give env.python an "
        f"interpreter with verifiers=={LAST_V0}, the last one with v0",
    )
    return Tasks(name, arguments, most)


def _named(error: BaseException) -> str:
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    kinds = [" ".join(f"{type(each).__name__}: {each}".split()) for each in causes]
    return "; ".join(kind for place, kind in enumerate(kinds) if not any(kind in other for other in kinds[:place]))


class Child:
    """Carries out the requests of rlpost, one after the other."""

    def __init__(self) -> None:
        self.requests = os.fdopen(os.dup(0), encoding="utf-8")
        self.answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        self.opened: Tasks | Environment | None = None

    def answer(self, **content: Any) -> None:
        self.answers.write(json.dumps(content, default=str) + "\n")
        self.answers.flush()

    def serve(self) -> None:
        with asyncio.Runner() as runner:  # one loop for all requests: a judge's connections belong to it
            for line in self.requests:
                request = json.loads(line)
                try:
                    if request["do"] == "load":
                        self.load(request)
                    else:
                        runner.run(self.each(request))
                except RefusedError as error:
                    self.answer(refused=str(error))
                except PackageNotFoundError:
                    self.answer(refused=f"{sys.executable} has no verifiers: pip install verifiers there", missing=True)
                except ModuleNotFoundError as error:
                    self.answer(refused=f"{sys.executable} has no module {error.name}: install there what it needs")
                except Exception as error:  # noqa: BLE001  whatever a package raises is reported
                    traceback.print_exc()
                    self.answer(refused=_named(error))
                else:
                    self.answer(end=True)

    def load(self, request: dict[str, Any]) -> None:
        self.opened = opened(request["id"], request["args"], request["tasks"])
        for row in self.opened.rows():
            self.answer(row=row)

    async def each(self, request: dict[str, Any]) -> None:
        """Score the items of a request, or validate its keys. One that waits for a judge lets the next one begin."""
        turns, seconds = asyncio.Semaphore(AT_ONCE), request["seconds"]
        assert self.opened is not None
        carry_out = getattr(self.opened, request["do"])

        async def one(number: int, item: Any) -> None:
            answer: dict[str, Any]
            async with turns:
                limit = asyncio.timeout(seconds)
                try:
                    async with limit:
                        answer = {"result": await carry_out(item)}
                except Exception as error:  # noqa: BLE001  whatever a reward raises is reported
                    late = isinstance(error, TimeoutError) and limit.expired()
                    answer = {
                        "error": f"it took longer than env.score_seconds={seconds:g}" if late else _named(error),
                        "late": late,
                    }
            self.answer(item=number, **answer)

        tasks = []
        for number, item in enumerate(request["items"]):
            tasks.append(asyncio.create_task(one(number, item)))
            for _ in range(ROUNDS):
                if not tasks[-1].done():
                    await asyncio.sleep(0)
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    Child().serve()
