"""The policy's turn, taken out of the TensorDict that it was written into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import Completion, Conversation, strip_end_of_turn
from rlpost.data.history import History
from rlpost.data.input_mode import InputMode
from rlpost.data.ragged import ATTENTION, Key, column
from rlpost.errors import DataError


def add_replies(
    conversations: Sequence[Conversation],
    tensordict: TensorDictBase,
    tokenizer: Any,
    mode: InputMode = InputMode.history,
) -> None:
    """Append to each conversation, in place, the policy's turn that `tensordict` holds.

    In the mode tokens that is the ids, and their text what they decode to; in the mode text it is the
    text; in the mode history the text, or else what the ids decode to, or the last message. Ids that
    the policy read and that are not carried forward yet are the environment's. Raises DataError where
    there is no turn in that form, and where the policy read other ids than those carried forward.
    """
    written = _Written(tensordict, len(conversations))
    ids = written.ids()
    texts = written.texts(conversations, ids, tokenizer, mode)
    log_probs = written.log_probs()
    reasons, versions = written.entries("finish_reason", "stop"), written.entries("policy_version", -1)
    prompts, prompt_texts = written.part("tokens", "prompt"), written.entries(("text", "prompt"), "")
    for i, conversation in enumerate(conversations):
        _add_prompt(conversation, prompts[i], prompt_texts[i])
        if reasons[i] == "context":  # no room was left for a turn, and none was taken
            conversation.finish_reason = "context"
            continue
        sampled = ids[i] or []
        known = log_probs[i]
        version = int(versions[i]) if isinstance(versions[i], torch.Tensor) else versions[i]
        unknown = [float("nan")] * len(sampled)
        completion = Completion(sampled, unknown if known is None else known, texts[i], reasons[i], version)
        conversation.add_completion(completion)


def _add_prompt(conversation: Conversation, read: list[int] | None, text: str) -> None:
    """Add the ids that the policy read to those the conversation carries."""
    if not conversation.turns:
        conversation.prompt_text = conversation.prompt_text or text
    if read is None:
        return
    if not conversation.prompt_ids and not conversation.response_ids:
        conversation.prompt_ids, conversation.tokenised = read, len(conversation.messages)
    carried = conversation.prompt_ids + conversation.response_ids
    if not conversation.prompt_ids or read == carried[: len(read)]:
        return  # an earlier turn came without the ids of its prompt, or the prompt is still that of an earlier turn
    if read[: len(carried)] != carried:
        raise DataError(
            f"the policy read other ids in turn {conversation.turns + 1} than those of the turns before: give it the "
            "('tokens', 'prompt') of the environment, or let it go on from what it sampled"
        )
    conversation.add_observation(read[len(carried) :])


class _Written:
    """What a policy wrote into a TensorDict, read row by row."""

    def __init__(self, tensordict: TensorDictBase, size: int) -> None:
        self._tensordict = tensordict
        self._keys = set(tensordict.keys(include_nested=True))
        self._size = size

    def entries(self, key: Key, missing: Any) -> list[Any]:
        """The entry `key`, or `missing` for each row."""
        return column(self._tensordict, key) if key in self._keys else [missing] * self._size

    def part(self, group: str, name: str) -> list[Any]:
        """`prompt` or `response` of a group, a list without its pads a row; None where it was not written."""
        rows = self.entries((group, name), None)
        return self._unpadded(rows, ATTENTION, first=name == "prompt")

    def _unpadded(self, rows: Sequence[torch.Tensor | None], key: Key, *, first: bool) -> list[Any]:
        """The rows as lists without pads: those of prompts are told by the first places of the mask `key`, if it is
        padded too, those of responses by its last.
        """
        if key not in self._keys or rows[0] is None or self._tensordict.get(key).is_nested:
            return [None if row is None else row.tolist() for row in rows]
        width = rows[0].numel()
        masks = [mask.bool() for mask in column(self._tensordict, key)]
        if masks[0].numel() < width:
            raise DataError(f"a row has {width} places and {key!r} {masks[0].numel()}: it is for the whole sequence")
        kept = [mask[:width] if first else mask[mask.numel() - width :] for mask in masks]
        return [None if row is None else row[mask].tolist() for row, mask in zip(rows, kept, strict=True)]

    def ids(self) -> list[list[int] | None]:
        """The sampled ids of each row: as such, or what `full` has behind the prompt."""
        if "tokens_response" in self._keys:
            return self._unpadded(column(self._tensordict, "tokens_response"), "attention_mask", first=False)
        if ("tokens", "response") in self._keys or ("tokens", "full") not in self._keys:
            return self.part("tokens", "response")
        prompts = self.part("tokens", "prompt")
        rows = self._unpadded(column(self._tensordict, ("tokens", "full")), ATTENTION, first=True)
        return [self._behind(full, prompt, ("tokens", "full")) for full, prompt in zip(rows, prompts, strict=True)]

    def log_probs(self) -> list[list[float] | None]:
        """The sampler's log-probs of the sampled ids."""
        return self.part("log_probs", "response")

    def texts(
        self,
        conversations: Sequence[Conversation],
        ids: Sequence[list[int] | None],
        tokenizer: Any,
        mode: InputMode,
    ) -> list[str]:
        """The reply of each row as text, without its end of turn."""
        if mode is InputMode.tokens:
            if any(row is None for row in ids):
                raise DataError(
                    "step found no ids: with input_mode='tokens' the reply is ('tokens', 'response'), "
                    "'tokens_response' or ('tokens', 'full')"
                )
            if tokenizer is None:  # of prompts that began as ids, whose text nobody asks for
                return [""] * self._size
            return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
        for key in ("text_response", ("text", "response")):
            if key in self._keys:
                return [strip_end_of_turn(text, tokenizer) for text in column(self._tensordict, key)]
        if mode is InputMode.text:
            return self._texts_in_full(tokenizer)
        if tokenizer is not None and all(ids):
            return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
        return self._last_messages(conversations)

    def _texts_in_full(self, tokenizer: Any) -> list[str]:
        if ("text", "full") not in self._keys:
            raise DataError(
                "step found no text: with input_mode='text' the reply is 'text_response', ('text', 'response') or "
                "('text', 'full')"
            )
        pairs = zip(self.entries(("text", "full"), ""), self.entries(("text", "prompt"), None), strict=True)
        return [strip_end_of_turn(self._behind(full, prompt, ("text", "full")), tokenizer) for full, prompt in pairs]

    def _last_messages(self, conversations: Sequence[Conversation]) -> list[str]:
        """The messages that the policy appended to the histories it was shown."""
        history = self._tensordict.get("history", None)
        chats = history.to_chats() if isinstance(history, History) else [[]] * self._size
        for conversation, chat in zip(conversations, chats, strict=True):
            if len(chat) != len(conversation.messages) + 1 or chat[-1]["role"] != "assistant":
                raise DataError(
                    "step found no reply: set 'text_response', or let the policy write ('text', 'response'); "
                    "('tokens', 'response') alone needs an environment with a tokenizer"
                )
        return [chat[-1]["content"] for chat in chats]

    def _behind(self, full: Any, prompt: Any, key: Key) -> Any:
        """What a whole sequence has behind its prompt. Raises DataError where it does not begin with it."""
        if prompt is None or full[: len(prompt)] != prompt:
            raise DataError(f"{key} does not begin with the prompt it is to continue: write the response instead")
        return full[len(prompt) :]
