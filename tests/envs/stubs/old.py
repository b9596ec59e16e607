# type: ignore
"""An environment of verifiers 0.3.1."""

import asyncio
import types

import verifiers as vf

POOL = types.SimpleNamespace(_broken=False)


def right(completion, answer):
    if completion and completion[-1].content == "raise":
        raise RuntimeError("a fault of the reward")
    if completion and completion[-1].content == "break":
        POOL._broken = "broken-pool"
    return float(not POOL._broken and completion[-1].content == answer)


async def short(completion):
    return float(len(completion[-1].content) < 3)


def shown(completion):
    raise RuntimeError("a figure of weight 0")


class Slow(vf.SingleTurnEnv):
    async def setup_state(self, state):
        await asyncio.sleep(0.2)


class Silent(vf.SingleTurnEnv):
    async def rollout(self, *given):
        return {**await super().rollout(*given), "trajectory": [], "completion": []}


vf.Slow, vf.Silent = Slow, Silent


def load_environment(count=12, own_test=False, kind="SingleTurnEnv", function=None, timeout_seconds=None):
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(count)]
    test = [{"question": "What is 50 + 1?", "answer": "51"}] if own_test else None
    test = rows[:5] if own_test == "same" else test
    rubrics = [vf.Rubric([right, shown], [1.0, 0.0]), vf.Rubric([short], [0.25])]
    if function:
        exec(f"def judge({function}): return 1.0", globals())
        rubrics = [vf.Rubric([globals()["judge"]], [0.0 if function == "state" else 1.0])]
    rubrics[0].executor = POOL
    return getattr(vf, kind)(rows, test, vf.RubricGroup(rubrics), "Be brief.", timeout_seconds)
