"""Several environments as one: each prompt is drawn from one of them, in proportion to its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import count
from math import ceil
from typing import Any, NoReturn, Self

from rlpost.config.compose import sources_named
from rlpost.data.conversation import Conversation, Message, Ticket
from rlpost.data.demonstrations import Demonstration
from rlpost.envs.build import make_env
from rlpost.envs.chat import DatasetChatEnv
from rlpost.errors import DataError
from rlpost.settings import EnvSettings, MixSettings

HALF = Fraction(1, 2)
Act = Callable[[DatasetChatEnv, list[Conversation]], object]


class Shares:
    """The source of each prompt, a pure function of the number of the draw and the weights.

    Smooth weighted round-robin: the k-th draw of a source of weight w has its place at (k + 1/2) / w, and places of
    all sources are merged, equal ones in the order of the sources. Of any N draws that follow each other a source
    has its share of N up to about one draw.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = [Fraction(weight) for weight in weights]

    def before(self, draw: int) -> list[int]:
        """How many of the first `draw` draws are of each source."""
        # at this place at most `draw` have passed: a source has had its share up to half a draw
        place = max(Fraction(0), (draw - Fraction(len(self.weights), 2)) / sum(self.weights))
        drawn = [max(0, ceil(place * weight - HALF)) for weight in self.weights]
        for _ in range(draw - sum(drawn)):
            drawn[self.next(drawn)] += 1
        return drawn

    def next(self, drawn: Sequence[int]) -> int:
        """The source that is drawn from once `drawn` were drawn of each."""
        return min(range(len(drawn)), key=lambda source: (drawn[source] + HALF) / self.weights[source])

    def draw_of(self, source: int, number: int) -> int:
        """The number, from 0, of the `number`-th draw of `source`."""
        place = (number + HALF) / self.weights[source]
        ahead = []  # of each source: the draws before this one
        for other, weight in enumerate(self.weights):
            same_place = (place * weight - HALF).denominator == 1
            ahead.append(number if other == source else ceil(place * weight - HALF) + (same_place and other < source))
        return sum(ahead)


class MixedRows:
    """The prompts of several environments without end, in their shares; each source keeps its own order.

    With a `limit` the first `limit` come over and over.
    """

    def __init__(self, envs: Sequence[DatasetChatEnv], shares: Shares, limit: int | None) -> None:
        self.envs = envs
        self.shares = shares
        self.limit = limit

    def iter_from(self, position: int) -> Iterator[dict[str, Any]]:
        """The prompts from `position` on: `source`, `place` among that source's own, and its `task`."""
        while True:
            start = position if self.limit is None else position % self.limit
            drawn = self.shares.before(start)
            rows = [env.order.iter_from(own) for env, own in zip(self.envs, drawn, strict=True)]
            for place in count(start):
                if place == self.limit:
                    break
                source = self.shares.next(drawn)
                yield {"source": source, "place": drawn[source], "task": next(rows[source])}
                drawn[source] += 1
            position = 0

    def count(self) -> int:
        """How many prompts are drawn before a source begins anew, `limit` at most."""
        whole = min(self.shares.draw_of(number, env.order.count()) for number, env in enumerate(self.envs))
        return whole if self.limit is None else min(whole, self.limit)

    def fingerprint(self, served: int) -> str:
        """Everything besides the seed that a position depends on, in words, after `served` prompts."""
        drawn = self.shares.before(served if self.limit is None else min(served, self.limit))
        parts = [
            f"{env.source_name} (weight {float(weight):g}): {env.order.fingerprint(own)}"
            for env, weight, own in zip(self.envs, self.shares.weights, drawn, strict=True)
        ]
        return "; ".join([*parts, f"limit {self.limit}"])


class MixEnv(DatasetChatEnv):
    """Several environments, `sources`, as one, which hands every conversation to the one it was drawn from.

    Their prompts are drawn in shares as `weights` are; the conversations of one prompt are of one source, and
    `Conversation.source` is its name. A source keeps its own order, limits, tools and rewards.
    """

    def __init__(self, sources: Mapping[str, DatasetChatEnv], weights: Sequence[float], **chat: Any) -> None:
        super().__init__((), **chat)
        self.sources = dict(sources)
        self.shares = Shares(weights)
        for name, env in self.sources.items():
            env.source_name = name

    @classmethod
    def of(cls, settings: EnvSettings, *, seed: int, **common: Any) -> Self:
        """See `DatasetChatEnv.of`."""
        assert isinstance(settings, MixSettings)
        sources = [source.within(settings) for source in sources_named(settings.sources)]
        envs: dict[str, DatasetChatEnv] = {}
        for source in sources:
            env = envs[source.name] = make_env(source.settings, num_prompts=1, group_size=1, seed=seed)
            env.source_settings = source.settings
        given = {name: value for name, value in common.items() if value is not None}
        return cls(envs, [source.weight for source in sources], seed=seed, **given)

    @property
    def parts(self) -> list[DatasetChatEnv]:
        """See `DatasetChatEnv.parts`: the sources."""
        return list(self.sources.values())

    @property
    def answers(self) -> bool:
        """See `ChatEnv.answers`."""
        return any(env.answers for env in self.parts)

    # Beginning

    def start(self) -> None:
        """See `DatasetChatEnv.start`: of every source."""
        for env in self.parts:
            env.start()
        super().start()

    def close(self) -> None:
        """See `EnvBase.close`."""
        super().close()
        for env in self.parts:
            env.close()

    def abandon(self, conversations: Sequence[Conversation] | None = None) -> None:
        """See `EnvBase.abandon`."""
        super().abandon(conversations)
        if conversations is not None:
            self._each(conversations, lambda env, own: env.abandon(own))
            return
        for env in self.parts:
            env.abandon()

    def open_rows(self, seed: int) -> MixedRows:
        """See `DatasetChatEnv.open_rows`; the sources know the seed themselves."""
        return MixedRows(self.parts, self.shares, self.limit)

    def opening_messages(self, task: Mapping[str, Any]) -> list[Message]:
        """See `ChatEnv.opening_messages`, of what `MixedRows` gives."""
        return self.parts[task["source"]].opening_messages(task["task"])

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> NoReturn:
        """Raises DataError: a row from outside is of no source."""
        raise DataError("a row from outside is of no source of a mix: reset the environment of one source with it")

    def _conversation(self, task: Mapping[str, Any], group: int, sample: int) -> Conversation:
        return self.parts[task["source"]]._conversation(task["task"], group, sample)

    def _place(self, ticket: Ticket) -> str:
        return self.parts[ticket.task["source"]].place_of(ticket.task["place"])

    def _opened(self, conversations: list[Conversation]) -> list[Conversation]:
        self._each(conversations, lambda env, own: env._opened(own))
        return super()._opened(conversations)

    # Going on

    def respond(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.respond`: each source answers in its own."""
        self._each(conversations, lambda env, own: env.respond(own))

    def conclude(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.conclude`: each source scores its own."""
        self._each(conversations, lambda env, own: env.conclude(own))

    def _each(self, conversations: Sequence[Conversation], act: Act) -> None:
        """Let every source act on its own conversations, where it has some."""
        for name, env in self.sources.items():
            if own := [conversation for conversation in conversations if conversation.source == name]:
                act(env, own)

    # What is in it

    def _openings(self) -> set[int]:
        return set().union(*(env._openings() for env in self.parts))

    def all_tasks(self) -> NoReturn:
        """Raises DataError: a task of a mix does not say which source it is of."""
        raise DataError("the rewards of a mix are its sources': test the environment of one source")

    def demonstrations(self) -> Iterator[Demonstration]:
        """See `EnvBase.demonstrations`: of each source once, in turn."""
        waiting = [env.demonstrations() for env in self.parts]
        while waiting:
            for each in list(waiting):
                demonstration = next(each, None)
                if demonstration is None:
                    waiting.remove(each)
                else:
                    yield demonstration

    # Resuming

    def set_seed(self, seed: int) -> None:
        """See `EnvBase.set_seed`: of every source, where it is another seed."""
        if seed != self.seed:
            for env in self.parts:
                env.set_seed(seed)
        super().set_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """See `EnvBase.state_dict`; each source's seed is part of it."""
        return {**super().state_dict(), "seeds": [env.seed for env in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `DatasetChatEnv.load_state_dict`."""
        self.seed = state["seed"]
        for env, seed in zip(self.parts, state["seeds"], strict=True):
            env.set_seed(seed)
        super().load_state_dict(state)
