"""GroupPlayer plays whole groups in a process of its own, and reports where its time goes.

Each conversation goes on as soon as its own turn is complete (continuous batching).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from rlpost.data.conversation import Completion, Conversation, PolicyVersionLabel, Ticket
from rlpost.envs.base import EnvBase
from rlpost.model.weight_sums import EngineSums
from rlpost.policies.base import Policy, Request
from rlpost.remote.loop import LoopThread
from rlpost.settings import SamplingSettings

Result = TypeVar("Result")
TELL_SECONDS = 0.5  # between two reports of progress
THREADS = 1024  # most tools that wait at once; a thread starts when it is needed


class GroupPlayer:
    """Plays tickets of `env` with `policy`, and keeps no state that a restart would miss.

    It lives in a worker process (`host`). Each ticket comes back exactly once, unless it was cancelled: in the event
    "groups", a list of (group, its conversations) that have ended together, or as "failed", (group, error). Replies
    are sampled by `Policy.submit`, the environment responds in threads, and finished conversations are scored
    together on the process's main thread, where the deadline of a score can interrupt it.
    """

    host: Any = None  # the `rlpost.remote.process.Host` of its process, which sets it before the first call

    def __init__(self, env: EnvBase, policy: Policy) -> None:
        self.env = env
        self.policy = policy
        self._loop = LoopThread("rlpost-player")
        self._threads = ThreadPoolExecutor(THREADS, "rlpost-turn")
        self._groups: dict[int, asyncio.Task[None]] = {}  # touched by the loop's thread alone
        self._whole: list[tuple[int, list[Conversation]]] = []  # finished groups, not sent yet; likewise
        self._ended: deque[tuple[Conversation, Future[None]]] = deque()  # wait to be scored
        self._sampling, self._playing, self._scored = Stopwatch(), Stopwatch(), 0.0
        self._conversations = [0, 0]  # ended, and begun, since nothing was in flight

    # Called from the owner's process

    def play(self, tickets: Sequence[Ticket]) -> None:
        """Begin to play `tickets`; returns at once."""
        self._loop.submit(self._begin(list(tickets)))

    def cancel(self, groups: Sequence[int]) -> Future[None]:
        """Stop playing these groups; done when their resources are released."""
        return self._loop.submit(self._cancelled(list(groups)))

    def push(self, folder: Path, version: PolicyVersionLabel, *, wait: bool, adapter: bool = False) -> Future[None]:
        """Sample as `version` from now on, with the weights in `folder`; with `wait` once no group is in flight."""
        return self._loop.submit(self._pushed(folder, version, wait, adapter))

    def set_version(self, version: PolicyVersionLabel) -> None:
        """The policy has the weights of `version`: a run is resumed."""
        self.policy.become(version)

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> Future[list[Completion]]:
        """A completion for each request, while groups are being played."""
        return self._loop.submit(self._generated(list(requests), sampling))

    def weight_sums(self, names: Sequence[str] | None) -> Future[dict[int, EngineSums]]:
        """See `Policy.weight_sums`, of this player's policy."""
        return self._loop.submit(self._in_thread(self.policy.weight_sums, names))

    def rest(self) -> Future[None]:
        """See `Policy.rest`; does nothing while groups are in flight."""
        return self._loop.submit(self._rested())

    def close(self) -> None:
        """Play nothing more, and close the policy and the environment."""
        self._loop.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.policy.close()
        self.env.close()

    # In the loop

    async def _begin(self, tickets: list[Ticket]) -> None:
        if not self._groups:
            self._conversations = [0, 0]
        for ticket in tickets:
            self._conversations[1] += len(ticket.samples)
            self._groups[ticket.group] = asyncio.create_task(self._group(ticket))
        if len(self._groups) == len(tickets):
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """Report progress now and then while groups are in flight."""
        while self._groups:
            self.host.tell("progress", (*self._conversations, self._totals()))
            await asyncio.sleep(TELL_SECONDS)

    def _totals(self) -> dict[str, float]:
        """Seconds and tokens since the process began."""
        return {
            "rollout": self._sampling.seconds,
            "reward": self._scored,
            "playing": self._playing.seconds,
            "tokens": float(self.policy.tokens_sampled),
        }

    async def _group(self, ticket: Ticket) -> None:
        conversations: list[Conversation] = []
        try:
            with self._playing.running():
                await self._in_thread(lambda: conversations.extend(self.env.open(ticket)))  # also when it is cancelled
                async with asyncio.TaskGroup() as group:
                    for conversation in conversations:
                        group.create_task(self._conversation(conversation))
        except asyncio.CancelledError:
            await asyncio.wrap_future(self.host.in_main_thread(lambda: self.env.abandon(conversations)))
            raise
        except BaseExceptionGroup as errors:
            self.host.tell("failed", (ticket.group, _first(errors)))
        except Exception as error:  # noqa: BLE001  sent to the owner, which raises it
            self.host.tell("failed", (ticket.group, error))
        else:
            self._whole.append((ticket.group, conversations))
            if len(self._whole) == 1:  # groups that end in the same pass of the loop share one message
                asyncio.get_running_loop().call_soon(self._deliver)
        finally:
            self._groups.pop(ticket.group, None)

    def _deliver(self) -> None:
        whole, self._whole = self._whole, []
        self.host.tell("groups", (whole, self._totals()))

    async def _conversation(self, conversation: Conversation) -> None:
        while not conversation.done:
            [request] = self.policy.requests([conversation])
            if request is None:
                conversation.finish_reason = "context"
            else:
                with self._sampling.running():
                    conversation.add_completion(await asyncio.wrap_future(self.policy.submit(request)))
            await self._in_thread(self.env.respond, [conversation])
        await self._concluded(conversation)
        self._conversations[0] += 1

    async def _concluded(self, conversation: Conversation) -> None:
        done: Future[None] = Future()
        self._ended.append((conversation, done))
        self.host.in_main_thread(self._conclude)
        await asyncio.wrap_future(done)

    def _conclude(self) -> None:
        """Score all conversations that wait, on the main thread; an earlier call may have scored them."""
        waiting = [self._ended.popleft() for _ in range(len(self._ended))]
        ended = [(conversation, done) for conversation, done in waiting if done.set_running_or_notify_cancel()]
        if not ended:
            return
        error: BaseException | None = None
        began = time.monotonic()
        try:
            self.env.conclude([conversation for conversation, _ in ended])
        except BaseException as raised:  # noqa: BLE001  raised again where each conversation waits
            error = raised
        self._scored += time.monotonic() - began
        for _, done in ended:
            done.set_result(None) if error is None else done.set_exception(error)

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])  # a thread cannot be interrupted, and works on what is released next
            raise

    async def _cancelled(self, groups: list[int]) -> None:
        tasks = [self._groups[group] for group in groups if group in self._groups]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pushed(self, folder: Path, version: PolicyVersionLabel, wait: bool, adapter: bool) -> None:
        if wait and self._groups:
            await asyncio.wait(list(self._groups.values()))
        load = self.policy.load_adapter_folder if adapter else self.policy.load_folder
        await self._in_thread(load, folder, version)

    async def _rested(self) -> None:
        if not self._groups:
            await self._in_thread(self.policy.rest)

    async def _generated(self, requests: list[Request], sampling: SamplingSettings) -> list[Completion]:
        ended = 0

        async def one(request: Request) -> Completion:
            nonlocal ended
            completion = await asyncio.wrap_future(self.policy.submit(request, sampling))
            ended += 1
            self.host.tell("ended", (ended, self.policy.tokens_sampled))
            return completion

        return list(await asyncio.gather(*map(one, requests)))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that a TaskGroup gathered."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


# What players spend their time on


class Stopwatch:
    """Seconds during which at least one of several blocks ran."""

    def __init__(self) -> None:
        self._num_running = 0
        self._since = 0.0
        self._before = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """One of the blocks."""
        if not self._num_running:
            self._since = time.monotonic()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._before += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._before + (time.monotonic() - self._since if self._num_running else 0.0)


class PlayerTimes:
    """Mean seconds of `count` players, from the totals that each reports since it began."""

    def __init__(self, count: int) -> None:
        self._totals: list[dict[str, float]] = [{} for _ in range(count)]
        self._at_last_take: list[dict[str, float]] = [{} for _ in range(count)]
        self._played: list[float] = [0.0] * count
        self._began: float | None = None  # when the step began

    def record(self, player: int, totals: dict[str, float]) -> None:
        """Take a player's totals in seconds: rollout, reward, and playing in all."""
        self._totals[player] = totals

    def forget(self, player: int) -> None:
        """Its successor begins at 0."""
        self._totals[player], self._at_last_take[player] = {}, {}

    def begin(self) -> None:
        """Begin a step, unless one has begun since the last call of `take`: what comes between is not idle time."""
        if self._began is None:
            self._began = time.monotonic()
            self._played = [totals.get("playing", 0.0) for totals in self._totals]

    def take(self) -> dict[str, float]:
        """Seconds of sampling and scoring since the last call, and idle seconds of the step."""
        spent = {
            f"time/{name}": fmean(
                now.get(name, 0.0) - before.get(name, 0.0)
                for now, before in zip(self._totals, self._at_last_take, strict=True)
            )
            for name in ("rollout", "reward")
        }
        passed = 0.0 if self._began is None else time.monotonic() - self._began
        idle = (
            max(0.0, passed - max(0.0, totals.get("playing", 0.0) - played))
            for totals, played in zip(self._totals, self._played, strict=True)
        )
        self._at_last_take, self._began = [dict(totals) for totals in self._totals], None
        return spent | {"time/idle": fmean(idle)}
