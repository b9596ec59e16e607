"""GroupDriver: draws prompts, has them played in another process and fills the buffer with whole groups."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rlpost.collectors.remote_policy import FolderUpdater, RemotePolicy
from rlpost.data.conversation import Conversation, Ticket
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.envs.dataset_chat import DatasetChatEnv
from rlpost.errors import PolicyError
from rlpost.weight_sync.base import WeightSource

log = logging.getLogger("rlpost")

LOOK_SECONDS = 1.0


@dataclass
class Issued:
    """A ticket that a player has, or had: the version it was begun under, and whether it was cancelled before."""

    ticket: Ticket
    begun_under: int
    again: bool = False


class GroupDriver:
    """The one owner of draws, versions and the buffer; the player in `policy`'s process keeps nothing.

    A training takes `prompts_per_step` groups a step. While it works on them, at most `depth` steps' groups are
    sampled or wait in `buffer`; while it waits for the next ones, one step's more. So a group begins only where it
    can still be trained on. A group that was begun more than `max_policy_lag` pushes ago is cancelled at the push
    and begun again under the new weights; it is not cancelled twice: the step that is its last chance waits for it.

    `counts` says, at any moment: issued = trained + turned down + cancelled + failed + waiting, where a group
    that is begun again counts as issued again and `waiting` are those that are sampled or wait in the buffer.
    """

    def __init__(
        self,
        env: DatasetChatEnv,
        policy: RemotePolicy,
        buffer: ReplayBuffer,
        *,
        model: WeightSource,
        prompts_per_step: int,
        depth: int,
        max_policy_lag: int,
        wait_for_groups: bool = True,
        max_restarts: int = 3,
        wait_seconds: float = 600.0,
    ) -> None:
        self.env = env
        self.policy = policy
        self.buffer = buffer
        self.model = model  # what is pushed to a process that replaces one that died
        self.prompts_per_step = prompts_per_step
        self.depth = depth
        self.max_policy_lag = max_policy_lag
        self.max_restarts = max_restarts
        self.wait_seconds = wait_seconds  # for a group to arrive
        self.weight_updater = FolderUpdater(policy)
        self.weight_updater.wait = wait_for_groups
        self.on_phase: Callable[[str, str], None] = lambda kind, what: None
        self.on_sampled: Callable[[int, int, int], None] | None = None
        self._counts: Counter[str] = Counter()  # since the run began: issued, trained, turned_down, cancelled, failed
        self._changed = threading.Condition(threading.RLock())  # of all that follows
        self._running: dict[int, Issued] = {}
        self._whole: dict[int, Issued] = {}  # in the buffer
        self._again: deque[Issued] = deque()  # to be issued before anything is drawn
        self._trainer_waits = False
        self._told = False  # what is waited for
        self._pushing = False
        self._arrived = 0
        self._error: BaseException | None = None
        self._totals: dict[str, float] = {}  # of the process that samples
        self._taken_totals: dict[str, float] = {}
        self._began = (time.monotonic(), 0.0)  # the step: when, and the seconds of playing until then
        self._waited = 0.0
        policy.on_event = self._hear
        policy.on_death = self._wake
        policy.revive = self._revive
        buffer.source = self

    # What the buffer asks

    @property
    def policy_version(self) -> int:
        """See `GroupSource.policy_version`."""
        version = self.policy.version
        assert isinstance(version, int)
        return version

    @property
    def owes(self) -> bool:
        """See `GroupSource.owes`: a group that was cancelled before, and would be too old after the next push."""
        with self._changed:
            return any(each.again and self._too_old(each, self.policy_version + 1) for each in self._running.values())

    def collect(self) -> None:
        """Let as many groups begin as may, and return when one more has come back, or a step's groups are there.

        Raises what went wrong in playing one, and PolicyError where none comes for `wait_seconds`, or where the
        process that samples has died more than `max_restarts` times.
        """
        began = time.monotonic()
        if not self._told:
            self.on_phase("sampling", f"{self.prompts_per_step} groups")
        self._told = True
        with self._changed:
            self._trainer_waits = True
            seen = self._arrived
            self._admit()
            while self._arrived == seen and self._error is None and not self._has_step():
                if self.policy.worker.failure is not None:
                    self._revive()
                self._changed.wait(LOOK_SECONDS)
                self._check_wait(began)
            self._waited += time.monotonic() - began
            error, self._error = self._error, None
        if error is not None:
            raise error

    def taken(self, groups: Sequence[int]) -> None:
        """See `GroupSource.taken`."""
        with self._changed:
            for group in groups:
                del self._whole[group]
            self._counts["trained"] += len(groups)
            self._trainer_waits = self._told = False
            self._admit()

    # What a training asks

    def update_policy_weights_(self, policy_or_weights: WeightSource) -> None:
        """Push weights; the version rises once they have arrived, and groups begin that the new version lets begin.

        Groups that would be too old are cancelled before, and begun again after it. A process that dies meanwhile
        is replaced, and what it had is begun again.
        """
        with self._changed:
            self._pushing = True
            self._cancel_old(self.policy_version + 1)
        try:
            while True:
                try:
                    self.weight_updater.push(policy_or_weights)
                    break
                except PolicyError:
                    if self.policy.worker.failure is None:
                        raise
                    self._restart()
        finally:
            self._pushing = False
        with self._changed:
            self._trainer_waits = True
            self._admit()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block in which no group arrives or begins: what `state_dict` and the buffer say are of one moment."""
        with self._changed:
            yield

    def state_dict(self) -> dict[str, Any]:
        """The data cursor, the tickets that were issued and not trained on, and the counts, as JSON-compatible."""
        with self._changed:
            return {
                "env": self.env.state_dict(),
                "issued": [asdict(each) for each in (*self._running.values(), *self._whole.values())],
                "again": [asdict(each) for each in self._again],
                "counts": dict(self._counts),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: groups that the buffer lacks are played again. The buffer comes first."""
        self.env.load_state_dict(state["env"])
        self._counts = Counter(state["counts"])
        whole = set(self.buffer.group_numbers)
        for each in map(_issued, state["issued"]):
            if each.ticket.group in whole:
                self._whole[each.ticket.group] = each
            else:
                self._again.append(each)
                self._counts["issued"] -= 1  # it is counted when it is issued once more
        self._again.extend(map(_issued, state["again"]))

    def show(self, on_phase: Callable[[str, str], None], on_sampled: Callable[[int, int, int], None]) -> None:
        """Tell `on_phase` what is waited for, and `on_sampled` how far it is, as `Player` does."""
        self.on_phase, self.on_sampled = on_phase, on_sampled

    def begin_step(self) -> None:
        """A step begins: what has passed since the last one, evaluating and saving, is no idle time of it."""
        with self._changed:
            self._began = (time.monotonic(), self._totals.get("playing", 0.0))

    def take_seconds(self) -> dict[str, float]:
        """Seconds of sampling and scoring since the last call; of the step, with nothing to play, and waiting here."""
        with self._changed:
            totals, before = self._totals, self._taken_totals
            rollout, reward = (totals.get(name, 0.0) - before.get(name, 0.0) for name in ("rollout", "reward"))
            began, played = self._began
            idle = max(0.0, time.monotonic() - began - max(0.0, totals.get("playing", 0.0) - played))
            waited = self._waited
            self._taken_totals, self._waited = dict(totals), 0.0
            return {"time/rollout": rollout, "time/reward": reward, "time/idle": idle, "time/wait": waited}

    def counts(self) -> dict[str, float]:
        """The counts since the run began, under the names of metrics.jsonl."""
        with self._changed:
            names = ("issued", "trained", "turned_down", "cancelled", "failed")
            counts = {f"groups/{name}": float(self._counts[name]) for name in names}
            waiting = len(self._running) + len(self._whole)
            return counts | {"groups/waiting": float(waiting), "collector/restarts": float(self._counts["restarts"])}

    # Admission

    def _admit(self) -> None:
        """Issue as many tickets as may be under way now."""
        if self._pushing or self.policy.worker.failure is not None:
            return
        room = (self.depth + self._trainer_waits) * self.prompts_per_step - len(self._running) - len(self._whole)
        tickets: list[Ticket] = []
        while room > len(tickets):
            if self._again:
                each = self._again.popleft()
            else:
                [ticket] = self.env.tickets(self.env.repeats)
                each = Issued(ticket, 0)
            each.begun_under = self.policy_version
            self._running[each.ticket.group] = each
            tickets.append(each.ticket)
        self._counts["issued"] += len(tickets)
        if tickets:
            self.policy.worker.submit("play", tickets)

    def _has_step(self) -> bool:
        """Whether the buffer holds what a step takes: the last of it may have come just before this was asked."""
        return len(self._whole) >= self.prompts_per_step and not self.owes

    def _too_old(self, each: Issued, version: int) -> bool:
        return each.begun_under < version - self.max_policy_lag

    def _cancel_old(self, version: int) -> None:
        """Take back the groups that are too old once `version` is pushed."""
        old = [group for group, each in self._running.items() if self._too_old(each, version)]
        late = [group for group, each in self._whole.items() if self._too_old(each, version)]
        for group in late:
            self.buffer.remove(group)
        for group in (*old, *late):
            each = self._running.pop(group, None) or self._whole.pop(group)
            each.again = True
            self._again.append(each)
        self._counts["cancelled"] += len(old) + len(late)
        if old and self.policy.worker.failure is None:
            self.policy.worker.submit("cancel", old)

    # What the process that samples says, in the thread that listens to it

    def _hear(self, kind: str, content: Any) -> None:
        if kind == "progress":
            ended, begun, self._totals = content
            self.policy.tokens_sampled = int(self._totals["tokens"])
            if self._trainer_waits and self.on_sampled is not None:
                self.on_sampled(ended, begun, self.policy.tokens_sampled)
            return
        with self._changed:
            try:
                self._take_back(kind, *content)
            except Exception as error:  # noqa: BLE001  raised again in the training's thread
                self._error = self._error or error
            self._arrived += 1
            self._changed.notify_all()

    def _take_back(self, kind: str, group: int, came: Any, totals: dict[str, float] | None = None) -> None:
        """A ticket has come back: with its conversations, or with an error."""
        if group not in self._running:
            return  # it was cancelled when it was on its way
        if kind == "failed" and isinstance(came, PolicyError):  # of the engine: all it had is played by another
            self.policy.worker.kill(f"was stopped, since {came}")
            return
        if kind == "failed":
            self._counts["failed"] += 1
            del self._running[group]
            self._error = self._error or came
            return
        conversations: list[Conversation] = came
        self._totals = totals or self._totals
        self.buffer.extend(self.env.build_batch(conversations))
        each = self._running.pop(group)
        if group in self.buffer.group_numbers:
            self._whole[group] = each
        else:
            self._counts["turned_down"] += 1
        self._admit()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _revive(self) -> None:
        """Replace the process that has died by one with the present weights, which plays what the other had."""
        with self._changed:
            self._restart()
            if self.policy_version:
                self.weight_updater.send(self.policy, self.model, self.policy_version)
            self._admit()

    def _restart(self) -> None:
        """Start another process. Raises the failure of the one before, after `max_restarts`."""
        failure = self.policy.worker.failure
        with self._changed:
            self._again.extendleft(reversed(self._running.values()))
            self._counts["issued"] -= len(self._running)
            self._running.clear()
            self._totals, self._taken_totals = {}, {}
        while failure is not None:
            if self._counts["restarts"] >= self.max_restarts:
                raise failure
            self._counts["restarts"] += 1
            log.warning("%s; starting another one (%d of %d)", failure, self._counts["restarts"], self.max_restarts)
            failure = self.policy.restart()

    def _check_wait(self, began: float) -> None:
        if time.monotonic() - began > self.wait_seconds:
            groups = ", ".join(map(str, list(self._running)[:8]))
            raise PolicyError(
                f"waited {self.wait_seconds:.0f} s for one of {len(self._running)} groups to be sampled (draws "
                f"{groups}): the policy, a tool or a reward may hang; collector.wait_seconds sets the limit"
            )


def _issued(plain: Mapping[str, Any]) -> Issued:
    return Issued(Ticket(**plain["ticket"]), plain["begun_under"], plain["again"])
