"""Packages named verifiers with as much of its two interfaces as the door uses, written into a folder.

`v1(folder)` has that of 0.4, `v0(folder)` that of 0.3.1; `PYTHONPATH` has to name the folder. They do what the
real packages were seen to do: a plain reward loses all of a task's, and v0 counts 0 for a reward that raises.
"""

from __future__ import annotations

import shutil
from pathlib import Path

V1 = """
import asyncio, hashlib, importlib, inspect, json, types

class Data:
    idx = prompt = system_prompt = image = None

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def model_dump(self, mode=None, exclude_defaults=False, exclude=()):
        return {name: value for name, value in vars(self).items() if name not in exclude}

class TaskData(Data): pass
class TaskConfig(Data): pass
class SystemMessage(Data): pass
class Usage(Data): pass
class ModelCall(Data): pass
class TraceTask(Data): pass
class AgentConfig(Data): pass
class AgentInfo(Data): pass
class State(Data): pass
class Reward(Data): pass

class MessageNode(Data):
    def __init__(self, *, parent, message, sampled):
        super().__init__(parent=parent, message=types.SimpleNamespace(**message), sampled=sampled)

class Trace:
    def __init__(self, *, task, state, agent):
        self.task, self.state, self.agent = task, state, agent
        self.nodes, self.calls, self.rewards, self.errors, self.stop_condition = [], [], {}, [], None

    def stop(self, condition):
        self.stop_condition = condition

    @property
    def last_reply(self):
        return [node.message.content for node in self.nodes if node.sampled][-1]

    @property
    def num_output_tokens(self):
        return self.calls[-1].usage.completion_tokens

def marked(attribute):
    def mark(function=None, weight=1.0):
        def decorate(function):
            setattr(function, attribute, True)
            function._vf_weight = weight
            return function
        return decorate if function is None else decorate(function)
    return mark

reward, metric, stop, intercept = map(marked, ("reward", "metric", "stop", "intercept"))

class Task:
    NEEDS_CONTAINER = False

    def __init__(self, data, config=None):
        self.data, self.config = data, config

    @property
    def key(self):
        return hashlib.sha256(json.dumps(vars(self.data), sort_keys=True).encode()).hexdigest()

    hash = key

    async def setup(self, trace, runtime): pass
    async def finalize(self, trace, runtime): pass
    async def validate(self, runtime): pass

    @classmethod
    def toolsets(cls, config):
        return []

    def plugged_judges(self):
        return []

    def hooks(self, attribute):
        names = {name for base in type(self).__mro__ for name, each in vars(base).items() if hasattr(each, attribute)}
        return [getattr(self, name) for name in sorted(names)]

    async def score(self, trace, runtime=None):
        rewards = [each for each in self.hooks("reward") if "runtime" not in inspect.signature(each).parameters]
        trace.rewards.update({each.__name__: None for each in rewards})
        given = {"trace": trace, "task": self.data}
        calls = [{name: given[name] for name in inspect.signature(each).parameters} for each in rewards]
        found = await asyncio.gather(*(each(**call) for each, call in zip(rewards, calls)))
        for each, value in zip(rewards, found):
            if isinstance(value, dict):
                del trace.rewards[each.__name__]
            for name, score in (value if isinstance(value, dict) else {each.__name__: value}).items():
                trace.rewards[name] = Reward(score=float(score), weight=each._vf_weight)

class Taskset:
    INFINITE = False
    ARGUMENTS = {}

    def __init__(self, config):
        self.config = config

    def __iter__(self):
        return iter(self.load())

    @classmethod
    def toolsets(cls, config):
        return []

class SingleAgentEnv:
    async def run(self, task, agents): pass
    async def setup(self, agents): pass
    async def finalize(self, task, episode): pass
    async def start(self): pass

def exported(name, kind):
    module = importlib.import_module(name.rsplit("/", 1)[-1].replace("-", "_"))
    found = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, kind)]
    return next((each for each in found if each.__module__ == module.__name__), None)

def environment_class(name):
    return exported(name, SingleAgentEnv) or SingleAgentEnv

def resolve_env_config(given):
    own = dict(given["taskset"])
    taskset = exported(own.pop("id"), Taskset)
    if wrong := own.keys() - taskset.ARGUMENTS.keys():
        raise ValueError(f"{min(wrong)}: Extra inputs are not permitted")
    config = types.SimpleNamespace(**{**taskset.ARGUMENTS, **own}, task=TaskConfig())
    return types.SimpleNamespace(taskset=types.SimpleNamespace(build=taskset, config=config))

def load_taskset(asked):
    return asked.build(asked.config)
"""
SESSION = """
from verifiers.v1 import Trace

def hook_boundary(call, allow_trace):
    return next(iter(call.__annotations__.values()), Trace)
"""
STATE = "from verifiers.v1 import State\n\ndef state_cls(cls):\n    return State\n"

V0 = """
import asyncio, importlib, inspect, logging
from verifiers.clients import Client
from verifiers.types import AssistantMessage

class Parser: pass

class Rubric:
    def __init__(self, funcs=(), weights=None, parser=None):
        self.funcs, self.weights = list(funcs), list(weights or [1.0] * len(funcs))

    @property
    def has_group_rewards(self):
        return any("completions" in inspect.signature(each).parameters for each in self.funcs)

    async def score_rollout(self, state):
        total = 0.0
        for function, weight in zip(self.funcs, self.weights):
            given = {"completion": state["completion"], "answer": state["input"].get("answer", ""), "state": state}
            names = inspect.signature(function).parameters
            try:
                value = function(**{name: given[name] for name in names})
                score = float(await value if inspect.isawaitable(value) else value)
            except Exception as error:
                logging.error("Error calling reward function %s: %s", function.__name__, error)
                score = 0.0
            total += score * weight
        state["reward"] = total

    async def cleanup(self, state): pass

class RubricGroup(Rubric):
    def __init__(self, rubrics):
        super().__init__()
        self.rubrics = rubrics

    @property
    def has_group_rewards(self):
        return any(rubric.has_group_rewards for rubric in self.rubrics)

    async def score_rollout(self, state):
        total = 0.0
        for rubric in self.rubrics:
            await rubric.score_rollout(state)
            total += state["reward"]
        state["reward"] = total

class Environment:
    tool_defs = None

    def __init__(self, dataset=None, eval_dataset=None, rubric=None, system_prompt=None, timeout_seconds=None):
        self.sources, self.rubric, self.system_prompt = (dataset, eval_dataset), rubric, system_prompt
        self.timeout_seconds = timeout_seconds

    def _rows(self, rows):
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return None if rows is None else [
            {**row, "example_id": n, "prompt": [*system, {"role": "user", "content": row["question"]}]}
            for n, row in enumerate(rows)
        ]

    def build_dataset(self):
        return self._rows(self.sources[0])

    def build_eval_dataset(self):
        return self._rows(self.sources[1])

    async def setup_state(self, state): pass

    async def rollout(self, row, client, model, sampling_args):
        state = {"input": row, "trajectory": [], "completion": [], "error": None, "reward": None}

        async def turn():
            await self.setup_state(state)
            response = await client.get_response(prompt=row["prompt"], model=model, sampling_args={}, state=None)
            state["trajectory"].append(response)
            state["completion"].append(AssistantMessage(content=response.message.content))

        try:
            await asyncio.wait_for(turn(), self.timeout_seconds)
        except TimeoutError:
            state["timed_out"] = True
        return state

class SingleTurnEnv(Environment): pass
class ToolEnv(Environment): pass

def load_environment(name, **arguments):
    return importlib.import_module(name).load_environment(**arguments)
"""
CLIENTS = """
from abc import ABC, abstractmethod

class Client(ABC):
    def __init__(self, client_or_config):
        self._client = client_or_config

    @abstractmethod
    def setup_client(self, config): ...
"""
TYPES = """
class Data:
    def __init__(self, **fields):
        self.__dict__.update(fields)

class Usage(Data): pass
class AssistantMessage(Data): pass
class ResponseMessage(Data): pass
class Response(Data): pass
"""


def v1(folder: Path) -> Path:
    """Write the package of verifiers 0.4; returns the folder."""
    return _written(
        folder, "0.4.0", {"v1/__init__": V1, "v1/session": SESSION, "v1/state": STATE, "v1/tasksets/__init__": ""}
    )


def v0(folder: Path) -> Path:
    """Write the package of verifiers 0.3.1, which has both interfaces; returns the folder."""
    files = {"__init__": V0, "clients": CLIENTS, "types": TYPES, "legacy": ""}
    return _written(v1(folder), "0.3.1", files)


def _written(folder: Path, version: str, files: dict[str, str]) -> Path:
    for old in folder.glob("verifiers-*.dist-info"):
        shutil.rmtree(old)
    about = folder / f"verifiers-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    for name, text in {"__init__": "", **files}.items():
        file = folder / "verifiers" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder
