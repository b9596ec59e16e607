# type: ignore
"""Stands in for verifiers.v1 of 0.4: a reward that is a plain def loses all rewards of its task, as there."""

import asyncio
import hashlib
import importlib
import inspect
import json
import types


class Data:
    idx = prompt = system_prompt = image = None

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def model_dump(self, mode=None, exclude_defaults=False, exclude=()):
        return {name: value for name, value in vars(self).items() if name not in exclude}


TaskData = TaskConfig = TraceTask = AgentConfig = AgentInfo = ModelCall = Usage = State = Reward = Data


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

    async def setup(self, trace, runtime):
        pass

    async def finalize(self, trace, runtime):
        pass

    async def validate(self, runtime):
        pass

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
        found = await asyncio.gather(*(each(**call) for each, call in zip(rewards, calls, strict=True)))
        for each, value in zip(rewards, found, strict=True):
            if isinstance(value, dict):
                del trace.rewards[each.__name__]
            for name, score in (value if isinstance(value, dict) else {each.__name__: value}).items():
                trace.rewards[name] = Reward(score=float(score), weight=each._vf_weight)


class Taskset:
    INFINITE = False
    ARGUMENTS = {}  # noqa: RUF012

    def __init__(self, config):
        self.config = config

    def __iter__(self):
        return iter(self.load())

    @classmethod
    def toolsets(cls, config):
        return []


class SingleAgentEnv:
    async def run(self, task, agents):
        pass


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
