"""Between conversations and the TensorDicts of `reset` and `step`: one row a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from rlpost.data.batch import ragged, strings
from rlpost.data.conversation import Completion, Conversation
from rlpost.data.history import History
from rlpost.errors import DataError

END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>")


def rows_of(tensordict: TensorDictBase) -> list[dict[str, Any]]:
    """The entries of a reset TensorDict as one mapping a row; a plain `text` becomes `query`.

    Raises DataError without `text` and `query`.
    """
    plain = [name for name, value in tensordict.items() if not isinstance(value, TensorDict)]
    columns = {name: column(tensordict, name) for name in plain}
    if "query" not in columns and "text" not in columns:
        raise DataError(
            f"reset was given {', '.join(columns)} but neither 'text' nor 'query': give one of them, a str a row"
        )
    if "text" in columns:
        columns.setdefault("query", columns.pop("text"))
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def column(tensordict: TensorDictBase, key: str | tuple[str, ...]) -> list[Any]:
    """The entry `key`, one Python value (or tensor) a row."""
    value = tensordict.get(key)
    if isinstance(value, NonTensorStack):
        return value.tolist()
    if isinstance(value, torch.Tensor):
        return list(value.unbind(0))
    plain = getattr(value, "data", None)  # one value that stands for every row
    return [plain if isinstance(plain, str | int | float) else value[i] for i in range(tensordict.batch_size[0])]


def conversations_of(tensordict: TensorDictBase) -> list[Conversation]:
    """The conversations a reset or step put into `tensordict`. Raises DataError where there are none."""
    if "conversation" not in tensordict:
        raise DataError("this TensorDict holds no conversation: call reset, and give step what it returned")
    return column(tensordict, "conversation")


def observation(conversations: Sequence[Conversation], tokenizer: Any) -> dict[str, Any]:
    """What a policy is shown of `conversations`; the rendered prompt only with a tokenizer.

    Ids are given for a first prompt alone: later ones go on from the sampled ids, which no
    tokenising of the text can be trusted to give back.
    """

    def flag(values: Sequence[bool]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.bool).unsqueeze(-1)  # (B, 1)

    history = History.from_chats([c.messages for c in conversations])
    shown: dict[str, Any] = {
        "query": strings([c.query for c in conversations]),
        "history": history,
        "conversation": strings(conversations),
        "group_id": torch.tensor([c.group_id for c in conversations]),
        "sample": torch.tensor([c.sample for c in conversations]),
        "done": flag([c.done for c in conversations]),
        "terminated": flag([c.terminated for c in conversations]),
        "truncated": flag([c.truncated for c in conversations]),
    }
    if tokenizer is not None:
        texts = history.apply_chat_template(tokenizer)
        shown["text"] = {"prompt": strings(texts)}
        if not any(c.turns for c in conversations):
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            shown["tokens"] = {"prompt": ragged([torch.tensor(row, dtype=torch.int64) for row in ids])}
    return shown


def scores(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Rewards and accuracies after a step, (B, 1) each."""

    def numbers(values: Sequence[float | None], missing: float = float("nan")) -> torch.Tensor:
        return torch.tensor([missing if v is None else v for v in values], dtype=torch.float32).unsqueeze(-1)

    names = sorted({name for c in conversations for name in c.reward_parts})
    return {
        "reward": numbers([(c.reward or 0.0) if c.valid else None for c in conversations]),
        "reward_parts": {name: numbers([c.reward_parts.get(name) for c in conversations]) for name in names},
        "accuracy_strict": numbers([c.accuracy_strict for c in conversations]),
        "accuracy_lenient": numbers([c.accuracy_lenient for c in conversations]),
    }


def add_replies(conversations: Sequence[Conversation], tensordict: TensorDictBase, tokenizer: Any) -> None:
    """Append to each conversation, in place, the policy's turn that `tensordict` holds."""
    if "text_response" in tensordict:
        texts = [strip_end_of_turn(text, tokenizer) for text in column(tensordict, "text_response")]
        for conversation, text in zip(conversations, texts, strict=True):
            conversation.add_completion(Completion([], [], text, "stop", -1))
        return
    keys = set(tensordict.keys(include_nested=True))

    def read(key: str | tuple[str, ...], default: Any) -> list[Any]:
        return column(tensordict, key) if key in keys else [default] * len(conversations)

    texts = read(("text", "response"), None)
    ids = [[] if row is None else row.tolist() for row in read(("tokens", "response"), None)]
    log_probs = [None if row is None else row.tolist() for row in read(("log_probs", "response"), None)]
    reasons = read("finish_reason", "stop")
    versions = [int(v) if isinstance(v, torch.Tensor) else v for v in read("policy_version", -1)]
    prompts = read(("tokens", "prompt"), None)
    prompt_texts = read(("text", "prompt"), "")
    for i, conversation in enumerate(conversations):
        if not conversation.prompt_ids and prompts[i] is not None:
            conversation.prompt_ids, conversation.prompt_text = prompts[i].tolist(), prompt_texts[i]
        text = _text(texts[i], ids[i], tokenizer)
        row = log_probs[i]
        unknown = [float("nan")] * len(ids[i])
        conversation.add_completion(Completion(ids[i], unknown if row is None else row, text, reasons[i], versions[i]))


def _text(text: str | None, ids: Sequence[int], tokenizer: Any) -> str:
    if text is not None:
        return text
    if not ids or tokenizer is None:
        raise DataError(
            "step found no reply: set 'text_response', or let the policy write ('text', 'response'); "
            "('tokens', 'response') alone needs an environment with a tokenizer"
        )
    return tokenizer.decode(ids, skip_special_tokens=True)


def strip_end_of_turn(text: str, tokenizer: Any = None) -> str:
    """`text` without an end-of-turn marker at its end and the white space around that marker."""
    markers = (*END_OF_TURN, tokenizer.eos_token) if getattr(tokenizer, "eos_token", None) else END_OF_TURN
    bare = text.rstrip()
    for marker in markers:
        if bare.endswith(marker):
            return bare.removesuffix(marker).rstrip()
    return text
