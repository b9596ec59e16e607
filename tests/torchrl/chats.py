"""Two conversations with the tiny tokenizer, and the log-probs of their answers by a plain forward."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from rlpost.data import History
from rlpost.data.ragged import ragged

CHATS = [
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
]
ANSWERS = ["4<|im_end|>", "hello<|im_end|>"]
TRAINED = [2, 6]  # a byte is a token, and the end of the turn is one


def answers(model: Any, tokenizer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The ids of each chat, and log π of its answer's tokens by the plain forward of that chat alone."""
    all_ids, log_probs = [], []
    for chat, answer, count in zip(CHATS, ANSWERS, TRAINED, strict=True):
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        end = len(ids) - 1  # the template ends in a line break, which nobody is to learn
        assert tokenizer.decode(ids[end - count : end]) == answer
        log_p = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        all_ids.append(ids)
        log_probs.append(log_p[end - 1 - count : end - 1])  # the log-prob at i is of the id at i + 1
    return all_ids, log_probs


def batch(**of_others: list[torch.Tensor]) -> TensorDict:
    """The chats, with log-probs of a reference or a teacher, by name."""
    fields: dict[str, Any] = {"history": {"full": History.from_chats(CHATS)}}
    fields["next"] = {name: {"full": ragged(rows)} for name, rows in of_others.items()}
    return TensorDict(fields, batch_size=[len(CHATS)])


def shifted(model: Any, tokenizer: Any, shift: float) -> list[torch.Tensor]:
    """The model's own log-probs plus `shift` at the answers, and nonsense at every other id."""
    rows = []
    for ids, values in zip(*answers(model, tokenizer), strict=True):
        row, end = torch.full((ids.numel(),), -77.0, dtype=torch.float64), ids.numel() - 1
        row[end - values.numel() : end] = values.detach() + shift
        rows.append(row)
    return rows
