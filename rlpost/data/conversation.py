"""A conversation while it is under way: plain Python, one object a trajectory.

Building and stacking a TensorDict for every turn costs more than the turn; `rlpost.data.batch`
turns a list of conversations into one TensorDict when a batch is delivered.

The form in which a policy is asked, and an environment asks.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from rlpost.text import member

Message = dict[str, Any]  # {"role": ..., "content": ...}, and what a chat template may read besides
PolicyVersionLabel = int | str
PADDING_ROLE = "<none>"  # fills the short rows of a ragged history; never rendered
END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "</s>")
CUT = ("length", "context")  # how a last turn ends that the model would have gone on with, or could not begin


def next_version(version: PolicyVersionLabel) -> PolicyVersionLabel:
    """The version after `version`: one more, or for a uuid a new uuid4."""
    return version + 1 if isinstance(version, int) else str(uuid.uuid4())


@dataclass(slots=True)
class Completion:
    """What a policy returns for one prompt.

    `token_ids` are exactly the sampled ids, the end-of-turn token included where one was sampled;
    `log_probs` are log π of the sampler for each of them, of the distribution they were drawn from, at
    the sampling temperature; `text` is decoded from the ids without special tokens; `finish_reason` is
    "stop", at an end of turn or a stop text, or "length". It began under `policy_version`; of each version
    after that, `version_changes` has the index of the first id that was sampled under it.
    """

    token_ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str
    policy_version: PolicyVersionLabel
    version_changes: list[tuple[int, PolicyVersionLabel]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ticket:
    """One draw of a prompt: what its conversations are begun from, in this process or in another.

    `group` numbers the draw and `samples` the conversations of it that are to be begun: see `Conversation`.
    """

    group: int
    samples: list[int]
    task: Mapping[str, Any]
    where: str = ""


@dataclass(slots=True)
class Conversation:
    """One trajectory: its messages and, as ids, exactly what the model read and sampled.

    `group_id` numbers the draw of the prompt within the run and `sample` the completion within its
    group, so (run seed, group_id, sample) names the randomness of this conversation.
    `response_ids` is everything after the first prompt; `mask` is 1 on ids the model sampled (the
    end-of-turn token included) and 0 on all others; `log_probs` is 0.0 where the mask is 0. Messages that
    have no ids yet, those of the environment and turns given as text, get them when the model is asked next.
    """

    task: Mapping[str, Any]
    messages: list[Message]
    group_id: int = 0
    sample: int = 0
    where: str = ""  # the place of its row, "train.jsonl, row 3"; empty where the task is of no file
    source: str = ""  # the name of its source in a mix of environments; empty where there is one environment
    trajectory: int = -1  # its number among those of its collector; -1: of none
    max_completion_tokens: int = 0
    max_prompt_tokens: int | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)  # JSON schemas of the functions the model may call
    chat: bool = True  # False: the prompt is the text of its one message as it stands, without a chat template

    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    tokenised: int = 0  # how many of `messages` have their ids; 0: at most those of the first prompt
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_versions: list[PolicyVersionLabel] = field(default_factory=list)  # one a model turn: that it began under
    # after the first turn began, of each other version: the index in `response_ids` of the first id sampled under it
    version_changes: list[tuple[int, PolicyVersionLabel]] = field(default_factory=list)
    prompt_text: str = ""  # the rendered first prompt
    response_text: str = ""  # text of the model's last turn
    finish_reason: str = ""  # of the model's last turn; "context": no room was left for another
    tool_calls: int = 0  # calls that the environment ran
    tool_errors: int = 0  # calls that it could not run, or that failed

    reward: float | None = None  # None until the environment has scored the reply
    reward_parts: dict[str, float] = field(default_factory=dict)
    accuracy_strict: float | None = None  # None where the task has no 0/1 measure
    accuracy_lenient: float | None = None
    answer: str | None = None  # what the reply says, where the task reads an answer out of it: see Score
    instructions: dict[str, list[bool]] | None = None  # whether each is followed, where the task has some: see Score
    valid: bool = True  # False: the reward failed; the group is complete, its baseline excludes this one
    error: str | None = None
    terminated: bool = False
    truncated: bool = False

    @property
    def done(self) -> bool:
        """Whether the environment expects no further reply."""
        return self.terminated or self.truncated

    @property
    def key(self) -> tuple[int, int]:
        """What tells this conversation from every other of its environment, whichever snapshot of it is at hand."""
        return self.group_id, self.sample

    @property
    def turns(self) -> int:
        """Replies the model has given so far."""
        return len(self.policy_versions)

    @property
    def opening(self) -> int:
        """How many messages the first prompt has: those before the model's first turn."""
        replies = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        return replies[-self.turns] if self.turns else len(self.messages)

    @property
    def ends_sampled(self) -> bool:
        """Whether the last id is one that the model sampled, and not of a prompt for its next turn."""
        return self.mask[-1:] == [1]

    @property
    def query(self) -> str:
        """The task as the user's message states it."""
        return next((m["content"] for m in self.messages if m["role"] == "user"), "")

    @property
    def newest_version(self) -> PolicyVersionLabel:
        """The version that the last id was sampled under; -1 where the model has not spoken yet."""
        return self.version_changes[-1][1] if self.version_changes else (self.policy_versions or [-1])[-1]

    def token_versions(self) -> list[PolicyVersionLabel]:
        """The version that each of `response_ids` was sampled under; -1 where it was not sampled, or nothing tells."""
        versions: list[PolicyVersionLabel] = []
        starts = [(0, (self.policy_versions or [-1])[0]), *self.version_changes]
        if not {version for _, version in starts}.issuperset(self.policy_versions):  # saved without `version_changes`
            return [-1] * len(self.response_ids)
        ends = [start for start, _ in self.version_changes] + [len(self.response_ids)]
        for (start, version), end in zip(starts, ends, strict=True):
            versions += [version if sampled else -1 for sampled in self.mask[start:end]]
        return versions

    def add_completion(self, completion: Completion) -> None:
        """Append the model's turn, ids first, and its text as an assistant message; without ids it is text alone."""
        start = len(self.response_ids)
        if self.policy_versions and completion.policy_version != self.newest_version:
            self.version_changes.append((start, completion.policy_version))
        self.version_changes += [(start + index, version) for index, version in completion.version_changes]
        self.response_ids.extend(completion.token_ids)
        self.mask.extend([1] * len(completion.token_ids))
        self.log_probs.extend(completion.log_probs)
        self.policy_versions.append(completion.policy_version)
        self.response_text = completion.text
        self.finish_reason = completion.finish_reason
        self.messages.append({"role": "assistant", "content": completion.text})
        if completion.token_ids:
            self.tokenised = len(self.messages)

    def add_observation(self, token_ids: list[int]) -> None:
        """Append the ids of all messages that had none: the model reads them, and is not trained on them."""
        self.tokenised = len(self.messages)
        self.response_ids.extend(token_ids)
        self.mask.extend([0] * len(token_ids))
        self.log_probs.extend([0.0] * len(token_ids))

    def copy(self) -> Conversation:
        """A snapshot that later turns of this conversation do not change."""
        return replace(
            self,
            messages=list(self.messages),
            prompt_ids=list(self.prompt_ids),
            response_ids=list(self.response_ids),
            mask=list(self.mask),
            log_probs=list(self.log_probs),
            policy_versions=list(self.policy_versions),
            version_changes=list(self.version_changes),
            reward_parts=dict(self.reward_parts),
        )


def strip_end_of_turn(text: str, tokenizer: Any = None) -> str:
    """`text` without an end-of-turn marker at its end and the white space around that marker."""
    markers = (*END_OF_TURN, tokenizer.eos_token) if getattr(tokenizer, "eos_token", None) else END_OF_TURN
    bare = text.rstrip()
    for marker in markers:
        if bare.endswith(marker):
            return bare.removesuffix(marker).rstrip()
    return text


class InputMode(Enum):
    """Messages, the text that a chat template makes of them, or the ids of that text."""

    history = "history"
    text = "text"
    tokens = "tokens"

    @classmethod
    def of(cls, given: InputMode | str) -> InputMode:
        """The mode that is called `given`. Raises ConfigError for none."""
        return member(cls, "input_mode", given)
