"""Environments as TensorDicts: what `reset`, `step` and `rollout` show and take, and a callable as a policy.

`flat_batch` writes completions of plain text in the dense layout of `LLMData` (B rows, P the longest prompt, R the
longest response):

    text, text_response              str: the first prompt, and everything the model said after it
    tokens                           int64 (B, P + R): prompts, padded on the left, and responses, on the right
    tokens_response                  int64 (B, R): the latter half of `tokens`
    attention_mask                   int64 (B, P + R): 1 on ids, 0 on pads
    log_probs                        float32 (B, R): the sampler's, 0 on pads
    policy_version, policy_version_max, group_id, sample, valid, finish_reason and `next`
                                     as in `rlpost.data.batch`
    done, terminated, truncated      bool (B, 1): False, since no turn is taken in a conversation that is over
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from rlpost.data.batch import batch_from_conversations
from rlpost.data.chat import Continuation
from rlpost.data.conversation import Completion, Conversation, InputMode, strip_end_of_turn
from rlpost.data.history import History
from rlpost.data.ragged import Key, column, one_each, padded, ragged, strings, token_fields, versions
from rlpost.envs.base import EnvBase
from rlpost.errors import DataError, PolicyError
from rlpost.policies.base import Policy, Request
from rlpost.settings import SamplingSettings
from rlpost.text import with_calls
from rlpost.torchrl.policies import put
from rlpost.torchrl.sequences import rows_of

FLAT_AS_NESTED = ("policy_version", "policy_version_max", "group_id", "sample", "valid", "finish_reason", "next")
TDPolicy = Callable[[TensorDictBase], TensorDictBase]
PAD = 0  # of `flat_batch`; the attention mask tells pads from ids


class EnvFace:
    """An environment played as TensorDicts: see `EnvBase` for what each method does."""

    def __init__(self, env: EnvBase) -> None:
        self.env = env
        self.continuation = None if env.tokenizer is None else Continuation(env.tokenizer)

    def reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        """See `EnvBase.reset`."""
        self.env.abandon()
        if tensordict is None or tensordict.is_empty():
            return self.observe(self.env.draw())
        return self.observe(self.env.begin(self.env.rows_of(tensordict)))

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """See `EnvBase.step`."""
        conversations = [conversation.copy() for conversation in column(tensordict, "conversation")]
        if any(conversation.done for conversation in conversations):
            raise DataError("a conversation of this step is over: use step_and_maybe_reset, or reset first")
        add_replies(conversations, tensordict, self.env.tokenizer, self.env.input_mode)
        self.env.advance(conversations)
        following = self.observe(conversations)
        following.update(scores(conversations))
        return self.env.transformed(tensordict.set("next", following))

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """See `EnvBase.step_and_maybe_reset`."""
        stepped = self.env.step(tensordict)
        return stepped, self._following(stepped)

    def _following(self, stepped: TensorDictBase) -> TensorDictBase:
        """The observation after a step, with a new conversation in place of each that is over."""
        conversations = column(stepped["next"], "conversation")
        over = sum(conversation.done for conversation in conversations)
        fresh = iter(self.env.draw(over) if over else [])
        return self.observe([next(fresh) if c.done else c for c in conversations])

    def rollout(
        self, max_steps: int, policy: TDPolicy, tensordict: TensorDictBase | None, *, break_when_any_done: bool
    ) -> TensorDictBase:
        """See `EnvBase.rollout`."""
        steps = []
        current = self.env.reset(tensordict)
        for _ in range(max_steps):
            steps.append(self.env.step(policy(current)))
            if break_when_any_done and steps[-1]["next", "done"].any():
                break
            current = self._following(steps[-1])
        return lazy_stack(steps, dim=1)

    def observe(self, conversations: Sequence[Conversation]) -> TensorDictBase:
        """See `EnvBase.observe`."""
        shown = observation(conversations, self.env.input_mode, self.continuation)
        observed: TensorDictBase = TensorDict(shown, batch_size=[len(conversations)])
        for transform in self.env.transforms:
            observed = transform(observed)
        return observed

    def rows_of(self, tensordict: TensorDictBase) -> list[dict[str, Any]]:
        """See `EnvBase.rows_of`."""
        rows = rows_as_dicts(tensordict)
        if not {"text", "query"} & rows[0].keys():
            raise DataError(
                f"reset was given {', '.join(rows[0])} but neither 'text' nor 'query': give one of them, a str a row"
            )
        return [{"query": row.pop("text"), **row} if "text" in row else row for row in rows]


def rows_as_dicts(tensordict: TensorDictBase) -> list[dict[str, Any]]:
    """The entries of each row, those of groups aside."""
    columns = {n: column(tensordict, n) for n, value in tensordict.items() if not isinstance(value, TensorDict)}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


# What an environment shows, and the turn that it takes


def observation(
    conversations: Sequence[Conversation], mode: InputMode, continuation: Continuation | None
) -> dict[str, Any]:
    """The entries of `conversations` that a policy sees, in the form of `mode`.

    In the mode history, a `continuation` adds the text and the ids of the messages. Raises DataError if the chat
    template refuses a conversation, or renders earlier messages differently once more follow.
    """
    shown: dict[str, Any] = {
        "query": strings([c.query for c in conversations]),
        "conversation": strings(conversations),
        "group_id": torch.tensor([c.group_id for c in conversations]),
        "sample": torch.tensor([c.sample for c in conversations]),
        "done": one_each([c.done for c in conversations], torch.bool),
        "terminated": one_each([c.terminated for c in conversations], torch.bool),
        "truncated": one_each([c.truncated for c in conversations], torch.bool),
    }
    if mode is InputMode.history:
        shown["history"] = History.from_chats([c.messages for c in conversations])
        if continuation is None:
            return shown
    ids = [_read(c, continuation) for c in conversations]
    if mode is not InputMode.tokens:
        texts = [_text(c, read, continuation) for c, read in zip(conversations, ids, strict=True)]
        shown["text"] = {"prompt": strings(texts)}
    if mode is not InputMode.text:
        shown["tokens"] = {"prompt": ragged([torch.tensor(read, dtype=torch.int64) for read in ids])}
    return shown


def _read(conversation: Conversation, continuation: Continuation | None) -> list[int]:
    """The ids that a policy reads next: the ids so far, and the new messages' unless the conversation is over."""
    extended = conversation.copy()
    if continuation is not None:  # without which prompts that began as ids go on
        if not extended.prompt_ids:
            continuation.begin(extended)
        if extended.turns and not extended.done:
            extended.add_observation(continuation.observation_ids(extended))
    return extended.prompt_ids + extended.response_ids


def _text(conversation: Conversation, read: list[int], continuation: Continuation | None) -> str:
    """The text of the ids that a policy `read`s next, or of the messages if the ids are not those of all messages."""
    if continuation is None:  # the text of plain prompts
        return "".join(message["content"] for message in conversation.messages)
    if conversation.turns and (conversation.ends_sampled or not conversation.done):
        return continuation.tokenizer.decode(read)
    return continuation.text(conversation)


def scores(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Rewards and accuracies after a step, (B, 1) each."""
    names = sorted({name for c in conversations for name in c.reward_parts})
    return {
        "reward": one_each([(c.reward or 0.0) if c.valid else None for c in conversations]),
        "reward_parts": {name: one_each([c.reward_parts.get(name) for c in conversations]) for name in names},
        "accuracy_strict": one_each([c.accuracy_strict for c in conversations]),
        "accuracy_lenient": one_each([c.accuracy_lenient for c in conversations]),
    }


def add_replies(
    conversations: Sequence[Conversation],
    tensordict: TensorDictBase,
    tokenizer: Any,
    mode: InputMode = InputMode.history,
) -> None:
    """Append to each conversation, in place, the policy's turn that `tensordict` holds.

    In the mode tokens the turn is the ids, with their decoded text; in the mode text it is the text; in the mode
    history it is the text, else the decoded ids, else the last message. Ids that the policy read and that are not
    carried forward yet are the environment's. Raises DataError if there is no turn in that form, and if the policy
    read other ids than those carried forward.
    """
    nothing: list[Any] = [None] * len(conversations)
    prompts, sampled = _ids(tensordict, ("tokens", "prompt")) or nothing, _sampled(tensordict)
    texts = _texts(tensordict, conversations, sampled, tokenizer, mode)
    log_probs = _ids(tensordict, ("log_probs", "response"), last=True) or nothing
    reasons = _entry(tensordict, "finish_reason") or ["stop"] * len(conversations)
    labels = _entry(tensordict, "policy_version") or [-1] * len(conversations)
    rendered = _entry(tensordict, ("text", "prompt")) or [""] * len(conversations)
    for i, conversation in enumerate(conversations):
        _add_prompt(conversation, prompts[i], rendered[i])
        if reasons[i] == "context":  # no room was left for a turn, and none was taken
            conversation.finish_reason = "context"
            continue
        ids = [] if sampled is None else sampled[i]
        known = [float("nan")] * len(ids) if log_probs[i] is None else log_probs[i]
        version = int(labels[i]) if isinstance(labels[i], torch.Tensor) else labels[i]
        conversation.add_completion(Completion(ids, known, texts[i], reasons[i], version))


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


def _entry(tensordict: TensorDictBase, key: Key) -> list[Any] | None:
    """The entry `key`, one value a row; None if the policy did not write it."""
    return column(tensordict, key) if key in tensordict.keys(include_nested=True) else None


def _ids(tensordict: TensorDictBase, key: Key, *, last: bool = False) -> list[Any] | None:
    rows = rows_of(tensordict, key, last=last)
    return rows and [row.tolist() for row in rows]


def _sampled(tensordict: TensorDictBase) -> list[list[int]] | None:
    """The sampled ids of each row: the response, or the part of `full` behind the prompt; None if there are none."""
    response = _ids(tensordict, "tokens_response", last=True) or _ids(tensordict, ("tokens", "response"), last=True)
    return response or _behind(_ids(tensordict, ("tokens", "full")), _ids(tensordict, ("tokens", "prompt")))


def _texts(
    tensordict: TensorDictBase,
    conversations: Sequence[Conversation],
    sampled: list[list[int]] | None,
    tokenizer: Any,
    mode: InputMode,
) -> list[str]:
    """The reply of each row as text, without its end of turn: the last message of the history if nothing else is.

    Raises DataError if there is none.
    """
    if mode is not InputMode.tokens:
        texts = _entry(tensordict, "text_response") or _entry(tensordict, ("text", "response"))
        if texts is None and mode is InputMode.text:
            texts = _behind(_entry(tensordict, ("text", "full")), _entry(tensordict, ("text", "prompt")))
        if texts is not None:
            return [strip_end_of_turn(text, tokenizer) for text in texts]
    if sampled is not None and (mode is InputMode.tokens or (tokenizer is not None and all(sampled))):
        # without a tokenizer the prompts began as ids
        return ["" if tokenizer is None else tokenizer.decode(row, skip_special_tokens=True) for row in sampled]
    history = tensordict.get("history", None)
    chats = history.to_chats() if isinstance(history, History) else [[]] * len(conversations)
    for conversation, messages in zip(conversations, chats, strict=True):
        if len(messages) != len(conversation.messages) + 1 or messages[-1]["role"] != "assistant":
            raise DataError(
                "step found no reply: set 'text_response', or let the policy write ('text', 'response'); "
                "('tokens', 'response') alone needs an environment with a tokenizer"
            )
    return [messages[-1]["content"] for messages in chats]


def _behind(whole: list[Any] | None, prompts: list[Any] | None) -> list[Any] | None:
    """The part of each sequence behind its prompt. Raises DataError if one does not begin with it."""
    if whole is None or prompts is None:
        return None
    for full, prompt in zip(whole, prompts, strict=True):
        if full[: len(prompt)] != prompt:
            raise DataError("a policy's `full` does not begin with the prompt it is to continue: write the response")
    return [full[len(prompt) :] for full, prompt in zip(whole, prompts, strict=True)]


# A callable as a policy, and the batches of `LLMData`


class CalledPolicy(Policy):
    """Passes the output of `env.reset` and `env.step` to `called`, and takes the turn that it writes.

    `called` is any callable that takes a TensorDict (B,) and returns it with a turn in it, such as a
    TensorDictModule. A module is the policy's `model`, so that a push reaches its weights. It samples in its own way:
    without ids a turn is text alone, and missing log-probs are NaN.
    """

    def __init__(self, called: TDPolicy, env: EnvBase) -> None:
        super().__init__(sampling=SamplingSettings())
        self.called = called
        self.env = env
        self.tokenizer: Any = env.tokenizer
        self.model = called if isinstance(called, torch.nn.Module) else None

    def reply(self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None) -> None:
        """See `Policy.reply`; `called` samples in its own way."""
        if not conversations:
            return
        shown = self.env.observe(conversations)
        written = self.called(shown)
        if "policy_version" not in written.keys():  # noqa: SIM118  a TensorDict iterates over its rows
            written.set("policy_version", versions([self.version] * len(conversations)))
        if written is not shown:
            written = put(shown, written)
        add_replies(conversations, written, self.tokenizer, self.env.input_mode)

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """Raises PolicyError: `called` reads TensorDicts, not ids."""
        raise PolicyError("a callable policy answers whole conversations: give an rlpost.policies.Policy to sample ids")


def flat_batch(conversations: Sequence[Conversation]) -> TensorDict:
    """Completions in the layout of `LLMData`, (B,), as described at the top of this file."""
    prompts, responses = [c.prompt_ids for c in conversations], [c.response_ids for c in conversations]
    tokens = token_fields(prompts, responses, torch.int64, PAD)
    before, after = ([[1] * len(ids) for ids in rows] for rows in (prompts, responses))
    log_probs = [torch.tensor(c.log_probs, dtype=torch.float32) for c in conversations]
    texts = ["".join(with_calls(m) for m in c.messages if m["role"] == "assistant") for c in conversations]
    flat = batch_from_conversations(conversations).select(*FLAT_AS_NESTED)
    flat.set("text", strings([c.prompt_text for c in conversations]))
    flat.set("text_response", strings(texts))
    flat.set("tokens", tokens["full"])
    flat.set("tokens_response", tokens["response"])
    flat.set("attention_mask", token_fields(before, after, torch.int64, PAD)["full"])
    flat.set("log_probs", padded(log_probs, PAD))
    for name in ("done", "terminated", "truncated"):
        flat.set(name, torch.zeros(len(conversations), 1, dtype=torch.bool))
    return flat
