"""The policy of other processes, as the trainer sees it: it samples for an evaluation, and takes weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlpost.collectors.players import Players, Seat
from rlpost.collectors.process import RemoteObject
from rlpost.data.conversation import Completion, PolicyVersionLabel, next_version
from rlpost.errors import PolicyError
from rlpost.model.lora import save_adapter
from rlpost.model.shards import is_adapted
from rlpost.model.sums import EngineSums
from rlpost.policies.base import Policy, Request
from rlpost.policies.vllm_exchange import exchange_folder
from rlpost.policies.vllm_process import save_one_by_one
from rlpost.settings import SamplingSettings
from rlpost.weight_sync.base import WeightSource, WeightUpdater, named_weights


class RemotePolicy(Policy):
    """The policy of `players`, each a `GroupPlayer` in a process of its own.

    `generate` is answered beside what is played, by all of them. `on_event` is told the seat of a player and what it
    says; `bring_up`, called where there is one to sample with or none yet, brings the present weights to players that
    lack them. `name` says what samples there; `in_turn`, that nothing is played between a batch and the next push.
    """

    shares_weights = False
    pushes = "collectors.remote_policy:FolderUpdater"

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
    ) -> None:
        super().__init__(sampling=sampling, seed=seed)
        self.players = players
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.name = name
        self.pushes_adapter = pushes_adapter
        self.in_turn = in_turn
        self.on_event: Callable[[Seat, str, Any], None] = lambda seat, kind, content: None
        self.bring_up: Callable[[], None] = lambda: None
        self._tokens: dict[int, int] = {}  # that each seat's player has sampled
        self._ended: dict[int, int] = {}  # completions of this call of `generate`
        self._started = False
        players.on_event = self._take

    def start(self) -> None:
        """See `Policy.start`; raises what building the environment and the policy there raises."""
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
        """See `Policy.weight_sums`, of each player; a player that dies meanwhile tells none."""
        playing = [(seat, worker) for seat in self.current if (worker := seat.playing) is not None]
        told: dict[int, EngineSums] = {}
        for seat, worker, asked in [(*each, each[1].submit("weight_sums", names)) for each in playing]:
            with _unless_dead(worker):
                told.update((seat.number, sums) for sums in asked.result().values())
        return told

    @property
    def current(self) -> list[Seat]:
        """The seats whose players sample with the weights of `version`."""
        return [seat for seat in self.players.ready if seat.version == self.version]

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """See `Policy.generate`. What a player that dies meanwhile had is asked of the others, and of its successor."""
        made: dict[int, Completion] = {}
        self._ended = {}
        while left := [place for place in range(len(requests)) if place not in made]:
            self.players.wait()
            self.bring_up()
            seats = self.current
            asked = []
            for number, seat in enumerate(seats):
                if (worker := seat.playing) is not None and (places := left[number :: len(seats)]):
                    future = worker.submit("generate", [requests[place] for place in places], sampling)
                    asked.append((worker, places, future))
            for worker, places, future in asked:
                with _unless_dead(worker):
                    made.update(zip(places, future.result(), strict=True))
        return [made[place] for place in range(len(requests))]

    def push(
        self,
        folder: Path,
        version: PolicyVersionLabel,
        *,
        seats: list[Seat] | None = None,
        wait: bool = True,
        adapter: bool = False,
    ) -> None:
        """Sample with the weights in `folder` from now on, in `seats` or all; returns when they have arrived."""
        chosen = self.players.ready if seats is None else seats
        self.players.push(folder, version, seats=chosen, wait=wait, adapter=adapter)

    def _take(self, seat: Seat, kind: str, content: Any) -> None:
        if kind == "ended":
            self._ended[seat.number], tokens = content
            self.count_tokens(seat, tokens)
            if self.on_ended is not None:
                self.on_ended(sum(self._ended.values()))
        else:
            self.on_event(seat, kind, content)

    def count_tokens(self, seat: Seat, tokens: int) -> None:
        """The player of `seat` has sampled so many since it began."""
        self._tokens[seat.number] = tokens
        self.tokens_sampled = sum(self._tokens.values())


@contextmanager
def _unless_dead(worker: RemoteObject) -> Iterator[None]:
    """A block that waits for `worker`'s answer, and is left without one where that has died: it is replaced."""
    try:
        yield
    except PolicyError:
        if worker.failure is None:
            raise


class FolderUpdater(WeightUpdater):
    """Writes the weights into a folder, in memory where there is one, from which another process loads them.

    `wait`: once no group is under way there; else those go on with the new weights, each token with its version.
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
        """Bring the weights of `source` over as those of `version`, to `seats` or to all."""
        with exchange_folder() as folder:
            if adapter := policy.pushes_adapter:
                if not is_adapted(source):
                    raise PolicyError(f"the sampler takes an adapter, and this {type(source).__name__} has none")
                save_adapter(source, folder)
            else:
                save_one_by_one(named_weights(source).items(), folder)
            policy.push(folder, version, seats=seats, wait=self.wait, adapter=adapter)

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        if not isinstance(policy, RemotePolicy):
            raise PolicyError(f"{type(self).__name__} pushes to a policy in another process: {type(policy).__name__}")
        self.send(policy, source, next_version(policy.version))
