"""Collecting in the trainer's process, in turn with training: Player takes turns, SyncCollector plays whole groups."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.data.replay_buffer import GroupBuffer
from rlpost.envs.base import EnvBase
from rlpost.errors import CheckpointError
from rlpost.policies.base import Policy
from rlpost.settings import SamplingSettings
from rlpost.weight_sync.base import WeightSource, default_updater


class Player:
    """Lets `policy` take turns in conversations of `env`, reports progress and measures time.

    `on_phase` is called with the phase that begins ("sampling", "scoring") and its size; `on_sampled`, while the
    policy samples, with the number of ended completions, of all, and the tokens of all so far.
    """

    def __init__(self, env: EnvBase, policy: Policy) -> None:
        self.env = env
        self.policy = policy
        self.on_phase: Callable[[str, str], None] = lambda kind, what: None
        self.on_sampled: Callable[[int, int, int], None] | None = None
        self._seconds = {"time/rollout": 0.0, "time/reward": 0.0}

    def turn(self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None) -> None:
        """Add a reply to each conversation, and the environment's answer and score, in place."""
        completions = f"{len(conversations)} completions"
        self.on_phase("sampling", completions)
        started = time.perf_counter()
        if (on_sampled := self.on_sampled) is not None:
            total, before = len(conversations), self.policy.tokens_sampled
            self.policy.on_ended = lambda ended: on_sampled(ended, total, self.policy.tokens_sampled - before)
        try:
            self.policy.reply(conversations, sampling)
        finally:
            self.policy.on_ended = None
        sampled = time.perf_counter()
        self.on_phase("scoring", completions)
        self.env.advance(conversations)
        self._seconds["time/rollout"] += sampled - started
        self._seconds["time/reward"] += time.perf_counter() - sampled

    def take_seconds(self) -> dict[str, float]:
        """Seconds spent sampling and scoring since the last call, under the names of metrics.jsonl."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds


class SyncCollector:
    """Plays `env` with `policy` until `buffer` has its groups, at least `rows_per_round` conversations at a time.

    Conversations that are unfinished when a round has its rows go on in the next one. Groups sampled more than
    `max_policy_lag` pushes ago are dropped; None: no group is. With a lag (`begin_ahead`) a place starts another
    conversation as soon as its last one is finished. Without, a round starts only the conversations it still lacks, so
    that none is sampled under stale weights.
    """

    keeps_turns = False  # whether each turn of a conversation is delivered, and not only the last

    def __init__(
        self,
        env: EnvBase,
        policy: Policy,
        buffer: GroupBuffer,
        *,
        rows_per_round: int,
        max_policy_lag: int | None = None,
    ) -> None:
        self.buffer = buffer
        self.rows_per_round = rows_per_round
        self.max_policy_lag = max_policy_lag
        self.begin_ahead = bool(max_policy_lag)
        self.weight_updater = default_updater(policy)
        self._play_with(env, policy)

    def _play_with(self, env: EnvBase, policy: Policy) -> None:
        self.env = env
        self.policy = policy
        self.player = Player(env, policy)
        self._live: list[list[Conversation]] = [[] for _ in range(env.numel())]  # of each place, with its turns
        self._ready: deque[list[Conversation]] = deque()  # finished, not delivered yet
        self._turns_delivered = 0
        self._trajectories_begun = 0

    def fill(self, num_groups: int) -> dict[str, float]:
        """Play until the buffer has `num_groups` whole groups that are not too old: take them next.

        Returns the counts of the buffer. Raises PolicyError if too few groups become whole; see `Groups.rounds`.
        """
        self.buffer.drop_stale(self.policy.version, self.max_policy_lag)
        for _ in self.buffer.rounds(num_groups):
            played = self._completed(self.rows_per_round)
            self._turns_delivered += len(played)
            kept, dropped = self.buffer.extend(played)
            for group in (*kept, *dropped):
                self.env.learn_difficulty(group)
            self.buffer.drop_stale(self.policy.version, self.max_policy_lag)
        self.player.on_phase("building", "the batch")  # which `take` does
        return self.buffer.take_counts()

    def update_policy_weights_(self, policy_or_weights: WeightSource) -> None:
        """Push weights; the version rises once all of them have arrived."""
        self.weight_updater.push(policy_or_weights)

    def pause(self) -> AbstractContextManager[None]:
        """A block in which nothing is collected; nothing is, except in `fill`."""
        return nullcontext()

    def show(self, on_phase: Callable[[str, str], None], on_sampled: Callable[[int, int, int], None]) -> None:
        """Report phases to `on_phase` and progress to `on_sampled`, see `Player`."""
        self.player.on_phase, self.player.on_sampled = on_phase, on_sampled

    def take_seconds(self) -> dict[str, float]:
        """See `Player.take_seconds`."""
        return self.player.take_seconds()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what is collected next, as JSON-compatible values; no weights.

        `env_state_dict` is the environment's, `policy_state_dict` the seed and version of the policy.
        """
        return {
            "env_state_dict": self.env.state_dict(),
            "policy_state_dict": {"seed": self.policy.seed, "version": self.policy.version},
            "live": [[asdict(turn) for turn in turns] for turns in self._live],
            "ready": [[asdict(turn) for turn in turns] for turns in self._ready],
            "turns_delivered": self._turns_delivered,
            "trajectories_begun": self._trajectories_begun,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; the policy has the weights of its version already.

        Raises CheckpointError if conversations were in flight and the environment had another size.
        """
        live = [[Conversation(**turn) for turn in turns] for turns in state_dict["live"]]
        if any(live) and len(live) != len(self._live):
            raise CheckpointError(
                f"the saved collector had {len(live)} conversations in flight at once, and this environment has "
                f"{len(self._live)}: resume with the prompts_per_step and group_size the run began with"
            )
        self.env.load_state_dict(state_dict["env_state_dict"])
        self.policy.seed = state_dict["policy_state_dict"]["seed"]
        self.weight_updater.restore_version(state_dict["policy_state_dict"]["version"])
        self._live = live if any(live) else [[] for _ in self._live]
        self._ready = deque([Conversation(**turn) for turn in turns] for turns in state_dict["ready"])
        self._turns_delivered = state_dict["turns_delivered"]
        self._trajectories_begun = state_dict["trajectories_begun"]

    # Playing

    def _completed(self, rows: int) -> list[Conversation]:
        """Play until at least `rows` rows of finished conversations exist, and return these."""
        chosen: list[Conversation] = []
        while len(chosen) < rows:
            while not self._ready:
                for turns in self._play_turn(self._wanted(rows - len(chosen))):
                    if turns[-1].done:
                        self._ready.append(turns)
            chosen += self._ready.popleft()
        return chosen

    def _wanted(self, rows: int) -> int:
        """How many conversations to begin: one in every place, or as many as `rows` still lacks."""
        if self.begin_ahead:
            return len(self._live)
        expected = sum(len(turns) + 1 if self.keeps_turns else 1 for turns in self._live if turns)
        return max(0, rows - expected)

    def _play_turn(self, most_begun: int | None = None) -> list[list[Conversation]]:
        """Play one turn in every place, with a fresh conversation in each free one, or in `most_begun` of them.

        Returns the conversation of each place with the turns that are kept of it.
        """
        free = [i for i, turns in enumerate(self._live) if not turns][:most_begun]
        drawn = self.env.draw(len(free)) if free else []
        for conversation in drawn:
            conversation.trajectory = self._trajectories_begun
            self._trajectories_begun += 1
        fresh = dict(zip(free, drawn, strict=True))
        places = [i for i, turns in enumerate(self._live) if turns or i in fresh]
        conversations = [fresh[i] if i in fresh else self._live[i][-1].copy() for i in places]
        self.player.turn(conversations)
        played = []
        for i, conversation in zip(places, conversations, strict=True):
            played.append([*self._live[i], conversation] if self.keeps_turns else [conversation])
            self._live[i] = [] if conversation.done else played[-1]
        return played
