# type: ignore
"""Stands in for reasoning-core: its seeds do not hold either."""

import dataclasses
import os
import random
import time


@dataclasses.dataclass
class Config:
    level: int = 0
    seed: int = None
    largest: int = 1000


class Entry:
    def __init__(self, config):
        a, b = random.SystemRandom().randrange(config.largest), 10**config.level
        self.prompt, self.answer = f"{a} + {b} = ?", str(a + b)
        self.metadata = {"sum": a + b, "_task": "sums"}


class Sums:
    def __init__(self, **config):
        self.config = Config(**config)
        self.fails = False

    def generate_example(self, level):
        self.config.level = level
        self.fails = not self.fails
        if self.fails:
            raise RuntimeError("no assignment found")
        return Entry(self.config)


class Broken(Sums):
    def generate_example(self, level):
        raise ModuleNotFoundError("No module named 'pyggp'")


class Slow(Sums):
    def generate_example(self, level):
        time.sleep(600)


class Uneven(Sums):  # each second problem is late
    def generate_example(self, level):
        flag = "uneven.flag"
        if os.path.exists(flag):
            os.remove(flag)
            time.sleep(600)
        open(flag, "w").close()
        return Entry(self.config)


TASKS = {"sums": Sums, "broken": Broken, "slow": Slow, "uneven": Uneven, "unscored": Sums, "misscored": Sums}


def list_tasks():
    return list(TASKS)


def get_task(name, **config):
    return TASKS[name](**config)


def score_answer(answer, entry):
    import json

    if entry["task"] == "unscored":
        raise ModuleNotFoundError("No module named 'pyggp'")
    if entry["task"] == "misscored":
        return 0.5
    right = json.loads(entry["metadata"])["sum"]
    if answer == "hang":
        time.sleep(600)
    if answer == "die":
        os._exit(3)
    return 1 if int(answer) == right else 0.25 if int(answer) % 10 == right % 10 else 0.0
