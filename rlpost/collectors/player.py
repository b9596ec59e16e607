"""One turn of conversations: the policy replies, the environment answers and scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlpost.data.conversation import Conversation
from rlpost.envs.base import EnvBase
from rlpost.policies.base import Policy
from rlpost.settings import SamplingSettings


class Player:
    """Lets `policy` take turns in conversations of `env`, says what is under way and measures how long it took.

    `on_phase` is told what begins ("sampling", "scoring") and of what; `on_sampled`, while the policy
    samples, how many completions have ended, of how many, and the tokens of all so far.
    """

    def __init__(self, env: EnvBase, policy: Policy) -> None:
        self.env = env
        self.policy = policy
        self.on_phase: Callable[[str, str], None] = lambda kind, what: None
        self.on_sampled: Callable[[int, int, int], None] | None = None
        self._seconds = {"time/rollout": 0.0, "time/reward": 0.0}

    def turn(self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None) -> None:
        """One reply in each conversation and what the environment makes of it, in place."""
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
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken
