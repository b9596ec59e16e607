"""The buffer between sampling and training: whole groups of finished conversations, each taken once."""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, TypeVar

from tensordict import TensorDictBase

from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation, PolicyVersionLabel
from rlpost.errors import ConfigError, PolicyError

log = logging.getLogger("rlpost")
Member = TypeVar("Member")
Build = Callable[[Sequence[Conversation]], TensorDictBase]
Rule = Callable[[Sequence[Conversation]], bool]  # a group -> whether it may be trained on


@dataclass
class Drawn:
    """The groups that came into the buffer over some time, the rewards of their valid rows, and the dropped groups."""

    groups: int = 0
    reward_sum: float = 0.0
    num_rewards: int = 0
    turned_down: int = 0  # groups that a rule dropped


Judged = tuple[list[list[Member]], list[list[Member]]]  # whole groups: the kept ones and the dropped ones


class HoldsGroups:
    """Holds groups back until they have all their members, at most `max_waiting` of them."""

    group_size: Any  # of a complete group: an int, or None
    max_waiting: int
    num_evicted = 0  # groups that were discarded since too many waited
    _waiting: dict[Any, list[Any]]  # the one that has longest gained no member comes first

    @property
    def num_incomplete(self) -> int:
        """Groups that still wait for members."""
        return len(self._waiting)

    def _size(self, group: list[Any]) -> int:
        """How much of `group_size` a group has."""
        return len(group)

    def _evict(self) -> None:
        """Discard the groups that have waited longest for another member; logs and counts them."""
        while len(self._waiting) > self.max_waiting:
            group = self._waiting.pop(next(iter(self._waiting)))
            self.num_evicted += 1
            log.warning(
                "gave up a group with %d of %s completions, since %d others wait (max_waiting); %d given up so far",
                self._size(group),
                self.group_size,
                self.max_waiting,
                self.num_evicted,
            )


class Groups(HoldsGroups, ABC, Generic[Member]):
    """Whole groups, first in first out, each a list of members; one thread may write while another takes.

    - A group is whole with `group_size` rows; None: as soon as it comes.
    - `accept` says of each whole group whether it may be trained on; any other is dropped and counted.
    - `oldest_first` gives groups in the order of the oldest policy version in them, rather than in that of
      their arrival: a group that took long to sample is trained on before later ones.
    - `draw_limit` bounds the `rounds` of sampling: that many times the wanted groups, in that many rounds at least,
      and that many rounds in a row without a whole group.
    - `max_waiting` bounds how many groups wait for rows: beyond it the one that has waited longest
      since its last row is given up, logged and counted in `num_evicted`.
    """

    def __init__(
        self,
        group_size: int | None,
        accept: Callable[[Any], bool] | None,
        oldest_first: bool,
        draw_limit: int,
        max_waiting: int = 4096,
    ) -> None:
        self.group_size = group_size
        self.accept = accept
        self.oldest_first = oldest_first
        self.draw_limit = draw_limit
        self.max_waiting = max_waiting
        self.num_dropped_by_age = 0  # groups
        self.drawn = Drawn()  # since `take_counts` was last called
        self._num_judged = 0  # groups that were whole, since the buffer was built
        self._groups: list[tuple[int, list[Member]]] = []  # whole ones, with their numbers
        self._waiting: dict[int, list[Member]] = {}  # by number
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def group_numbers(self) -> list[int]:
        """The numbers of the whole groups, in the order in which they will be taken."""
        with self._lock:
            return [number for number, _ in self._groups]

    @property
    def num_rows(self) -> int:
        """The rows of the whole groups."""
        with self._lock:
            return sum(self._size(group) for _, group in self._groups)

    def remove(self, number: int) -> None:
        """Discard a whole group, for whoever samples it again."""
        with self._lock:
            self._groups = [each for each in self._groups if each[0] != number]

    def drop_stale(self, version: PolicyVersionLabel | None, max_policy_lag: int | None) -> None:
        """Drop and count the groups sampled more than `max_policy_lag` weight pushes before `version`."""
        if max_policy_lag is None or version is None:
            return
        if not isinstance(version, int):
            raise ConfigError("max_policy_lag needs integer policy versions: uuids have no order")
        with self._lock:
            fresh = [each for each in self._groups if self._oldest(each[1]) >= version - max_policy_lag]
            self.num_dropped_by_age += len(self._groups) - len(fresh)
            self._groups = fresh

    def rounds(self, num_groups: int) -> Iterator[None]:
        """One pass for each round of sampling that is still needed for `num_groups` whole groups.

        Raises PolicyError when what `draw_limit` allows did not bring enough.
        """
        rounds, fruitless, before = 0, 0, self._num_judged
        while len(self) < num_groups:
            enough = self._num_judged - before >= self.draw_limit * num_groups
            if rounds >= self.draw_limit and (enough or fruitless >= self.draw_limit):
                raise PolicyError(
                    f"{rounds} rounds of sampling brought {len(self)} of {num_groups} groups "
                    f"({self.num_dropped_by_age} dropped by age so far): {self._advice()}"
                )
            judged = self._num_judged
            yield
            rounds += 1
            fruitless = 0 if self._num_judged > judged else fruitless + 1

    def take(self, num_groups: int) -> TensorDictBase:
        """The first `num_groups` groups as one batch; they leave the buffer, and the others stay.

        Raises PolicyError if there are fewer: `fill` of a collector brings them.
        """
        with self._lock:
            if len(self._groups) < num_groups:
                raise PolicyError(
                    f"the replay buffer holds {len(self._groups)} of the {num_groups} groups to take: have its "
                    f"collector sample them first, collector.fill({num_groups})"
                )
            groups, self._groups = self._groups[:num_groups], self._groups[num_groups:]
        return self._batch([member for _, group in groups for member in group])

    def take_counts(self) -> dict[str, float]:
        """Statistics of the groups since the last call, under the names of metrics.jsonl.

        `groups/drawn`, `groups/dropped` (by a rule) and `reward/mean_drawn`, the mean reward before
        any group was dropped, if any had one. Counted since the run began: `buffer/dropped_by_age` and, with a
        `group_size`, `groups/evicted`.
        """
        with self._lock:
            drawn, self.drawn = self.drawn, Drawn()
            counts = {
                "groups/drawn": float(drawn.groups),
                "groups/dropped": float(drawn.turned_down),
                "buffer/dropped_by_age": float(self.num_dropped_by_age),
            }
            if drawn.num_rewards:
                counts["reward/mean_drawn"] = drawn.reward_sum / drawn.num_rewards
            if self.group_size is not None:
                counts["groups/evicted"] = float(self.num_evicted)
            return counts

    def state_dict(self) -> dict[str, Any]:
        """Complete and incomplete groups and the counts."""
        with self._lock:
            return {
                "groups": [self._saved(group) for _, group in self._groups],
                "waiting": [self._saved(group) for group in self._waiting.values()],
                "num_dropped_by_age": self.num_dropped_by_age,
                "num_evicted": self.num_evicted,
                "drawn": asdict(self.drawn),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._groups = [self._restored(saved) for saved in state["groups"]]
        self._waiting = dict(map(self._restored, state["waiting"]))
        self.num_dropped_by_age = state["num_dropped_by_age"]
        self.num_evicted = state["num_evicted"]
        self.drawn = Drawn(**{each.name: state["drawn"][each.name] for each in fields(Drawn)})

    def _add(self, members: Mapping[int, list[Member]]) -> Judged[Member]:
        """Add members to their groups; returns the groups that are whole now."""
        kept: list[list[Member]] = []
        dropped: list[list[Member]] = []
        for number, own in members.items():
            group = self._waiting.pop(number, []) + own
            if self.group_size is not None and self._size(group) < self.group_size:
                self._waiting[number] = group
            else:
                (kept if self._keep(number, group) else dropped).append(group)
        self._evict()
        return kept, dropped

    def _keep(self, number: int, group: list[Member]) -> bool:
        """Put a whole group in its place, or drop it; returns whether it is kept."""
        self._num_judged += 1
        rewards = self._rewards(group)
        self.drawn.groups += 1
        self.drawn.reward_sum += sum(rewards)
        self.drawn.num_rewards += len(rewards)
        if self.accept is not None and not self.accept(group):
            self.drawn.turned_down += 1
            return False
        if self.oldest_first:
            insort(self._groups, (number, group), key=lambda each: self._oldest(each[1]))
        else:
            self._groups.append((number, group))
        return True

    def _advice(self) -> str:
        """Why too few groups may have come, and what to do about it."""
        drawn = self.drawn
        if not drawn.turned_down:
            return "group_size may exceed what the environment repeats"
        mean = f"mean reward {drawn.reward_sum / drawn.num_rewards:.3g}" if drawn.num_rewards else "no valid reward"
        return (
            f"{drawn.turned_down} of {drawn.groups} groups were dropped ({mean}); give prompts that the model "
            "answers well now and then, a larger group_size, or a higher dynamic.draw_limit"
        )

    # The members of a group

    @abstractmethod
    def _oldest(self, group: list[Member]) -> int:
        """The oldest policy version of a group."""

    @abstractmethod
    def _rewards(self, group: list[Member]) -> list[float]:
        """The reward of each valid row that has one."""

    @abstractmethod
    def _batch(self, members: list[Member]) -> TensorDictBase:
        """The rows of `members`, one after the other."""

    @abstractmethod
    def _saved(self, group: list[Member]) -> Any:
        """A group as `state_dict` has it."""

    @abstractmethod
    def _restored(self, saved: Any) -> tuple[int, list[Member]]:
        """The number and the members of a group, from `_saved`."""


class GroupBuffer(Groups[Conversation]):
    """Whole groups of finished conversations; the TensorDict of a step is built of them once, by `build`.

    Its state is JSON-compatible. See `Groups` for the other options.
    """

    def __init__(
        self,
        group_size: int,
        build: Build = batch_from_conversations,
        *,
        accept: Rule | None = None,
        oldest_first: bool = False,
        draw_limit: int = 32,
    ) -> None:
        super().__init__(group_size, accept, oldest_first, draw_limit)
        self.build = build

    def extend(self, conversations: Sequence[Conversation]) -> Judged[Conversation]:
        """Add finished conversations; returns the groups that are whole now, the kept ones and the dropped ones."""
        own: dict[int, list[Conversation]] = {}
        for conversation in conversations:
            own.setdefault(conversation.group_id, []).append(conversation)
        with self._lock:
            return self._add(own)

    def _oldest(self, group: list[Conversation]) -> Any:
        return min((each.policy_versions or [-1])[0] for each in group)

    def _rewards(self, group: list[Conversation]) -> list[float]:
        return valid_rewards(group)

    def _batch(self, members: list[Conversation]) -> TensorDictBase:
        return self.build(members)

    def _saved(self, group: list[Conversation]) -> list[dict[str, Any]]:
        return [{name: getattr(each, name) for name in SAVED} for each in group]

    def _restored(self, saved: Any) -> tuple[int, list[Conversation]]:
        if isinstance(saved, dict):  # saved as the JSON of its batch (see `rlpost.data.batch`)
            group = [_of_batch_row(_batch_row(saved, place)) for place in range(saved["size"])]
        else:
            group = [Conversation(task={}, **each) for each in saved]
        return group[0].group_id, group


# what only the environment and the policy read is not saved: it need not be JSON-compatible
SAVED = [each.name for each in fields(Conversation) if each.name not in ("task", "variables", "tools")]


def valid_rewards(group: Sequence[Conversation]) -> list[float]:
    """The rewards of the valid conversations that have one."""
    return [each.reward for each in group if each.valid and each.reward is not None and math.isfinite(each.reward)]


def _batch_row(plain: Mapping[str, Any], place: int) -> dict[str, Any]:
    """One row of a batch that was saved as JSON, nested as the batch is."""
    return {
        name: _batch_row(field, place) if field["kind"] == "batch" else field["values"][place]
        for name, field in plain["values"].items()
    }


def _of_batch_row(row: Mapping[str, Any]) -> Conversation:
    tokens, scored = row["tokens"], row["next"]

    def known(values: Mapping[str, list[float]]) -> dict[str, float]:
        return {name: value for name, [value] in values.items() if not math.isnan(value)}

    measures = known({name: scored[name] for name in ("reward", "accuracy_strict", "accuracy_lenient")})
    conversation = Conversation(
        task={},
        messages=row["history"],
        group_id=row["group_id"],
        sample=row["sample"],
        source=row["source"],
        prompt_text=row["text"]["prompt"],
        response_text=row["text"]["response"],
        prompt_ids=tokens["prompt"],
        response_ids=tokens["response"],
        hinted_ids=tokens.get("hinted_prompt", []),
        restarts=tokens.get("restarts", []),
        mask=list(map(int, row["masks"]["all_assistant_mask"][len(tokens["prompt"]) :])),
        log_probs=row["log_probs"]["response"],
        policy_versions=[row["policy_version"]] * row["turns"],
        finish_reason=row["finish_reason"],
        tool_calls=row["tools"]["calls"],
        tool_errors=row["tools"]["errors"],
        valid=row["valid"],
        reward=measures.get("reward"),
        reward_parts=known(scored["reward_parts"]),
        part_weights=known(scored["part_weights"]),
        accuracy_strict=measures.get("accuracy_strict"),
        accuracy_lenient=measures.get("accuracy_lenient"),
        terminated=scored["terminated"][0],
        truncated=scored["truncated"][0],
    )
    for place, version in enumerate(row.get("token_versions", [])):
        if version not in (-1, conversation.newest_version):
            conversation.version_changes.append((place, version))
    return conversation
