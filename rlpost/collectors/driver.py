"""Sampling in other processes: GroupDriver draws prompts, has players play them and fills the replay buffer.

Each player is a `GroupPlayer` in a process of its own, which `Players` starts and replaces when it dies.
`RemotePolicy` is the policy of them all as the trainer sees it, and `FolderUpdater` pushes weights to them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlpost.collectors.player import PlayerTimes
from rlpost.data.conversation import Completion, Conversation, PolicyVersionLabel, Ticket, next_version
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.envs.chat import DatasetChatEnv
from rlpost.errors import PolicyError
from rlpost.model.lora import save_adapter
from rlpost.model.weight_sums import EngineSums
from rlpost.model.weights import save_one_by_one
from rlpost.policies.base import Policy, Request
from rlpost.remote.exchange import exchange_folder
from rlpost.remote.process import START_SECONDS, NotReady, RemoteObject
from rlpost.settings import SamplingSettings
from rlpost.weight_sync.base import WeightSource, WeightUpdater, named_weights

log = logging.getLogger("rlpost")
PUSH_SECONDS = 900.0  # longest wait for a push to be loaded, and for the groups in flight if it waits for them
LOOK_SECONDS = 1.0
NewWorker = Callable[[int], RemoteObject]  # makes the process of a seat, which is not started yet


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
        self._whole: dict[int, Issued] = {}  # in the buffer
        self._again: deque[Issued] = deque()  # to be issued before anything is drawn
        self._trainer_waits = False
        self._announced = False  # `on_phase`, of the groups that are waited for
        self._sampled_before = 0  # tokens, at that moment
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
        buffer.source = self

    # Called by the buffer

    @property
    def policy_version(self) -> int:
        """See `GroupSource.policy_version`."""
        version = self.policy.version
        assert isinstance(version, int)
        return version

    @property
    def has_urgent_group(self) -> bool:
        """See `GroupSource.has_urgent_group`: one that was cancelled, and too old after the next push."""
        with self._changed:
            return any(each.again and self._too_old(each, self.policy_version + 1) for each in self._running.values())

    def collect(self) -> None:
        """Begin as many groups as may begin, and return when one more has arrived, or a step's groups are there.

        Raises the error of a group that failed, and PolicyError if none comes for `wait_seconds`, or if the last
        player has died after `max_restarts`.
        """
        began = time.monotonic()
        if not self._announced:
            self.on_phase("sampling", f"{self.prompts_per_step} groups")
            self._sampled_before = self.policy.tokens_sampled
        self._announced = True
        with self._changed:
            self._times.begin()
            self._trainer_waits, seen = True, self._arrived
        while not self._has_more_than(seen):
            self._sync_players()
            with self._changed:
                self._admit()
                if not self._has_more_than(seen):
                    self._changed.wait(LOOK_SECONDS)
                self._check_wait(began)
        with self._changed:
            self._waited += time.monotonic() - began
            error, self._error = self._error, None
        if error is not None:
            raise error

    def on_delivered(self, groups: Sequence[int]) -> None:
        """See `GroupSource.on_delivered`."""
        with self._changed:
            self._times.begin()
            for group in groups:
                del self._whole[group]
            self._counts["trained"] += len(groups)
            self._trainer_waits = self._announced = False
            self._admit()

    # Called by the training

    def update_policy_weights_(self, policy_or_weights: WeightSource) -> None:
        """Push weights; the version rises once they have arrived, and more groups begin.

        Groups that would be too old are cancelled before the push, and begun again after it. A player that dies
        meanwhile is replaced by one that gets these weights before it plays.
        """
        with self._changed:
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
            names = ("issued", "trained", "turned_down", "cancelled", "failed")
            counts = {f"groups/{name}": float(self._counts[name]) for name in names}
            waiting = len(self._running) + len(self._whole)
            counts |= {"groups/waiting": float(waiting), "collector/restarts": float(self._counts["restarts"])}
            return counts | {"collector/players": float(len(self.policy.current))}

    # Admission

    def _admit(self) -> None:
        """Issue as many tickets as may be in flight now, each to the player that has fewest."""
        seats = {seat.number: seat for seat in self.policy.current}
        if self._pushing or not seats:
            return
        room = (self.depth + self._trainer_waits) * self.prompts_per_step - len(self._running) - len(self._whole)
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
            self._worker(number).submit("play", tickets)

    def _next(self, *, may_be_suspect: bool) -> Issued:
        """The ticket to begin next: one that was begun before, or else a draw."""
        for place, each in enumerate(self._again):
            if may_be_suspect or not each.deaths:
                del self._again[place]
                return each
        [ticket] = self.env.tickets(self.env.repeats)
        return Issued(ticket, 0)

    def _worker(self, seat: int) -> RemoteObject:
        worker = self.policy.players.seats[seat].worker
        assert worker is not None
        return worker

    def _has_more_than(self, seen: int) -> bool:
        """Whether more than `seen` groups have arrived, or a step's groups are there already."""
        with self._changed:
            has_step = len(self._whole) >= self.prompts_per_step and not self.has_urgent_group
            return self._arrived > seen or self._error is not None or has_step

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
            self._worker(seat).submit("cancel", groups)

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
        if came:
            self.buffer.extend(self.env.build_batch([each for own in came.values() for each in own]))
        kept = set(self.buffer.group_numbers)
        for group in came:
            each = self._running.pop(group)
            if group in kept:
                self._whole[group] = each
            else:
                self._counts["turned_down"] += 1
        self._admit()

    def _failed(self, seat: Seat, group: int, error: Exception) -> None:
        """A group has ended with an error, which is raised in the training unless it is the engine's."""
        if not self._has(seat, group):
            return
        if isinstance(error, PolicyError):  # all that the engine had is played by another
            self._worker(seat.number).kill(f"was stopped, since {error}")
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
                f"waited {self.wait_seconds:.0f} s for one of {len(self._running)} groups to be sampled (draws "
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


# The policy of the players, as the trainer sees it


class RemotePolicy(Policy):
    """The policy of `players`, each a `GroupPlayer` in a process of its own.

    All of them answer `generate`, beside the groups they play. `on_event` is called with the seat of a player and its
    event; `sync_players`, called before sampling, pushes the present weights to players that lack them. `name` names
    the engine there; `in_turn` means that nothing is played between a batch and the next push. Weights are sent in
    `weights_dtype`, that of the engine; None: in their own.
    """

    shares_weights = False
    pushes = "collectors.driver:FolderUpdater"

    def __init__(
        self,
        players: Players,
        tokenizer: Any,
        *,
        sampling: SamplingSettings,
        seed: int = 0,
        max_model_len: int | None = None,
        name: str = "RemotePolicy",
        pushes_adapter: bool = False,
        in_turn: bool = False,
        weights_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(sampling=sampling, seed=seed)
        self.players = players
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.name = name
        self.pushes_adapter = pushes_adapter
        self.in_turn = in_turn
        self.weights_dtype = weights_dtype
        self.on_event: Callable[[Seat, str, Any], None] = lambda seat, kind, content: None
        self.sync_players: Callable[[], None] = lambda: None
        self._tokens: dict[int, int] = {}  # that each seat's player has sampled
        self._ended: dict[int, int] = {}  # completions of this call of `generate`
        self._started = False
        players.on_event = self._take

    def start(self) -> None:
        """See `Policy.start`; raises what building the environment or the policy there raises."""
        if not self._started:
            self._started = True
            self.players.start()

    def close(self) -> None:
        """See `Policy.close`."""
        self.players.close()

    def rest(self) -> None:
        """See `Policy.rest`, of every player, where they play in turn with training."""
        playing = [worker for seat in self.players.ready if (worker := seat.playing) is not None]
        for worker, resting in [(worker, worker.submit("rest")) for worker in playing] if self.in_turn else ():
            with _unless_dead(worker):
                resting.result()

    def weight_sums(self, names: Sequence[str] | None = None) -> dict[int, EngineSums]:
        """See `Policy.weight_sums`, by player; one that dies meanwhile is left out."""
        playing = [(seat, worker) for seat in self.current if (worker := seat.playing) is not None]
        by_player: dict[int, EngineSums] = {}
        for seat, worker, future in [(*each, each[1].submit("weight_sums", names)) for each in playing]:
            with _unless_dead(worker):
                by_player.update((seat.number, sums) for sums in future.result().values())
        return by_player

    @property
    def current(self) -> list[Seat]:
        """The seats whose players sample with the weights of `version`."""
        return [seat for seat in self.players.ready if seat.version == self.version]

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """See `Policy.generate`. The requests of a player that dies meanwhile go to the others and to its successor."""
        made: dict[int, Completion] = {}
        self._ended = {}
        while left := [place for place in range(len(requests)) if place not in made]:
            self.players.wait()
            self.sync_players()
            seats = self.current
            calls = []
            for number, seat in enumerate(seats):
                if (worker := seat.playing) is not None and (places := left[number :: len(seats)]):
                    future = worker.submit("generate", [requests[place] for place in places], sampling)
                    calls.append((worker, places, future))
            for worker, places, future in calls:
                with _unless_dead(worker):
                    made.update(zip(places, future.result(), strict=True))
        return [made[place] for place in range(len(requests))]

    def _take(self, seat: Seat, kind: str, content: Any) -> None:
        if kind == "ended":
            self._ended[seat.number], tokens = content
            self.count_tokens(seat, tokens)
            if self.on_ended is not None:
                self.on_ended(sum(self._ended.values()))
        else:
            self.on_event(seat, kind, content)

    def count_tokens(self, seat: Seat, tokens: int) -> None:
        """The player of `seat` has sampled this many since it began."""
        self._tokens[seat.number] = tokens
        self.tokens_sampled = sum(self._tokens.values())


class FolderUpdater(WeightUpdater):
    """Writes the weights into an exchange folder, from which the players load them.

    With `wait` they load once none of their groups is in flight; otherwise those go on with the new weights, each
    token with its version.
    """

    wait = True

    def restore_version(self, version: PolicyVersionLabel) -> None:
        """See `WeightUpdater.restore_version`."""
        super().restore_version(version)
        assert isinstance(self.policy, RemotePolicy)
        self.policy.players.set_version(version)

    def send(
        self, policy: RemotePolicy, source: WeightSource, version: PolicyVersionLabel, seats: list[Seat] | None = None
    ) -> None:
        """Push the weights of `source` as those of `version`, to `seats` or to all."""
        with exchange_folder() as folder:
            if adapter := policy.pushes_adapter:
                save_adapter(source, folder)
            else:
                save_one_by_one(named_weights(source).items(), folder, policy.weights_dtype)
            chosen = policy.players.ready if seats is None else seats
            policy.players.push(folder, version, seats=chosen, wait=self.wait, adapter=adapter)

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        assert isinstance(policy, RemotePolicy)
        self.send(policy, source, next_version(policy.version))


@contextmanager
def _unless_dead(worker: RemoteObject) -> Iterator[None]:
    """A block that waits for `worker`'s answer; it ends without one if the worker has died, since that is replaced."""
    try:
        yield
    except PolicyError:
        if worker.failure is None:
            raise


# The players


class Players:
    """`count` players that `new_worker` makes; each is started, and replaced when it dies, in a thread of its own.

    `on_event` is called with a seat and an event of its player, `on_death` with the seat of a player that died, and
    `on_ready` when one more can play. `may_restart` is called with the reason of each death and returns whether to
    start another process. All are called by threads of this class. A player begins with the weights it was built
    with, those of `first_version`; later weights are pushed to it before it plays.
    """

    def __init__(self, new_worker: NewWorker, count: int = 1) -> None:
        self.new_worker = new_worker
        self.seats = [Seat(number) for number in range(count)]
        self.first_version: PolicyVersionLabel = 0
        self.on_event: Callable[[Seat, str, Any], None] = lambda seat, kind, content: None
        self.on_death: Callable[[Seat], None] = lambda seat: None
        self.on_ready: Callable[[], None] = lambda: None
        self.may_restart: Callable[[PolicyError], bool] = lambda failure: False
        self._changed = threading.Condition()
        self._over: BaseException | None = None  # why nobody plays any more and none is started
        self._last: BaseException | None = None  # why the last player that ended, or could not begin, did so
        self.is_closed = False

    @property
    def ready(self) -> list[Seat]:
        """The seats whose players play."""
        return [seat for seat in self.seats if seat.is_ready]

    @property
    def failure(self) -> BaseException | None:
        """The error, if every player has failed for good; otherwise None."""
        with self._changed:
            gone = not any(seat.is_ready or seat.is_starting for seat in self.seats)
            return self._over or (self._last if gone else None)

    def start(self, seconds: float = START_SECONDS) -> None:
        """Start every player, and return when the first can play; the others follow.

        Raises what building it raised, or PolicyError.
        """
        for seat in self.seats:
            self._begin(seat, seconds)
        self.wait()

    def wait(self) -> list[Seat]:
        """Wait for a player that plays; returns the seats of all that do. Raises `failure` if there will be none."""
        with self._changed:
            while (failure := self.failure) is None:
                if ready := self.ready:
                    return ready
                if self.is_closed:
                    raise PolicyError("the processes that sample are closed")
                self._changed.wait(LOOK_SECONDS)
        raise failure

    def close(self) -> None:
        """Close every player and end its process, even one that is still starting."""
        with self._changed:
            self.is_closed = True
            workers = [seat.worker for seat in self.seats if seat.worker is not None]
            self._changed.notify_all()
        closing = [threading.Thread(target=worker.close) for worker in workers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def give_up(self, why: str) -> None:
        """End all players, which can no longer be reached, and replace none; whoever waits for them gets `why`."""
        self._over = PolicyError(f"every process that samples {why}")
        for seat in self.seats:
            if seat.worker is not None:
                seat.worker.lose(why)
        self.on_ready()
        with self._changed:
            self._changed.notify_all()

    def set_version(self, version: PolicyVersionLabel) -> None:
        """The players were built with the weights of `version`: a run is resumed."""
        self.first_version = version
        for seat in self.seats:
            if (worker := seat.playing) is not None:
                worker.call("set_version", version)
                seat.version = version

    def push(self, folder: Path, version: PolicyVersionLabel, *, seats: list[Seat], wait: bool, adapter: bool) -> None:
        """Load the weights in `folder` into the players in `seats`; returns when they all sample with them.

        A player that dies meanwhile is skipped: its successor gets them later. Raises PolicyError if one refuses.
        """
        if not seats:
            return

        def load(seat: Seat) -> None:
            if (worker := seat.playing) is None:
                return
            try:
                worker.call("push", worker.bring(folder), version, wait=wait, adapter=adapter, seconds=PUSH_SECONDS)
                seat.version = version
            except PolicyError:
                if worker.failure is None:
                    raise
            finally:
                worker.release_copy(folder)

        with ThreadPoolExecutor(len(seats), "rlpost-push") as threads:
            for loaded in [threads.submit(load, seat) for seat in seats]:
                loaded.result()

    @property
    def _is_final(self) -> bool:
        """Whether players that die are no longer replaced."""
        return self.is_closed or self._over is not None

    def _begin(self, seat: Seat, seconds: float) -> None:
        seat.is_starting = True
        threading.Thread(target=self._started, args=(seat, seconds), name="rlpost-start-player", daemon=True).start()

    def _started(self, seat: Seat, seconds: float) -> None:
        """Start the player of a seat; one that dies while it starts is replaced as long as `may_restart` allows."""
        while True:
            worker = self.new_worker(seat.number)
            worker.on_event = lambda kind, content: self.on_event(seat, kind, content)
            worker.on_death = lambda: self._died(seat, worker)  # noqa: B023  of this round
            with self._changed:
                seat.worker, seat.version = worker, None
            try:
                if not self.is_closed:
                    worker.start(seconds)
                    worker.call("set_version", self.first_version, seconds=seconds)
            except BaseException as error:  # noqa: BLE001  raised where it is waited for
                failure = worker.failure  # before it is closed, which is one too
                worker.close()
                died = failure is not None and error.args == failure.args and not isinstance(error, NotReady)
                if died and isinstance(error, PolicyError) and not self._is_final and self.may_restart(error):
                    continue
                self._settle(seat, None, error)
                return
            self._settle(seat, self.first_version, None)
            if worker.failure is not None:  # it died in between
                self._died(seat, worker)
            self.on_ready()
            return

    def _settle(self, seat: Seat, version: PolicyVersionLabel | None, error: BaseException | None) -> None:
        with self._changed:
            seat.version, seat.is_starting = version, False
            self._last = error or self._last
            closed = self.is_closed
            self._changed.notify_all()
        if closed and seat.worker is not None:
            seat.worker.close()

    def _died(self, seat: Seat, worker: RemoteObject) -> None:
        """A player that had begun to play has died: start another in its seat if `may_restart` allows."""
        with self._changed:
            if self.is_closed or seat.worker is not worker or seat.is_starting or seat.version is None:
                return  # `_started` sees to it
            seat.version = None
            self._last = failure = worker.failure or PolicyError(f"{worker.name} has ended")
        self.on_death(seat)
        if not self._is_final and self.may_restart(failure):
            self._begin(seat, START_SECONDS)
        with self._changed:
            self._changed.notify_all()


class Seat:
    """A place for a player: its process, and the version of its weights; None while it starts, or is gone."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: RemoteObject | None = None
        self.version: PolicyVersionLabel | None = None
        self.is_starting = False

    @property
    def is_ready(self) -> bool:
        """Whether its player plays."""
        return self.playing is not None

    @property
    def playing(self) -> RemoteObject | None:
        """The process, if it plays; one that has just died may be returned, one that still starts never is."""
        worker = self.worker  # before `version`, which is None as long as another one starts
        return worker if worker is not None and self.version is not None and worker.failure is None else None
