"""Times asynchronous collection against what it is to be as fast as; run it on a machine that does nothing else.

steps  a scripted policy and trainer, 0.1 s each, in two processes: seconds a step for each lag, and the ages seen
tools  64 conversations of three turns whose tools take 0.1 to 2 s: the time of all against that of the longest
vllm   SmolLM2 writes Python programs for sums, two turns, 8 x 8 completions: groups at their own pace against lock
       step, on the same prompts and one engine, alternated; wall time and tokens a second of each

.venv/bin/python scripts/dev/bench_async.py steps
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from rlpost.collectors.driver import GroupDriver
from rlpost.collectors.player import GroupPlayer
from rlpost.collectors.sync import Player
from rlpost.data.conversation import Completion, Conversation
from rlpost.data.replay_buffer import GroupBuffer
from rlpost.envs import DatasetChatEnv
from rlpost.model.conversion import tiny_tokenizer
from rlpost.model.locate import locate_model
from rlpost.model.memory import frozen_heap
from rlpost.model.tokenizer import load_tokenizer
from rlpost.objectives.advantage import has_spread
from rlpost.policies import ScriptedPolicy
from rlpost.policies.base import Request
from rlpost.policies.remote import Players, RemotePolicy
from rlpost.remote.loop import LoopThread
from rlpost.remote.process import WorkerProcess
from rlpost.rewards.score import Score
from rlpost.settings import SamplingSettings

SECONDS = 0.1  # of a round of sampling, and of a step of training
PER_STEP, GROUP = 8, 8
STEPS = 200
CONVERSATIONS, TURNS = 64, 3


class Slow(ScriptedPolicy):
    """Takes `SECONDS` for each request, whatever else is under way, as an engine with room for all does."""

    def __init__(self, *replies: Any, **options: Any) -> None:
        super().__init__(*replies, **options)
        self._loop = LoopThread("bench-engine")

    def submit(self, request: Request, sampling: SamplingSettings | None = None) -> Future[Completion]:
        """See `Policy.submit`."""
        return self._loop.submit(self._later(request, sampling or self.sampling))

    async def _later(self, request: Request, sampling: SamplingSettings) -> Completion:
        await asyncio.sleep(SECONDS)
        return self.generate([request], sampling)[0]


class Lottery(DatasetChatEnv):
    """A third of the groups have equal rewards, which dynamic sampling turns down."""

    def score(self, conversation: Conversation) -> Score:
        """See `ChatEnv.score`."""
        equal = random.Random(conversation.group_id).random() < 1 / 3
        return Score(1.0 if equal else float(conversation.sample % 2))


class Chain(DatasetChatEnv):
    """Two answers, each after its conversation's own wait."""

    def respond(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.respond`."""
        for conversation in conversations:
            if conversation.turns < TURNS:
                time.sleep(wait_of(conversation.group_id, conversation.turns))
        super().respond(conversations)

    def next_message(self, conversation: Conversation) -> str | None:
        """See `ChatEnv.next_message`."""
        return "go on" if conversation.turns < TURNS else None


class Here:
    """A worker process's side, in this process: a main thread, and a queue of what is told."""

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def tell(self, kind: str, content: Any) -> None:
        """See `worker.Host.tell`."""
        if kind != "progress":
            self.told.put((kind, content))

    def in_main_thread(self, work: Callable[[], Any]) -> Future[Any]:
        """See `worker.Host.in_main_thread`."""
        future: Future[Any] = Future()
        self._work.put(lambda: future.set_result(work()))
        return future

    def groups(self, count: int) -> list[Conversation]:
        """The conversations of the next `count` groups."""
        conversations: list[Conversation] = []
        while count:
            kind, content = self.told.get(timeout=600)
            if kind == "failed":
                raise content[1]
            whole, _ = content
            count -= len(whole)
            conversations += [each for _, own in whole for each in own]
        return conversations

    def _run(self) -> None:
        while True:
            self._work.get()()


def wait_of(group: int, turn: int) -> float:
    """Seconds from 0.1 to 2 that the tool of a conversation's turn takes."""
    return random.Random(100 * group + turn).uniform(0.1, 2.0)


def rows(count: int) -> list[dict[str, str]]:
    """So many prompts."""
    return [{"question": f"q{i}"} for i in range(count)]


def lottery(per_step: int, group: int) -> Lottery:
    """The environment of `steps`, in either process."""
    return Lottery(rows(64), num_envs=per_step, repeats=group, group_repeats=True)


def player(per_step: int, group: int) -> GroupPlayer:
    """The player of `steps`, built in its process."""
    return GroupPlayer(lottery(per_step, group), Slow(["a"], tiny_tokenizer(), sampling=SamplingSettings()))


@frozen_heap()  # as in a training
def steps(per_step: int, group: int, count: int) -> None:
    """Seconds a step with a trainer that takes `SECONDS`, for each lag, without and with dynamic sampling."""
    for lag, accept in itertools.product((0, 1, 4), (None, has_spread)):
        print(steps_of(lag, per_step, group, count, accept), flush=True)


def steps_of(lag: int, per_step: int, group: int, count: int, accept: Any) -> str:
    """`count` steps of `per_step` groups: how long each took, in words. What holds of the counts is asserted."""
    model = torch.nn.Linear(2, 1)
    env, buffer = lottery(per_step, group), GroupBuffer(group, accept=accept, oldest_first=True)
    players = Players(lambda seat: WorkerProcess(partial(player, per_step, group)))
    policy = RemotePolicy(players, tiny_tokenizer(), sampling=SamplingSettings())
    driver = GroupDriver(env, policy, buffer, model=model, prompts_per_step=per_step, depth=lag, max_policy_lag=lag)
    policy.start()
    try:
        ages, seconds, counts = [], [], driver.counts()
        for _ in range(count):
            began = time.perf_counter()
            driver.fill(per_step)
            batch = buffer.take(per_step)
            ages.append(driver.policy_version - int(batch["policy_version"].min()))
            time.sleep(SECONDS)
            driver.update_policy_weights_(model)
            seconds.append(time.perf_counter() - began)
            counts = driver.counts()
            ended = ("trained", "turned_down", "cancelled", "failed", "waiting")
            assert counts["groups/issued"] == sum(counts[f"groups/{name}"] for name in ended)
    finally:
        policy.close()
    assert max(ages) <= lag
    sampling = "with dynamic sampling" if accept else "every group taken"
    return (
        f"lag {lag}, {per_step} x {group}, {sampling}: {statistics.mean(seconds[1:]):.3f} s a step "
        f"(median {statistics.median(seconds):.3f}), oldest group {max(ages)} pushes old, "
        f"{counts['groups/turned_down']:.0f} of {counts['groups/issued']:.0f} groups turned down, "
        f"{counts['groups/cancelled']:.0f} cancelled, {buffer.num_dropped_by_age} dropped by age"
    )


def tools() -> None:
    """The time of 64 conversations against the longest of them."""
    env = Chain(rows(CONVERSATIONS), shuffle=False, num_envs=CONVERSATIONS, max_steps=TURNS)
    policy = ScriptedPolicy(["a"], tiny_tokenizer(), sampling=SamplingSettings())
    longest = max(sum(wait_of(group, turn) for turn in range(1, TURNS)) for group in range(CONVERSATIONS))
    played = GroupPlayer(env, policy)
    played.host = here = Here()
    began = time.perf_counter()
    played.play(env.tickets(CONVERSATIONS))
    conversations = here.groups(CONVERSATIONS)
    seconds = time.perf_counter() - began
    assert [c.turns for c in conversations] == [TURNS] * CONVERSATIONS
    print(f"{CONVERSATIONS} conversations: {seconds:.2f} s; the longest chain {longest:.2f} s: {seconds / longest:.3f}")


def vllm(pairs: int) -> None:
    """Groups at their own pace against lock step, with a real engine and the Python tool."""
    from rlpost.envs.build import build_env
    from rlpost.policies import vLLMWrapper
    from rlpost.settings import ArithmeticSettings, Engine, ToolsSettings, VLLMSettings

    settings = ArithmeticSettings(
        prompt_template="Write Python code that prints the result of {question}, between ```python and ```.",
        max_turns=2,
        max_completion_tokens=64,
        max_prompt_tokens=256,
        max_observation_tokens=128,
    )
    folder = locate_model("packaged:smollm2")
    wrapper = vLLMWrapper(
        folder,
        load_tokenizer(folder),
        settings=VLLMSettings(engine=Engine.own_process),
        sampling=SamplingSettings(),
        max_model_len=1024,
    )
    wrapper.start()
    found: dict[str, list[float]] = {"lock step": [], "own pace": []}
    for pair in range(pairs):
        answers = []
        for name in found if pair % 2 == 0 else reversed(found):
            wrapper.rest()
            env = build_env(
                settings, num_prompts=PER_STEP, group_size=GROUP, seed=pair, tools=ToolsSettings(["python"])
            )
            env.start()
            tickets = env.tickets()
            began = time.perf_counter()
            if name == "lock step":
                conversations = [c for ticket in tickets for c in env.open(ticket)]
                one_by_one = Player(env, wrapper)
                while under_way := [c for c in conversations if not c.done]:
                    one_by_one.turn(under_way)
            else:
                played = GroupPlayer(env, wrapper)
                played.host = here = Here()
                played.play(tickets)
                conversations = here.groups(len(tickets))
            seconds = time.perf_counter() - began
            env.close()
            tokens = sum(sum(c.mask) for c in conversations)
            found[name].append(seconds)
            answers.append(sorted(c.key for c in conversations))
            print(f"{name}: {seconds:.2f} s, {tokens} tokens, {tokens / seconds:.0f} tokens/s", flush=True)
        assert answers[0] == answers[1]
        assert len(set(answers[0])) == PER_STEP * GROUP
    wrapper.close()
    ratios = [own / lock for own, lock in zip(found["own pace"], found["lock step"], strict=True)]
    print(f"own pace / lock step: median {statistics.median(ratios):.3f} of {pairs} pairs")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "tools", "vllm"))
    parser.add_argument("--pairs", type=int, default=3, help="of vllm")
    parser.add_argument("--prompts", type=int, default=PER_STEP, help="of a step, of steps")
    parser.add_argument("--group", type=int, default=GROUP, help="completions a prompt, of steps")
    asked = parser.parse_args()
    work = {
        "steps": lambda: steps(asked.prompts, asked.group, STEPS),
        "tools": tools,
        "vllm": lambda: vllm(asked.pairs),
    }
    work[asked.what]()


if __name__ == "__main__":
    main()
