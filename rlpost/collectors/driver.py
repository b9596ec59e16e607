"""Sampling in other processes: GroupDriver draws prompts, has players play them and fills the replay buffer.

Each player is a `GroupPlayer` in a process of its own. `rlpost.policies.remote` starts and replaces them, and is their
policy as the trainer sees it; `rlpost.weight_sync.folder` pushes weights to them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rlpost.collectors.player import PlayerTimes
from rlpost.data.conversation import Conversation, Ticket
from rlpost.data.replay_buffer import GroupBuffer
from rlpost.envs.chat import DatasetChatEnv
from rlpost.errors import PolicyError
from rlpost.policies.remote import LOOK_SECONDS, RemotePolicy, Seat
from rlpost.weight_sync.base import WeightSource
from rlpost.weight_sync.folder import FolderUpdater

log = logging.getLogger("rlpost")


class GroupDriver:
    """Owns draws, versions and the buffer, and has the players of `policy` play; they keep no state.

    A training takes `prompts_per_step` groups a step. While it works on them, at most `depth` steps' groups are
    in flight or wait in `buffer`; while it waits for the next ones, one step's more. So a group begins only if it
    can still be trained on. A group that began more than `max_policy_lag` pushes ago is cancelled at the push
    and begun again under the new weights. It is not cancelled twice: the step that is its last chance waits for it.

    `counts` adds up at any moment: issued = trained + dropped + cancelled + failed + waiting, where a group
    that is begun again counts as issued again and `waiting` are those in flight or in the buffer.
    """

    def __init__(
        self,
        env: DatasetChatEnv,
        policy: RemotePolicy,
        buffer: GroupBuffer,
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
        self.model = model  # its weights are pushed to a process that replaces one that died
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
        self._whole: dict[int, Issued] = {}  # in the buffer, or taken since `_settle` was called
        self._promised = 0  # groups in the buffer that the training takes next: counted as trained already
        self._again: deque[Issued] = deque()  # to be issued before anything is drawn
        self._trainer_waits = False
        self._sampled_before = 0  # tokens, when the training began to wait
        self._pushing = False
        self._arrived = 0
        self._progress: dict[int, tuple[int, int]] = {}  # of each seat: conversations that have ended, of those begun
        self._error: BaseException | None = None
        self._times = PlayerTimes(len(policy.players.seats))
        self._waited = 0.0
        policy.on_event = self._hear
        policy.sync_players = self._sync_players
        policy.players.on_death = self._lost
        policy.players.on_ready = self._wake
        policy.players.may_restart = self._may_restart

    # Called by the training

    @property
    def policy_version(self) -> int:
        """The version that the players sample with."""
        version = self.policy.version
        assert isinstance(version, int)
        return version

    @property
    def has_urgent_group(self) -> bool:
        """Whether a group in flight has to be in the next batch: cancelled once, and too old after the next push."""
        with self._changed:
            return any(each.again and self._too_old(each, self.policy_version + 1) for each in self._running.values())

    def fill(self, num_groups: int) -> dict[str, float]:
        """Have the players play until the buffer has `num_groups` groups, every urgent one among them.

        Those count as trained from then on, and others may begin in their places: take them next. Returns the counts
        of the buffer and of this driver. Raises the error of a group that failed, and PolicyError if none comes for
        `wait_seconds`, if the last player has died after `max_restarts`, or if too few become whole (see
        `Groups.rounds`).
        """

        def is_filled() -> bool:
            return len(self.buffer) >= num_groups and not self.has_urgent_group

        with self._changed:
            self._settle()
            self._promised = 0
        if not is_filled():
            self.on_phase("sampling", f"{num_groups} groups")
            self._sampled_before = self.policy.tokens_sampled
        for _ in self.buffer.rounds(num_groups):
            self._await_group(is_filled)
        while not is_filled():
            self._await_group(is_filled)
        with self._changed:
            self._times.begin()
            self._promised, self._trainer_waits = num_groups, False
            self._admit()
            return self.buffer.take_counts() | self.counts()

    def _await_group(self, is_filled: Callable[[], bool]) -> None:
        """Begin as many groups as may begin, and return when one more has arrived, or the buffer is filled."""
        began = time.monotonic()
        with self._changed:
            self._times.begin()
            self._trainer_waits, seen = True, self._arrived

        def has_come() -> bool:
            return self._arrived > seen or self._error is not None or is_filled()

        while not has_come():
            self._sync_players()
            with self._changed:
                self._admit()
                if not has_come():
                    self._changed.wait(LOOK_SECONDS)
                self._check_wait(began)
        with self._changed:
            self._waited += time.monotonic() - began
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _settle(self) -> None:
        """Count the groups that have left the buffer as trained."""
        there = set(self.buffer.group_numbers)
        for group in [group for group in self._whole if group not in there]:
            del self._whole[group]
            self._counts["trained"] += 1
            self._promised = max(0, self._promised - 1)

    @property
    def _num_waiting(self) -> int:
        """How many groups are in flight or in the buffer, beyond those of the next step."""
        return len(self._running) + len(self._whole) - self._promised

    def update_policy_weights_(self, policy_or_weights: WeightSource) -> None:
        """Push weights; the version rises once they have arrived, and more groups begin.

        Groups that would be too old are cancelled before the push, and begun again after it. A player that dies
        meanwhile is replaced by one that gets these weights before it plays.
        """
        with self._changed:
            self._settle()
            self._pushing = True
            self._cancel_old(self.policy_version + 1)
        try:
            self.weight_updater.push(policy_or_weights)
        finally:
            self._pushing = False
        with self._changed:
            self._trainer_waits = True
            self._admit()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block in which no group arrives or begins, so that `state_dict` and the buffer's belong to one moment."""
        with self._changed:
            yield

    def state_dict(self) -> dict[str, Any]:
        """The data cursor, the tickets that were issued and not trained on, and the counts; JSON-compatible."""
        with self._changed:
            self._settle()
            return {
                "env": self.env.state_dict(),
                "issued": [asdict(each) for each in (*self._running.values(), *self._whole.values())],
                "again": [asdict(each) for each in self._again],
                "counts": dict(self._counts),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; groups that the buffer lacks are played again, so load the buffer first."""
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
        """Report phases to `on_phase` and progress to `on_sampled`, as `Player` does."""
        self.on_phase, self.on_sampled = on_phase, on_sampled

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last call that a player sampled, scored and was idle, and that the training waited."""
        with self._changed:
            waited, self._waited = self._waited, 0.0
            return self._times.take() | {"time/wait": waited}

    def counts(self) -> dict[str, float]:
        """The counts since the run began, under the names of metrics.jsonl."""
        with self._changed:
            self._settle()
            names = ("issued", "trained", "turned_down", "cancelled", "failed")
            counts = {f"groups/{name}": float(self._counts[name]) for name in names}
            counts["groups/trained"] += self._promised
            return counts | {
                "groups/waiting": float(self._num_waiting),
                "collector/restarts": float(self._counts["restarts"]),
                "collector/players": float(len(self.policy.current)),
            }

    # Admission

    def _admit(self) -> None:
        """Issue as many tickets as may be in flight now, each to the player that has fewest."""
        seats = {seat.number: seat for seat in self.policy.current}
        if self._pushing or not seats:
            return
        self._settle()
        room = (self.depth + self._trainer_waits) * self.prompts_per_step - self._num_waiting
        load = Counter(dict.fromkeys(seats, 0))
        load.update(each.seat for each in self._running.values() if each.seat in seats)
        under_suspicion = {each.seat for each in self._running.values() if each.deaths}
        begun: dict[int, list[Ticket]] = {}
        for _ in range(room):
            each = self._next(may_be_suspect=bool(seats.keys() - under_suspicion))
            able = [number for number in seats if not each.deaths or number not in under_suspicion]
            each.seat, each.begun_under = min(able, key=lambda number: load[number]), self.policy_version
            if each.deaths:
                under_suspicion.add(each.seat)
            load[each.seat] += 1
            self._running[each.ticket.group] = each
            begun.setdefault(each.seat, []).append(each.ticket)
            self._counts["issued"] += 1
        for number, tickets in begun.items():
            self.policy.players.seats[number].process.submit("play", tickets)

    def _next(self, *, may_be_suspect: bool) -> Issued:
        """The ticket to begin next: one that was begun before, or else a draw."""
        for place, each in enumerate(self._again):
            if may_be_suspect or not each.deaths:
                del self._again[place]
                return each
        [ticket] = self.env.tickets(self.env.repeats)
        return Issued(ticket, 0)

    def _too_old(self, each: Issued, version: int) -> bool:
        return each.begun_under < version - self.max_policy_lag

    def _cancel_old(self, version: int) -> None:
        """Cancel the groups that are too old once `version` is pushed."""
        old = [group for group, each in self._running.items() if self._too_old(each, version)]
        late = [group for group, each in self._whole.items() if self._too_old(each, version)]
        for group in late:
            self.buffer.remove(group)
        theirs: dict[int, list[int]] = {}
        for group in old:
            theirs.setdefault(self._running[group].seat, []).append(group)
        for group in (*old, *late):
            each = self._running.pop(group, None) or self._whole.pop(group)
            each.again = True
            self._again.append(each)
        self._counts["cancelled"] += len(old) + len(late)
        for seat, groups in theirs.items():
            self.policy.players.seats[seat].process.submit("cancel", groups)

    # Events of players, in the threads that listen to them

    def _hear(self, seat: Seat, kind: str, content: Any) -> None:
        if kind == "progress":
            ended, begun, totals = content
            with self._changed:
                self._times.record(seat.number, totals)
                self._progress[seat.number] = ended, begun
                progress = [sum(each) for each in zip(*self._progress.values(), strict=True)]
            self.policy.count_tokens(seat, int(totals["tokens"]))
            if self._trainer_waits and self.on_sampled is not None:
                self.on_sampled(progress[0], progress[1], max(0, self.policy.tokens_sampled - self._sampled_before))
            return
        with self._changed:
            try:
                if kind == "groups":
                    self._take_back(seat, *content)
                else:
                    self._failed(seat, *content)
            except Exception as error:  # noqa: BLE001  raised again in the training's thread
                self._error = self._error or error
            self._arrived += 1
            self._changed.notify_all()

    def _has(self, seat: Seat, group: int) -> bool:
        """Whether the player of `seat` still has `group`, which it may have sent just before it was cancelled."""
        return group in self._running and self._running[group].seat == seat.number

    def _take_back(self, seat: Seat, whole: list[tuple[int, list[Conversation]]], totals: dict[str, float]) -> None:
        """Groups have arrived with their conversations."""
        self._times.record(seat.number, totals)
        came = {group: conversations for group, conversations in whole if self._has(seat, group)}
        kept, dropped = self.buffer.extend([each for own in came.values() for each in own])
        for own in (*kept, *dropped):
            self.env.learn_difficulty(own)
        self._whole |= {own[0].group_id: self._running.pop(own[0].group_id) for own in kept}
        for own in dropped:
            del self._running[own[0].group_id]
        self._counts["turned_down"] += len(dropped)
        self._admit()

    def _failed(self, seat: Seat, group: int, error: Exception) -> None:
        """A group has ended with an error, which is raised in the training unless it is the engine's."""
        if not self._has(seat, group):
            return
        if isinstance(error, PolicyError):  # all that the engine had is played by another
            seat.process.kill(f"was stopped, since {error}")
            return
        self._counts["failed"] += 1
        del self._running[group]
        self._error = self._error or error

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # Players that die, and their successors

    def _lost(self, seat: Seat) -> None:
        """A player has died: begin its tickets again, except one that two players have died with."""
        with self._changed:
            had = [each for each in self._running.values() if each.seat == seat.number]
            self._times.forget(seat.number)
            self._progress.pop(seat.number, None)
            suspected = [each for each in had if each.deaths]
            for each in had:
                del self._running[each.ticket.group]
                each.deaths += 1
            for each in suspected:
                self._counts["failed"] += 1
                log.warning(
                    "draw %d (%s) is left out: two processes that sample died while they had it, the last one so: %s",
                    each.ticket.group,
                    each.ticket.where or str(dict(each.ticket.task))[:80],
                    seat.worker and seat.worker.failure,
                )
            again = [each for each in had if each not in suspected]
            self._again = deque(sorted([*again, *self._again], key=lambda each: each.ticket.group))
            self._counts["issued"] -= len(again)
            self._changed.notify_all()

    def _may_restart(self, failure: PolicyError) -> bool:
        """Whether to replace a player that died of `failure`."""
        with self._changed:
            if self._counts["restarts"] >= self.max_restarts:
                others = len(self.policy.players.ready)
                log.warning("%s; it is not replaced (max_restarts=%d), %d go on", failure, self.max_restarts, others)
                return False
            self._counts["restarts"] += 1
            log.warning("%s; starting another one (%d of %d)", failure, self._counts["restarts"], self.max_restarts)
            return True

    def _sync_players(self) -> None:
        """Push the present weights to players that lack them: in the training's thread, where nothing changes them.

        Raises the failure of the last player if there is none any more.
        """
        if (failure := self.policy.players.failure) is not None:
            raise failure
        behind = [seat for seat in self.policy.players.ready if seat.version != self.policy_version]
        if behind:
            self.weight_updater.send(self.policy, self.model, self.policy_version, behind)

    def _check_wait(self, began: float) -> None:
        if time.monotonic() - began > self.wait_seconds:
            groups = ", ".join(map(str, list(self._running)[:8]))
            raise PolicyError(
                f"waited {self.wait_seconds:.0f} s for one of {len(self._running)} groups to be sampled (groups "
                f"{groups}): the policy, a tool or a reward may hang; collector.wait_seconds sets the limit"
            )


@dataclass
class Issued:
    """A ticket that a player has, or had: the version it began under, and whether it was cancelled before.

    `deaths` counts the players that died while they had it; `seat` is that of the player that has it.
    """

    ticket: Ticket
    begun_under: int
    again: bool = False
    deaths: int = 0
    seat: int = -1


def _issued(plain: Mapping[str, Any]) -> Issued:
    return Issued(Ticket(**plain["ticket"]), plain["begun_under"], plain["again"], plain.get("deaths", 0))
