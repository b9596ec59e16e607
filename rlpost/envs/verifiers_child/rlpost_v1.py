"""Tasksets of verifiers 0.4, whose interface is called v1 there. Imports nothing of rlpost."""

from __future__ import annotations

import importlib
import inspect
import itertools
from typing import Any

from rlpost_plain import ONE_REPLY, RefusedError, plain_messages, refuse_if

ENDLESS = 1000  # tasks taken of a taskset without end


class Tasks:
    """The tasks of a v1 taskset: `rows` lists them, `score` scores a reply to one."""

    def __init__(self, name: str, arguments: dict[str, Any], most: int | None) -> None:
        vf = self.vf = importlib.import_module("verifiers.v1")
        env = vf.environment_class(name)
        own = [each for each in ("run", "setup", "finalize", "start") if _differs(env, vf.SingleAgentEnv, each)]
        if own:
            raise RefusedError(f"its environment {env.__name__} has a {own[0]}() of its own. {ONE_REPLY}")
        taskset = vf.load_taskset(vf.resolve_env_config({"taskset": {**arguments, "id": name}}).taskset)
        if most is None and taskset.INFINITE:
            most = ENDLESS
        refuse_if(
            type(taskset).toolsets(taskset.config),
            f"it gives the model tools ({type(taskset).__name__}.toolsets). {ONE_REPLY}",
        )
        self.hooks: dict[type, list[str]] = {}  # class of tasks -> its own, called before and after the reply
        self.tasks = {task.key: task for task in itertools.islice(taskset, most)}
        for task in self.tasks.values():
            if type(task) not in self.hooks:
                self._check(task)

    def _check(self, task: Any) -> None:
        """Refuse a class of tasks that needs more than a reply to score."""
        hook_boundary = importlib.import_module("verifiers.v1.session").hook_boundary
        vf, kind = self.vf, type(task).__name__
        refuse_if(type(task).toolsets(task.config), f"it gives the model tools ({kind}.toolsets). {ONE_REPLY}")
        judges = [judge.score for judge in task.plugged_judges()]
        hooks = [name for name in ("setup", "finalize") if _differs(type(task), vf.Task, name)]
        self.hooks[type(task)] = hooks
        rewards = [*task.hooks("reward"), *judges]
        for call in (*rewards, *(getattr(task, name) for name in hooks)):
            refuse_if(
                _requires(call, "runtime"),
                f"{kind}.{call.__name__} needs a runtime, in which verifiers runs programs beside the agent. "
                "rlpost has none and verifiers leaves such rewards out without it: choose a taskset that scores "
                "the reply alone",
            )
        for call in (*rewards, *task.hooks("metric")):
            refuse_if(
                not inspect.iscoroutinefunction(inspect.unwrap(call)),
                f"{kind}.{call.__name__} is a plain def, with which verifiers loses every reward of the task: "
                "write `async def`",
            )
        refuse_if(not rewards, f"{kind} has no reward, so nothing scores a reply")
        live = [call for call in task.hooks("stop") if hook_boundary(call, allow_trace=True) is not vf.Trace]
        refuse_if(
            live or any(hasattr(member, "intercept") for base in type(task).__mro__ for member in vars(base).values()),
            f"{kind} intercepts the model's requests or replies, which rlpost does not send through it",
        )

    def rows(self) -> Any:
        """Each task as plain data: key, messages, fields."""
        for key, task in self.tasks.items():
            data, kind = task.data, type(task).__name__
            refuse_if(task.NEEDS_CONTAINER or data.image, f"its tasks run in a container ({kind}). {ONE_REPLY}")
            refuse_if(data.prompt is None, f"task {data.idx} has no prompt: a user opens the conversation. {ONE_REPLY}")
            messages = plain_messages(data.prompt, data.idx)
            if data.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": data.system_prompt})
            fields = data.model_dump(mode="json", exclude_defaults=True, exclude={"prompt", "system_prompt"})
            yield {"key": key, "messages": messages, "fields": fields, "split": None}

    async def score(self, item: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """Part -> its score and weight. Raises what scoring raises, ValueError if a part was not scored."""
        task, vf = self.tasks[item["key"]], self.vf
        trace = self._trace(task)
        available = {"trace": trace, "task": task.data}
        if "setup" in self.hooks[type(task)]:
            await _called(task.setup, available)
        for message in item["messages"]:
            self._append(trace, message)
        usage = vf.Usage(prompt_tokens=item["prompt_tokens"], completion_tokens=item["tokens"])
        self._append(trace, {"role": "assistant", "content": item["reply"]}, sampled=True)
        reason = "length" if item["truncated"] else "stop"
        trace.calls.append(vf.ModelCall(node=len(trace.nodes) - 1, finish_reason=reason, usage=usage))
        trace.stop("agent_completed")
        if "finalize" in self.hooks[type(task)]:
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


def _differs(cls: type, base: type, name: str) -> bool:
    """Whether `cls` has another `name` than `base`."""
    return getattr(cls, name, None) is not getattr(base, name, None)


def _requires(call: Any, name: str) -> bool:
    parameter = inspect.signature(call).parameters.get(name)
    return parameter is not None and parameter.default is inspect.Parameter.empty


async def _called(call: Any, available: dict[str, Any]) -> Any:
    """The result of `call` with the arguments that it names."""
    return await call(**{name: available[name] for name in inspect.signature(call).parameters if name in available})
