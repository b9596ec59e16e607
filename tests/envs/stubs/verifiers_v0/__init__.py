# type: ignore
"""Stands in for verifiers 0.3.1. A reward that raises counts 0, as there."""

import asyncio
import importlib
import inspect
import logging

from verifiers.types import AssistantMessage


class Rubric:
    def __init__(self, funcs=(), weights=None):
        self.funcs, self.weights = list(funcs), list(weights or [1.0] * len(funcs))

    @property
    def has_group_rewards(self):
        return any("completions" in inspect.signature(each).parameters for each in self.funcs)

    async def score_rollout(self, state):
        total = 0.0
        for function, weight in zip(self.funcs, self.weights, strict=True):
            given = {"completion": state["completion"], "answer": state["input"].get("answer", ""), "state": state}
            names = inspect.signature(function).parameters
            try:
                value = function(**{name: given[name] for name in names})
                score = float(await value if inspect.isawaitable(value) else value)
            except Exception as error:  # noqa: BLE001
                logging.error("Error calling reward function %s: %s", function.__name__, error)
                score = 0.0
            total += score * weight
        state["reward"] = total

    async def cleanup(self, state):
        pass


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
        return rows and [
            {**row, "example_id": n, "prompt": [*system, {"role": "user", "content": row["question"]}]}
            for n, row in enumerate(rows)
        ]

    def build_dataset(self):
        return self._rows(self.sources[0])

    def build_eval_dataset(self):
        return self._rows(self.sources[1])

    async def setup_state(self, state):
        pass

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


class SingleTurnEnv(Environment):
    pass


class ToolEnv(Environment):
    pass


def load_environment(name, **arguments):
    return importlib.import_module(name).load_environment(**arguments)
