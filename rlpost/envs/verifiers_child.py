"""Loads a verifiers taskset and scores replies to its tasks: `PATH/python verifiers_child.py`, see `envs/verifiers.py`.

It runs in the interpreter that has verifiers, so it imports nothing of rlpost. Requests come on stdin and answers go to
stdout, a line of JSON each; whatever the package prints goes to stderr.

    {"do": "load", "id", "args", "tasks"}           -> {"about"}, a {"row"} for each task, {"end"}
    {"do": "score", "seconds", "items": [{...}]}     -> {"item": number, "parts" or "error"} for each, {"end"}
    {"do": "validate", "keys"}                       -> {"item": number, "valid"} for each, {"end"}

A request that cannot be carried out gets {"refused": why}. Scoring runs in the main thread: checks that set an alarm,
such as math-verify's, fail elsewhere, and verifiers counts that as a wrong answer. All replies of a request are scored
in one event loop, so that judges and subprocesses overlap.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any

ENDLESS = 1000  # tasks taken of a taskset without end
AT_ONCE = 128  # replies scored at the same time
LAST_V0 = "0.3.1"
OF_V0 = re.compile(r"module 'verifiers' has no attribute|from 'verifiers'|No module named 'verifiers\.")
ONE_REPLY = "rlpost trains on one reply a task: choose a taskset that asks once and scores the reply"


class RefusedError(Exception):
    """The taskset cannot work here; the message is for the user."""


# Tasksets of verifiers 0.4, called v1 there


class Tasks:
    """The tasks of a v1 taskset: `rows` lists them, `score` scores a reply to one."""

    kind = "v1"

    def __init__(self, name: str, arguments: dict[str, Any], most: int | None) -> None:
        vf = self.vf = importlib.import_module("verifiers.v1")
        env = vf.environment_class(name)
        own = [each for each in ("run", "setup", "finalize", "start") if _differs(env, vf.SingleAgentEnv, each)]
        if own:
            raise RefusedError(f"its environment {env.__name__} has a {own[0]}() of its own. {ONE_REPLY}")
        taskset = vf.load_taskset(vf.resolve_env_config({"taskset": {**arguments, "id": name}}).taskset)
        if most is None and taskset.INFINITE:
            most = ENDLESS
        if type(taskset).toolsets(taskset.config):
            raise RefusedError(f"it gives the model tools ({type(taskset).__name__}.toolsets). {ONE_REPLY}")
        self.hooks: list[str] = []  # of the tasks' own, which verifiers calls before and after the reply
        self.tasks = {task.key: task for task in itertools.islice(taskset, most)}
        if self.tasks:
            self._check(next(iter(self.tasks.values())))

    def _check(self, task: Any) -> None:
        """Refuse tasks that need more than a reply to score."""
        hook_boundary = importlib.import_module("verifiers.v1.session").hook_boundary
        vf, kind = self.vf, type(task).__name__
        if type(task).toolsets(task.config):
            raise RefusedError(f"it gives the model tools ({kind}.toolsets). {ONE_REPLY}")
        if task.NEEDS_CONTAINER or task.data.image:
            raise RefusedError(f"its tasks run in a container ({kind}). {ONE_REPLY}")
        judges = [judge.score for judge in task.plugged_judges()]
        self.hooks = [name for name in ("setup", "finalize") if _differs(type(task), vf.Task, name)]
        rewards = [*task.hooks("reward"), *judges]
        for call in (*rewards, *(getattr(task, name) for name in self.hooks)):
            if _requires(call, "runtime"):
                raise RefusedError(
                    f"{kind}.{call.__name__} needs a runtime, in which verifiers runs programs beside the agent. "
                    "rlpost has none and verifiers leaves such rewards out without it: choose a taskset that scores "
                    "the reply alone"
                )
        for call in (*rewards, *task.hooks("metric")):
            if not inspect.iscoroutinefunction(inspect.unwrap(call)):
                raise RefusedError(
                    f"{kind}.{call.__name__} is a plain def, with which verifiers loses every reward of the task: "
                    "write `async def`"
                )
        if not rewards:
            raise RefusedError(f"{kind} has no reward, so nothing scores a reply")
        live = [call for call in task.hooks("stop") if hook_boundary(call, allow_trace=True) is not vf.Trace]
        if live or any(hasattr(member, "intercept") for base in type(task).__mro__ for member in vars(base).values()):
            raise RefusedError(
                f"{kind} intercepts the model's requests or replies, which rlpost does not send through it"
            )

    def rows(self) -> Any:
        """Each task as plain data: key, messages, fields."""
        for key, task in self.tasks.items():
            data = task.data
            if data.prompt is None:
                raise RefusedError(f"task {data.idx} has no prompt: a user opens the conversation. {ONE_REPLY}")
            messages = _plain(data.prompt, data.idx)
            if data.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": data.system_prompt})
            fields = data.model_dump(mode="json", exclude_defaults=True, exclude={"prompt", "system_prompt"})
            yield {"key": key, "messages": messages, "fields": fields, "split": None}

    async def score(self, item: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """Part -> its score and weight. Raises what scoring raises, ValueError if a part was not scored."""
        task, vf = self.tasks[item["key"]], self.vf
        trace = self._trace(task)
        available = {"trace": trace, "task": task.data}
        if "setup" in self.hooks:
            await _called(task.setup, available)
        for message in item["messages"]:
            self._append(trace, message)
        usage = vf.Usage(prompt_tokens=item["prompt_tokens"], completion_tokens=item["tokens"])
        self._append(trace, {"role": "assistant", "content": item["reply"]}, sampled=True)
        reason = "length" if item["truncated"] else "stop"
        trace.calls.append(vf.ModelCall(node=len(trace.nodes) - 1, finish_reason=reason, usage=usage))
        trace.stop("agent_completed")
        if "finalize" in self.hooks:
            await _called(task.finalize, available)
        await task.score(trace)
        unscored = [name for name, reward in trace.rewards.items() if reward is None]
        if unscored or not trace.rewards:
            raise ValueError(f"verifiers scored no {unscored[0]}" if unscored else "verifiers gave no reward")
        if trace.errors:
            raise ValueError(f"{trace.errors[-1].type}: {trace.errors[-1].message}")
        return {name: (reward.score, reward.weight) for name, reward in trace.rewards.items()}

    async def validate(self, key: str) -> bool | None:
        """Whether the task's own check of its ground truth passes; None without one, or if it needs a runtime."""
        task = self.tasks[key]
        if not _differs(type(task), self.vf.Task, "validate") or _requires(task.validate, "runtime"):
            return None
        return await _called(task.validate, {})

    def _trace(self, task: Any) -> Any:
        vf, state_cls = self.vf, importlib.import_module("verifiers.v1.state").state_cls
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig(runtime={"type": "subprocess"}))
        return vf.Trace(task=about, state=state_cls(type(task))(), agent=agent)

    def _append(self, trace: Any, message: dict[str, str], *, sampled: bool = False) -> None:
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(self.vf.MessageNode(parent=parent, message=message, sampled=sampled))


# Environments written for v0


class Environment:
    """The rows of a single-turn v0 environment and its rubric, as `Tasks`."""

    kind = "v0"

    def __init__(self, name: str, arguments: dict[str, Any], most: int | None) -> None:
        vf = importlib.import_module("verifiers")
        self.env = env = vf.load_environment(name, **arguments)
        kind = type(env).__name__
        if not isinstance(env, vf.SingleTurnEnv):
            raise RefusedError(
                f"{kind} is not a SingleTurnEnv: it has several turns, tools or environments. {ONE_REPLY}"
            )
        if env.tool_defs:
            raise RefusedError(f"{kind} gives the model tools. {ONE_REPLY}")
        if env.rubric.has_group_rewards:
            raise RefusedError(f"{kind} has a reward that compares several replies to a prompt. {ONE_REPLY}")
        watched = [_watch(rubric) for rubric in _rubrics(env.rubric)]
        if not any(watched):
            raise RefusedError(f"{kind} has no reward with a weight, so nothing scores a reply")
        self.tasks: dict[str, Any] = {}
        self.split: dict[str, str | None] = {}
        train, test = env.build_dataset(), env.build_eval_dataset()
        both = train is not None and test is not None
        for split, rows in (("train", train), ("test", test)):
            for row in itertools.islice(rows or (), most):
                key = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()
                self.tasks.setdefault(key, row)
                self.split.setdefault(key, split if both else None)
        self.client = _reply_client()

    def rows(self) -> Any:
        """See `Tasks.rows`."""
        for key, row in self.tasks.items():
            messages = _plain(row["prompt"], row.get("example_id"))
            fields = {name: value for name, value in row.items() if name != "prompt"}
            yield {"key": key, "messages": messages, "fields": fields, "split": self.split[key]}

    async def score(self, item: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """See `Tasks.score`; raises too what a reward function raised, for which verifiers counts 0."""
        notes: list[tuple[str, float, Any]] = []
        NOTES.set(notes)
        row = {**self.tasks[item["key"]], "prompt": item["messages"]}
        state = await self.env.rollout(row, self.client(item), "rlpost", {})
        if state.get("error") is not None:
            raise state["error"]
        await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        for _, weight, noted in notes:
            if weight and isinstance(noted, Exception):
                raise noted
        parts: dict[str, tuple[float, float]] = {}
        for name, weight, noted in notes:
            if weight:
                sum_of, _ = parts.get(name, (0.0, 1.0))
                parts[name] = (noted, weight) if name not in parts else (sum_of * parts[name][1] + noted * weight, 1.0)
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

    def note(result: Any) -> Any:
        NOTES.get().append((name, weight, result if isinstance(result, Exception) else float(result)))
        return result

    async def awaited(result: Any) -> Any:
        try:
            return note(await result)
        except Exception as error:
            note(error)
            raise

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            result = function(*arguments, **named)
            return awaited(result) if inspect.isawaitable(result) else note(result)
        except Exception as error:
            note(error)
            raise

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


# Both


def opened(name: str, arguments: dict[str, Any], most: int | None) -> Tasks | Environment:
    """The taskset or environment `name`; which of the two its module says. Raises RefusedError."""
    installed = version("verifiers")
    has_v0 = importlib.util.find_spec("verifiers.legacy") is not None
    advice = (
        f"and verifiers {installed} is installed: give env.python an interpreter with verifiers=={LAST_V0}, the last "
        "one with v0"
    )
    module_name = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    module = None
    if importlib.util.find_spec("verifiers.v1.tasksets." + module_name) is None:  # else verifiers brings it
        try:
            module = importlib.import_module(module_name)
        except (AttributeError, ImportError) as error:
            if getattr(error, "name", None) == module_name:
                raise RefusedError(
                    f"{sys.executable} has no module {module_name}: install the package there"
                ) from error
            if has_v0 or not OF_V0.search(str(error)):
                raise
            raise RefusedError(f"it was written for verifiers' v0 ({error}), {advice}") from error
    if not hasattr(module, "load_environment"):
        return Tasks(name, arguments, most)
    if has_v0:
        return Environment(name, arguments, most)
    raise RefusedError(f"it was written for verifiers' v0 (it has load_environment), {advice}")


def _differs(cls: type, base: type, name: str) -> bool:
    """Whether `cls` has another `name` than `base`."""
    return getattr(cls, name, None) is not getattr(base, name, None)


def _requires(call: Any, name: str) -> bool:
    parameter = inspect.signature(call).parameters.get(name)
    return parameter is not None and parameter.default is inspect.Parameter.empty


async def _called(call: Any, available: dict[str, Any]) -> Any:
    """The result of `call` with the arguments that it names."""
    return await call(**{name: available[name] for name in inspect.signature(call).parameters if name in available})


def _plain(prompt: Any, number: Any) -> list[dict[str, str]]:
    """The messages of a prompt, with their role and text alone. Raises RefusedError where that is not all of them."""
    messages = []
    for message in [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt:
        found = message if isinstance(message, dict) else message.model_dump(mode="json")
        content = found.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        if found.get("tool_calls") or found["role"] == "tool" or any(part.get("type") != "text" for part in parts):
            raise RefusedError(f"the prompt of task {number} has images or calls of tools, and rlpost asks in text")
        messages.append({"role": found["role"], "content": "".join(part["text"] for part in parts)})
    if not messages or messages[-1]["role"] != "user":
        raise RefusedError(f"the prompt of task {number} does not end with a message of the user")
    return messages


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
        self.answer(about=f"{request['id']} of verifiers {version('verifiers')}")
        for row in self.opened.rows():
            self.answer(row=row)

    async def each(self, request: dict[str, Any]) -> None:
        """Score the items of a request, or validate its keys, at the same time."""
        turns, seconds = asyncio.Semaphore(AT_ONCE), request["seconds"]
        assert self.opened is not None
        carry_out = getattr(self.opened, request["do"])
        known = self.opened.tasks

        async def one(number: int, item: Any) -> None:
            key = item["key"] if isinstance(item, dict) else item
            answer: dict[str, Any]
            async with turns:
                limit = asyncio.timeout(seconds)
                try:
                    async with limit:
                        if key not in known:
                            raise LookupError(f"the taskset has no task {key} any more: it lists other tasks each time")
                        answer = {"result": await carry_out(item)}
                except Exception as error:  # noqa: BLE001  whatever a reward raises is reported
                    late = isinstance(error, TimeoutError) and limit.expired()
                    answer = {
                        "error": f"scoring took longer than {seconds:g} s" if late else _named(error),
                        "late": late,
                    }
            self.answer(item=number, **answer)

        await asyncio.gather(*(one(number, item) for number, item in enumerate(request["items"])))


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]
    Child().serve()
