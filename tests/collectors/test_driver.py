"""GroupDriver: what it draws, lets begin, cancels and counts, with a player that does nothing by itself."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.collectors.driver import GroupDriver
from rlpost.data.conversation import Completion, Conversation, Ticket
from rlpost.data.replay_buffer import GroupBuffer
from rlpost.envs import DatasetChatEnv
from rlpost.errors import DataError, PolicyError
from rlpost.objectives.advantage import has_spread
from rlpost.policies import Request
from rlpost.policies.remote import Players, RemotePolicy
from rlpost.settings import SamplingSettings
from tests.collectors.here import wait_until
from tests.collectors.talk import tokenizer
from tests.says import Says

MODEL = torch.nn.Linear(2, 1)
STEPS = 60  # of a training whose groups come in any order


class Worker:
    """Stands for a process: it holds the tickets it was given until a test ends them."""

    def __init__(self, owner: "Remote") -> None:
        self.owner = owner
        self.name = "the process"
        self.failure: PolicyError | None = None
        self.tickets: dict[int, Ticket] = {}
        self.begun_under: dict[int, int] = {}  # version of the weights, by group
        self.pushed: list[int] = []  # versions
        self.rested = 0
        self.on_event: Any = None
        self.on_death: Callable[[], None] = lambda: None

    def start(self, seconds: float) -> None:
        self.call("start")

    def submit(self, method: str, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        if method in self.owner.dies_at:
            self.owner.dies_at.remove(method)
            self.kill("died")
            done.set_exception(self.failure)
            return done
        if method == "play":
            for ticket in arguments[0]:
                assert ticket.group not in self.tickets
                self.begun_under[ticket.group] = self.owner.version  # type: ignore[assignment]
                self.tickets[ticket.group] = ticket
        elif method == "cancel":
            for group in arguments[0]:
                del self.tickets[group]
        elif method == "rest":
            self.rested += 1
        elif method == "push":
            self.pushed.append(arguments[1])
            for group in list(self.tickets) if named["wait"] else ():
                self.owner.end(group)
        done.set_result(None)
        return done

    def call(self, method: str, *arguments: Any, seconds: float | None = None, **named: Any) -> Any:
        return self.submit(method, *arguments, **named).result(0)

    def bring(self, folder: Path) -> Path:
        return folder

    def release_copy(self, folder: Path) -> None: ...

    def kill(self, why: str) -> None:
        self.failure = PolicyError(f"the process {why}")
        self.on_death()

    def close(self) -> None: ...


class Remote(RemotePolicy):
    """A `RemotePolicy` whose players are `Worker`s; `end` lets one of their groups come back."""

    def __init__(self, count: int = 1) -> None:
        self.workers: list[Worker] = []
        self.dies_at: list[str] = []  # methods: the next process that is asked for one of them dies
        super().__init__(Players(self.made, count), tokenizer(), sampling=SamplingSettings())
        self.rewards: Callable[[int], list[float]] = lambda group: [1.0, 0.0]

    def made(self, seat: int) -> Any:
        self.workers.append(Worker(self))
        return self.workers[-1]

    @property
    def worker(self) -> Worker:
        return self.workers[-1]

    def holder(self, group: int) -> Worker:
        [worker] = [worker for worker in self.workers if worker.failure is None and group in worker.tickets]
        return worker

    def end(self, group: int) -> None:
        worker = self.holder(group)
        ticket = worker.tickets.pop(group)
        conversations = []
        for sample, reward in zip(ticket.samples, self.rewards(group), strict=True):
            c = Conversation(ticket.task, [{"role": "user", "content": "q"}], group, sample, prompt_ids=[1])
            c.add_completion(Completion([2, 3], [0.0, 0.0], "a", "stop", worker.begun_under[group]))
            c.reward, c.terminated = reward, True
            conversations.append(c)
        totals = {"rollout": 1.0, "reward": 0.5, "playing": 1.0, "tokens": 4.0}
        worker.on_event("groups", ([(group, conversations)], totals))


def driven(
    depth: int = 1, lag: int = 1, *, per_step: int = 2, accept: Any = None, players: int = 1, **options: Any
) -> GroupDriver:
    rows = [{"question": f"q{i}"} for i in range(12)]
    env = DatasetChatEnv(rows, shuffle=False, num_envs=per_step, repeats=2, group_repeats=True)
    buffer = GroupBuffer(2, accept=accept, oldest_first=True, draw_limit=10_000)
    policy = Remote(players)
    options = {"wait_seconds": 60.0, "prompts_per_step": per_step, "depth": depth, "max_policy_lag": lag, **options}
    driver = GroupDriver(env, policy, buffer, model=MODEL, **options)
    policy.start()
    until_ready(driver, players)
    return driver


def until_ready(driver: GroupDriver, players: int = 1) -> None:
    wait_until(lambda: len(driver.policy.players.ready) == players)


def remote(driver: GroupDriver) -> Remote:
    assert isinstance(driver.policy, Remote)
    return driver.policy


def under_way(driver: GroupDriver) -> list[int]:
    return sorted(group for worker in remote(driver).workers if worker.failure is None for group in worker.tickets)


def begin(driver: GroupDriver) -> None:
    """Let as many groups begin as may while the trainer waits."""
    driver.update_policy_weights_(MODEL)


@contextmanager
def playing(driver: GroupDriver, play: Callable[[list[int]], bool]) -> Iterator[None]:
    """A block beside which a thread lets groups come back: `play` gets those under way, and returns whether it goes on.

    What it does happens at one moment of the driver.
    """
    over = threading.Event()

    def run() -> None:
        goes_on = True
        while goes_on and not over.wait(0.0005):
            with driver.pause():
                goes_on = play(under_way(driver))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def taken(driver: GroupDriver, *groups: int, count: int = 2) -> list[int]:
    """The groups of one step, while `groups` come back one after the other, each once it is under way."""
    left = list(groups)

    def play(there: list[int]) -> bool:
        while left and left[0] in there:
            remote(driver).end(left.pop(0))
        return bool(left)

    with playing(driver, play):
        driver.fill(count)
        return driver.buffer.take(count)["group_id"].tolist()[::2]


def balance(driver: GroupDriver) -> int:
    counts = driver.counts()
    ended = ("trained", "turned_down", "cancelled", "failed", "waiting")
    return int(counts["groups/issued"] - sum(counts[f"groups/{name}"] for name in ended))


def test_a_step_more_begins_while_the_trainer_waits() -> None:
    driver = driven(depth=1)
    assert taken(driver, 0, 1) == [0, 1]
    assert under_way(driver) == [2, 3]  # one step ahead
    driver.update_policy_weights_(MODEL)
    assert under_way(driver) == [4, 5]  # those of before were waited for
    assert driver.buffer.group_numbers == [2, 3]
    assert taken(driver) == [2, 3]
    assert under_way(driver) == [4, 5]  # 4 and 5 are this step's one ahead: nothing more may begin
    assert driver.counts() == {
        "groups/issued": 6.0, "groups/trained": 4.0, "groups/turned_down": 0.0, "groups/cancelled": 0.0,
        "groups/failed": 0.0, "groups/waiting": 2.0, "collector/restarts": 0.0, "collector/players": 1.0,
    }  # fmt: skip


def test_without_depth_nothing_begins_before_the_weights_are_pushed() -> None:
    driver = driven(depth=0, lag=0)
    assert taken(driver, 1, 0) == [1, 0]
    assert under_way(driver) == []
    driver.update_policy_weights_(MODEL)
    assert under_way(driver) == [2, 3]
    assert taken(driver, 2, 3) == [2, 3]
    assert taken(driver, 4, 5) == [4, 5]  # nor does a step without a push keep the next from beginning


def test_a_group_that_is_turned_down_gives_its_place_back_at_once() -> None:
    driver = driven(depth=1, accept=has_spread)
    remote(driver).rewards = lambda group: [1.0, 1.0] if group < 2 else [1.0, 0.0]
    assert taken(driver, 0, 2, 1, 3) == [2, 3]
    assert under_way(driver) == [4, 5]
    assert (driver.counts()["groups/turned_down"], balance(driver)) == (2.0, 0)


def test_a_straggler_that_would_be_too_old_is_begun_again() -> None:
    driver = driven(depth=1, lag=1, wait_for_groups=False)
    assert taken(driver, 1, 2) == [1, 2]
    assert under_way(driver) == [0, 3]
    driver.update_policy_weights_(MODEL)  # version 1: both may still be trained on
    assert under_way(driver) == [0, 3, 4, 5]
    assert taken(driver, 4, 5) == [4, 5]
    driver.update_policy_weights_(MODEL)  # version 2
    assert driver.counts()["groups/cancelled"] == 2.0
    assert under_way(driver) == [0, 3, 6, 7]  # the same draws, under the new weights
    assert {each["begun_under"] for each in driver.state_dict()["issued"]} == {2}
    assert balance(driver) == 0
    assert not driver.has_urgent_group
    driver.update_policy_weights_(MODEL)  # version 3: the last chance of 0 and 3
    assert driver.has_urgent_group
    assert taken(driver, 6, 7, 3, 0) == [6, 7]  # which are there by then
    assert driver.buffer.group_numbers == [3, 0]


def test_a_whole_group_that_was_not_taken_in_time_is_begun_again_too() -> None:
    driver = driven(depth=2, lag=1, wait_for_groups=False)
    assert taken(driver, 0, 1) == [0, 1]
    for group in (2, 3, 4):
        remote(driver).end(group)
    driver.update_policy_weights_(MODEL)
    assert taken(driver) == [2, 3]
    driver.update_policy_weights_(MODEL)  # 4, of version 0, lies in the buffer
    assert 4 not in driver.buffer.group_numbers
    assert 4 in under_way(driver)
    assert balance(driver) == 0


def test_age_is_never_exceeded_and_the_counts_balance() -> None:
    for lag, wait in ((0, True), (1, True), (4, False)):
        rng = random.Random(lag)
        driver = driven(depth=lag, lag=lag, per_step=3, accept=has_spread, wait_for_groups=wait)
        remote(driver).rewards = lambda group, rng=rng: rng.choice([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
        trained: list[int] = []

        def play(there: list[int], driver: GroupDriver = driver, rng: random.Random = rng) -> bool:
            if there:  # the first begun is often the last to end
                remote(driver).end(rng.choice(there[1:] or there) if rng.random() < 0.8 else min(there))
            return True

        for _ in range(STEPS):
            with playing(driver, play):
                driver.fill(3)
                batch = driver.buffer.take(3)
            trained += batch["group_id"].tolist()[::2]
            counts = driver.counts()
            assert counts["groups/waiting"] <= 3 * lag  # no more is admitted while the trainer trains
            driver.update_policy_weights_(MODEL)
            assert driver.counts()["groups/waiting"] <= 3 * (lag + 1)
            assert balance(driver) == 0
        assert driver.buffer.num_dropped_by_age == 0  # no group ever has to be dropped
        assert len(trained) == len(set(trained)) == 3 * STEPS
        assert driver.counts()["groups/turned_down"] > STEPS / 2


def test_a_state_holds_every_draw_once_and_goes_on() -> None:
    driver = driven(depth=1, wait_for_groups=False)
    assert taken(driver, 1, 2) == [1, 2]
    driver.update_policy_weights_(MODEL)
    remote(driver).end(3)
    state = json.loads(json.dumps({"buffer": driver.buffer.state_dict(), "collector": driver.state_dict()}))
    resumed = driven(depth=1)
    resumed.buffer.load_state_dict(state["buffer"])
    resumed.load_state_dict(state["collector"])
    resumed.weight_updater.restore_version(1)
    assert balance(resumed) == 0
    assert taken(resumed, 0) == [3, 0]  # 3 was whole, 0, 4 and 5 were under way
    assert sorted({*under_way(resumed)}) == [4, 5]
    assert (balance(resumed), resumed.counts()["groups/trained"]) == (0, 4.0)


def test_a_process_that_dies_is_replaced_and_plays_what_the_other_had() -> None:
    driver = driven(depth=1)
    assert taken(driver, 0, 1) == [0, 1]
    driver.update_policy_weights_(MODEL)
    assert under_way(driver) == [4, 5]
    remote(driver).worker.kill("was ended by SIGKILL")
    assert taken(driver) == [2, 3]  # nothing to wait for
    until_ready(driver)
    assert taken(driver, 4, 6) == [4, 6]
    driver.update_policy_weights_(MODEL)
    assert 5 in under_way(driver)  # not beside 4: if one of them ends processes, it is known which
    assert len(remote(driver).workers) == 2
    assert remote(driver).worker.pushed[0] == 1  # the version that the other had, before anything is played
    assert (driver.counts()["collector/restarts"], balance(driver)) == (1.0, 0)


def test_the_successor_of_one_that_dies_at_a_push_has_its_weights() -> None:
    driver = driven(depth=1)
    assert taken(driver, 0, 1) == [0, 1]
    remote(driver).dies_at = ["push"]
    driver.update_policy_weights_(MODEL)
    until_ready(driver)
    assert (driver.policy_version, under_way(driver), balance(driver)) == (1, [], 0)
    assert taken(driver, 2, 4) == [2, 4]
    assert remote(driver).worker.pushed == [1]


def test_a_process_that_dies_while_it_starts_is_replaced_too() -> None:
    driver = driven()
    remote(driver).dies_at = ["start", "start"]
    remote(driver).worker.kill("was ended by SIGKILL")
    until_ready(driver)
    assert taken(driver, 0, 1) == [0, 1]
    assert (driver.counts()["collector/restarts"], balance(driver)) == (3.0, 0)


def test_a_process_that_dies_too_often_ends_the_run_with_its_failure() -> None:
    driver = driven(max_restarts=1)
    remote(driver).worker.kill("was ended by SIGKILL")
    until_ready(driver)
    assert taken(driver, 0, 1) == [0, 1]
    remote(driver).worker.kill("was ended by SIGSEGV")
    with pytest.raises(PolicyError, match="SIGSEGV"):
        driver.fill(2)


def test_an_engine_that_fails_takes_its_process_along_and_is_replaced() -> None:
    driver = driven()
    first = remote(driver).worker
    begin(driver)
    first.on_event("failed", (0, PolicyError("vLLM failed while sampling: it is dead")))
    assert "vLLM failed" in str(first.failure)
    until_ready(driver)
    assert taken(driver, 0, 4) == [0, 4]  # not beside 1, which was under way too
    assert driver.counts()["groups/failed"] == 0.0


# Several players


def test_players_rest_where_they_play_in_turn_with_training() -> None:
    policy = remote(driven(players=2))
    policy.rest()
    assert [worker.rested for worker in policy.workers] == [0, 0]  # training goes on beside them
    policy.in_turn = True
    policy.rest()
    assert [worker.rested for worker in policy.workers] == [1, 1]
    policy.dies_at = ["rest"]
    policy.rest()
    assert [worker.rested for worker in policy.workers[:2]] == [1, 2]


def test_the_others_go_on_where_one_player_dies_for_good() -> None:
    driver = driven(players=2, max_restarts=0)
    begin(driver)
    remote(driver).workers[0].kill("was ended by SIGKILL")
    assert (under_way(driver), balance(driver)) == ([1, 3], 0)
    assert taken(driver, 1, 0) == [1, 0]  # at most one of those that the dead one had is begun at a time
    assert driver.counts()["collector/players"] == 1.0
    remote(driver).workers[1].kill("was ended by SIGKILL")
    with pytest.raises(PolicyError, match="SIGKILL"):
        driver.fill(2)


def test_groups_begin_at_the_player_that_has_fewest() -> None:
    driver = driven(players=2)
    begin(driver)
    assert taken(driver, 1, 3) == [1, 3]  # the second player's
    assert taken(driver, 0, 2) == [0, 2]
    assert {4, 5} <= remote(driver).workers[1].tickets.keys()


def test_a_ticket_that_ends_two_processes_is_named_and_left_out(caplog: pytest.LogCaptureFixture, says: Says) -> None:
    driver = driven()
    begin(driver)
    assert under_way(driver) == [0, 1, 2, 3]
    for beside in ([0, 4, 5, 6], [1, 7, 8, 9]):  # one at a time of those that were there when a process died
        remote(driver).worker.kill("was ended by SIGSEGV")
        until_ready(driver)
        begin(driver)
        assert under_way(driver) == beside
    [left_out] = [message for message in caplog.messages if "draw 0" in message]
    says("train", left_out)
    assert (driver.counts()["groups/failed"], balance(driver)) == (1.0, 0)
    assert taken(driver, 1, 7) == [1, 7]
    driver.update_policy_weights_(MODEL)
    assert 2 in under_way(driver)


def test_a_player_that_comes_later_gets_the_weights_and_plays() -> None:
    driver = driven(depth=1, players=2)
    second = driver.policy.players.seats[1]
    second.version = None  # it has not come yet
    assert taken(driver, 0, 1) == [0, 1]
    driver.update_policy_weights_(MODEL)
    assert remote(driver).workers[1].pushed == []
    second.version = 0
    assert taken(driver, 2, 3) == [2, 3]
    driver.update_policy_weights_(MODEL)
    assert (second.version, len(remote(driver).workers[1].tickets) > 0) == (2, True)


def test_an_evaluation_is_shared_and_goes_on_where_a_player_dies() -> None:
    driver = driven(players=2)
    requests = [Request([number], 1, 0) for number in range(5)]
    asked: list[list[int]] = []

    def generate(method: str, *arguments: Any, worker: Worker, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        asked.append([request.prompt_ids[0] for request in arguments[0]])
        if worker is remote(driver).workers[0]:
            worker.kill("was ended by SIGKILL")
            done.set_exception(worker.failure)
        else:
            done.set_result([Completion(request.prompt_ids, [0.0], "", "stop", 0) for request in arguments[0]])
        return done

    for worker in remote(driver).workers:
        worker.submit = partial(generate, worker=worker)  # type: ignore[method-assign]
    driver.max_restarts = 0
    completions = driver.policy.generate(requests, SamplingSettings())
    assert [completion.token_ids for completion in completions] == [[0], [1], [2], [3], [4]]
    assert asked == [[0, 2, 4], [1, 3], [0, 2, 4]]


def test_any_other_error_of_a_group_is_raised_where_it_is_waited_for() -> None:
    driver = driven()
    begin(driver)
    remote(driver).worker.on_event("failed", (1, DataError("row 2 is too long: leave it out")))
    with pytest.raises(DataError, match="row 2"):
        driver.fill(2)
    assert (driver.counts()["groups/failed"], balance(driver)) == (1.0, 0)


def test_a_group_that_does_not_come_is_named(says: Says) -> None:
    driver = driven(wait_seconds=0.0)
    with says.refused("train", PolicyError, "0, 1, 2, 3"):
        driver.fill(2)
