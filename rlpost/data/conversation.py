"""A conversation in progress: plain Python, one object a trajectory.

Building and stacking a TensorDict for every turn costs more than the turn; `rlpost.data.batch`
turns a list of conversations into one TensorDict when a batch is delivered.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from rlpost.settings.base import member

Message = dict[str, Any]  # {"role": ..., "content": ...} and further entries for a chat template
PolicyVersionLabel = int | str
PADDING_ROLE = "<none>"  # fills the short rows of a ragged history; never rendered
END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "</s>")
CUT = ("length", "context")  # finish reasons of a truncated last turn: it was cut, or had no room to begin


@dataclass(slots=True)
class Conversation:
    """One trajectory: its messages, and exactly the ids that the model read and sampled.

    `group_id` numbers the draw of the prompt within the run and `sample` the completion within its
    group, so (run seed, group_id, sample) names the randomness of this conversation.
    `response_ids` is everything after the first prompt; `mask` is 1 on ids the model sampled (the
    end-of-turn token included) and 0 on all others; `log_probs` is 0.0 where the mask is 0. Messages
    without ids yet (the environment's, and turns given as text) get them before the model's next turn.
    `restarts` are the indices in `response_ids` where a whole new prompt begins; from there on the model
    reads none of the ids before it.
    """

    task: Mapping[str, Any]
    messages: list[Message]
    group_id: int = 0
    sample: int = 0
    where: str = ""  # the place of its row, "train.jsonl, row 3"; empty if the task is not from a file
    source: str = ""  # the name of its source in a mix of environments; empty without a mix
    trajectory: int = -1  # its number within its collector; -1: none
    max_completion_tokens: int = 0
    max_prompt_tokens: int | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)  # JSON schemas of the functions the model may call
    variables: dict[str, Any] | None = None  # of the chat template, from its row
    prefill: str = ""  # the beginning of the model's first turn, which the first prompt ends with
    chat: bool = True  # False: the prompt is the text of its one message as it stands, without a chat template
    as_template: bool = False  # whether each turn's prompt is rendered anew, so that the template may rewrite others

    hint: str | None = None  # what the reference reads in its prompt besides what the model reads

    prompt_ids: list[int] = field(default_factory=list)
    hinted_ids: list[int] = field(default_factory=list)  # the prompt with the hint; empty without one
    response_ids: list[int] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    tokenised: int = 0  # how many of `messages` have their ids; 0: at most those of the first prompt
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_versions: list[PolicyVersionLabel] = field(default_factory=list)  # at the beginning of each model turn
    # (index in `response_ids` of the first id, version) for each later version
    version_changes: list[tuple[int, PolicyVersionLabel]] = field(default_factory=list)
    prompt_text: str = ""  # the rendered first prompt
    opened: str = ""  # what the prompt holds of the model's turn: "<think>" and a line break, or a prefill
    response_text: str = ""  # text of the model's last turn
    finish_reason: str = ""  # of the model's last turn; "context": no room for another
    tool_calls: int = 0  # calls that the environment ran
    tool_errors: int = 0  # calls that it could not run, or that failed

    reward: float | None = None  # None until the environment has scored the reply
    reward_parts: dict[str, float] = field(default_factory=dict)
    part_weights: dict[str, float] = field(default_factory=dict)  # of each part in the reward
    accuracy_strict: float | None = None  # None where the task has no 0/1 measure
    accuracy_lenient: float | None = None
    answer: str | None = None  # the answer read from the reply, for some tasks: see Score
    instructions: dict[str, list[bool]] | None = None  # name -> whether each is followed, for some tasks: see Score
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
        """Identifies the conversation within its environment; the same in every snapshot of it."""
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
    def context(self) -> list[int]:
        """The ids that the model reads before its next turn."""
        return self.response_ids[self.restarts[-1] :] if self.restarts else self.prompt_ids + self.response_ids

    @property
    def ends_sampled(self) -> bool:
        """Whether the model sampled the last id; False if it belongs to the prompt of the next turn."""
        return self.mask[-1:] == [1]

    @property
    def query(self) -> str:
        """The content of the first user message."""
        return next((m["content"] for m in self.messages if m["role"] == "user"), "")

    @property
    def reply(self) -> str:
        """The text of the model's last turn, with the beginning of it that its prompt holds."""
        return self.opened + self.response_text

    @property
    def newest_version(self) -> PolicyVersionLabel:
        """The version that the last id was sampled under; -1 before the model's first turn."""
        return self.version_changes[-1][1] if self.version_changes else (self.policy_versions or [-1])[-1]

    def token_versions(self) -> list[PolicyVersionLabel]:
        """The version that each of `response_ids` was sampled under; -1 if not sampled, or unknown."""
        versions: list[PolicyVersionLabel] = []
        starts = [(0, (self.policy_versions or [-1])[0]), *self.version_changes]
        if not {version for _, version in starts}.issuperset(self.policy_versions):  # saved without `version_changes`
            return [-1] * len(self.response_ids)
        ends = [start for start, _ in self.version_changes] + [len(self.response_ids)]
        for (start, version), end in zip(starts, ends, strict=True):
            versions += [version if sampled else -1 for sampled in self.mask[start:end]]
        return versions

    def add_completion(self, completion: Completion) -> None:
        """Append the model's turn: its ids, if it has any, and its text as an assistant message."""
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
        self.messages.append({"role": "assistant", "content": self.reply})
        if completion.token_ids:
            self.tokenised = len(self.messages)

    def add_observation(self, token_ids: list[int]) -> None:
        """Append the ids of all messages without ids: the model reads them and is not trained on them."""
        self.tokenised = len(self.messages)
        self.response_ids.extend(token_ids)
        self.mask.extend([0] * len(token_ids))
        self.log_probs.extend([0.0] * len(token_ids))

    def begin_anew(self, token_ids: list[int]) -> None:
        """Append a whole prompt of all messages so far: the model reads it instead of all ids before it."""
        self.restarts.append(len(self.response_ids))
        self.add_observation(token_ids)

    def copy(self) -> Conversation:
        """A snapshot, which later turns of this conversation do not change."""
        held = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "task"}
        return replace(self, **{name: copy(value) for name, value in held.items() if isinstance(value, list | dict)})


@dataclass(slots=True)
class Completion:
    """A policy's answer to one prompt.

    `token_ids` are exactly the sampled ids, the end-of-turn token included where one was sampled;
    `log_probs` are log π of the sampler for each of them, of the distribution they were drawn from, at
    the sampling temperature; `text` is decoded from the ids without special tokens; `finish_reason` is
    "stop", at an end of turn or a stop string, or "length". It began under `policy_version`; for each later
    version, `version_changes` has the index of the first id that was sampled under it.
    """

    token_ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str
    policy_version: PolicyVersionLabel
    version_changes: list[tuple[int, PolicyVersionLabel]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ticket:
    """One draw of a prompt, from which its conversations are begun, in this process or in another.

    `group` numbers the draw and `samples` its conversations to begin: see `Conversation`.
    """

    group: int
    samples: list[int]
    task: Mapping[str, Any]
    where: str = ""


class InputMode(Enum):
    """The form in which an environment shows a conversation and a policy reads it: messages, their text, or its ids."""

    history = "history"
    text = "text"
    tokens = "tokens"

    @classmethod
    def of(cls, given: InputMode | str) -> InputMode:
        """The mode named `given`. Raises ConfigError for an unknown name."""
        return member(cls, "input_mode", given)


def next_version(version: PolicyVersionLabel) -> PolicyVersionLabel:
    """The version after `version`: one more, or for a uuid a new uuid4."""
    return version + 1 if isinstance(version, int) else str(uuid.uuid4())


def strip_end_of_turn(text: str, tokenizer: Any = None) -> str:
    """`text` without an end-of-turn marker at its end, nor the white space around it."""
    markers = (*END_OF_TURN, tokenizer.eos_token) if getattr(tokenizer, "eos_token", None) else END_OF_TURN
    bare = text.rstrip()
    for marker in markers:
        if bare.endswith(marker):
            return bare.removesuffix(marker).rstrip()
    return text
