"""LLMCollector with a model that samples: how much is delivered, wherever it goes."""

from __future__ import annotations

import queue
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from talk import scripted, talk, tokenizer
from tensordict import TensorDictBase

from rlpost.collectors import LLMCollector
from rlpost.data import ReplayBuffer
from rlpost.model.load import load_model
from rlpost.policies import TransformersWrapper
from rlpost.settings import ModelSettings

ROWS = [{"question": f"q{i}", "turns": 1} for i in range(5)]


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> TransformersWrapper:
    model = load_model(tiny_folder, ModelSettings(path=str(tiny_folder)))
    return TransformersWrapper(model, generate_kwargs={"max_new_tokens": 3})


def delivered(policy: Any, into: str, total: int) -> list[TensorDictBase]:
    """The batches that an environment of 4 conversations gives up to `total` turns."""
    buffer = ReplayBuffer() if into == "buffer" else None
    received: queue.Queue[TensorDictBase] | None = queue.Queue() if into == "queue" else None
    collector = LLMCollector(
        talk(4, rows=ROWS),
        policy=policy,
        dialog_turns_per_batch=4,
        total_dialog_turns=total,
        replay_buffer=buffer,
        queue=received,
    )
    batches = list(collector)
    if buffer is not None:
        assert set(batches) == {None}
        return [buffer.take(len(buffer))]
    if received is not None:
        assert set(batches) == {None}
        return [received.get_nowait() for _ in range(received.qsize())]
    return [batch for batch in batches if batch is not None]


@pytest.mark.parametrize("total", [1, 10, 20])
@pytest.mark.parametrize("into", ["buffer", "queue", "none"])
def test_whole_rounds_are_delivered_until_the_total_is_reached(
    policy: TransformersWrapper, into: str, total: int
) -> None:
    batches = delivered(policy, into, total)
    assert sum(batch.numel() for batch in batches) == max(4, ceil(total / 4) * 4)
    for batch in batches:
        rows = batch if batch.ndim == 1 else batch[:, 0]
        assert all(0 < ids.numel() <= 3 for ids in rows["tokens", "response"].unbind())


def test_the_next_prompt_goes_on_from_the_whole_of_the_last() -> None:
    rows = [{"question": "q", "turns": 3}]
    collector = LLMCollector(talk(1, rows=rows), policy=scripted("yes"), dialog_turns_per_batch=3, flatten_data=True)
    batch = next(iter(collector))
    assert batch is not None
    first, second, third = (ids.tolist() for ids in batch["tokens", "full"].unbind())
    asked = [
        tokenizer()(f"\n<|im_start|>user\nmore {i}<|im_end|>\n<|im_start|>assistant\n")["input_ids"] for i in (1, 2)
    ]
    reply = [*tokenizer()("yes")["input_ids"], tokenizer().eos_token_id]
    # a turn that the environment has answered holds the answer's text; its ids come with the next turn
    assert second == first + asked[0] + reply
    assert third == second + asked[1] + reply
