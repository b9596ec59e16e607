"""TopKRewardSelector: a transform of the replay buffer that lets the best replies to each prompt through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any

from tensordict import TensorDict, TensorDictBase

from rlpost.data.best import best, mean_worth, worth_of
from rlpost.data.plain import from_plain, to_plain
from rlpost.data.ragged import Key
from rlpost.data.selection import HoldsGroups, Selection, Waiting
from rlpost.torchrl.trajectories import Trajectories, trajectories_by

GroupKey = tuple[int | None, str]  # the group's number, where groups are numbered, and the prompt


@dataclass(eq=False)
class TopKRewardSelector(HoldsGroups):
    """Holds trajectories back until each prompt has its number, then lets the best of them through.

    A prompt is complete with `total_dialog_turns` trajectories, each of one row or of the rows of
    its turns, the last of them done; what a trajectory is worth is the mean reward of its rows.
    Of these, the ones strictly above the prompt's lower median are candidates, so where all are
    worth the same there is none; with `min_reward` the candidates are instead the ones worth at
    least that, whatever the others are. The `topk_size` best candidates go through, best first and
    in the order they came where they are equal; fewer where there are fewer. A trajectory whose
    rewards failed (`valid` False, or none that is finite) counts as one of its prompt's and is never
    a candidate.

    Rows of a batch that has `group_key` belong together by their group as well as by their prompt,
    so two draws of one prompt stay apart; without it the prompt, a string, alone decides. At most
    `max_waiting` prompts wait: the one that has longest had no new trajectory is given up, logged
    and counted in `num_evicted`.

    Raises ValueError for sizes that leave nothing to choose.
    """

    total_dialog_turns: int
    topk_size: int
    prompt_key: Key = ("text", "prompt")
    rewards_key: Key = ("next", "reward")
    done_key: Key = ("next", "done")
    _: KW_ONLY
    min_reward: float | None = None
    group_key: str = "group_id"
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        if self.topk_size < 1:
            raise ValueError(f"topk_size={self.topk_size} lets nothing through: it must be at least 1")
        if self.topk_size > self.total_dialog_turns:
            raise ValueError(
                f"topk_size={self.topk_size} is more than the total_dialog_turns={self.total_dialog_turns} that a "
                "prompt has: lower it"
            )
        self._waiting: Waiting[GroupKey, Trajectories] = Waiting(
            self.max_waiting, self.total_dialog_turns, "trajectories"
        )

    def __call__(self, batch: TensorDictBase) -> TensorDict | None:
        """The chosen trajectories of the prompts that `batch` (B,) completes, prompt by prompt; None if there are none.

        Raises RuntimeError if the batch ends before its last trajectory does, TypeError for a prompt
        that is no string.
        """
        chosen: list[Selection] = []
        for key, new in trajectories_by(batch, self.done_key, self._keys).items():
            chosen += self._add(key, new)
        self._waiting.evict()
        return Selection.joined(chosen).copied() if chosen else None

    def counts(self) -> dict[str, float]:
        """What a training's metrics say of this transform; counted since the run began."""
        return {"groups/evicted": float(self.num_evicted)}

    def state_dict(self) -> dict[str, Any]:
        """The trajectories of prompts that are not complete, as JSON-compatible values."""
        waiting = [
            {"group": group, "prompt": prompt, "rows": to_plain(own.steps.copied()), "lengths": own.lengths}
            for (group, prompt), own in self._waiting.items()
        ]
        return {"waiting": waiting, "evicted": self.num_evicted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._waiting.clear()
        for own in state["waiting"]:
            rows = Selection.whole(from_plain(own["rows"]))
            self._waiting.hold((own["group"], own["prompt"]), Trajectories(rows, own["lengths"]))
        self._waiting.num_evicted = state["evicted"]

    def _add(self, key: GroupKey, new: Trajectories) -> Iterator[Selection]:
        """What goes through of the prompts that `new` completes; the rest waits."""
        own, size = self._waiting.with_more(key, new), self.total_dialog_turns
        self._waiting.pop(key, None)
        complete = len(own) - len(own) % size
        for first in range(0, complete, size):
            group = own.part(range(first, first + size))
            rewards = iter(worth_of(group.steps, self.rewards_key))
            worth = [mean_worth(list(islice(rewards, length))) for length in group.lengths]
            if picked := best(worth, self.topk_size, self.min_reward):
                yield group.part(picked).steps
        if complete < len(own):
            self._waiting.hold(key, own.part(range(complete, len(own))))

    def _keys(self, steps: TensorDictBase) -> list[GroupKey]:
        """The group of each row, and its prompt."""
        prompts = self._prompts(steps)
        groups = steps[self.group_key].tolist() if self.group_key in steps else [None] * len(prompts)
        return list(zip(groups, prompts, strict=True))

    def _prompts(self, batch: TensorDictBase) -> list[str]:
        column = batch[self.prompt_key]
        prompts = [column] if isinstance(column, str) else list(column)
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise TypeError(
                    f"TopKRewardSelector tells prompts apart by their text, and {self.prompt_key} holds "
                    f"{type(prompt).__name__}: give the prompt_key of a string"
                )
        return prompts
