"""What a GPU runs and a CPU does not: attention in one call for all sequences, or else in padded blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from rlpost.model import logprobs
from rlpost.model.logprobs import token_log_probs
from rlpost.model.packing import pack
from tests.model.test_logprobs import ALIKE, ARCHITECTURES, DIFFERENT, random_rows, small_model

CPU = torch.device("cpu")
Calls = list[tuple[Any, ...]]  # of attention: the dtypes of query, key and value, and the heads of query and key


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """`torch.nn.attention.varlen.varlen_attn` by its documentation: one sequence after the other, causal at the end."""
    left, right = window_size
    assert right == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query_ends.dtype == key_ends.dtype == torch.int32
    outputs = []
    for n in range(len(query_ends) - 1):
        q = query[query_ends[n] : query_ends[n + 1]].transpose(0, 1)
        k, v = (states[key_ends[n] : key_ends[n + 1]].transpose(0, 1) for states in (key, value))
        assert q.shape[1] <= most_queries
        assert k.shape[1] <= most_keys
        distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        seen = (distance >= 0) & ((distance <= left) if left >= 0 else True)
        repeat = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        scores = (q @ k.transpose(-1, -2)) * (scale if scale is not None else q.shape[-1] ** -0.5)
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture(params=["in sequences", "in padded blocks"])
def take_road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Calls]:
    """Go the way of a GPU with the kernel from now on, or of one without; returns the calls of attention."""
    calls: Calls = []

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        calls.append((query.dtype, key.dtype, value.dtype, query.shape[1], key.shape[1]))
        return varlen(query, key, value, *args, **named)

    def padded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append((query.dtype, key.dtype, value.dtype, query.shape[1], key.shape[1]))
        return attend(query, key, value, *args)

    attend = logprobs.attend_padded

    def take() -> Calls:
        monkeypatch.setattr(logprobs, "SHORT", 0)
        if request.param == "in sequences":
            monkeypatch.setattr(logprobs, "takes_sequences", lambda query: True)
            monkeypatch.setattr(logprobs, "varlen_attn", kernel)
        else:
            monkeypatch.setattr(logprobs, "attend_padded", padded)
        return calls

    return take


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("sizes", [DIFFERENT, ALIKE], ids=["different shapes", "shapes alike"])
def test_value_and_gradient_are_those_of_the_road_on_a_cpu(
    kind: str, sizes: list[tuple[int, list[int]]], take_road: Callable[[], Calls]
) -> None:
    model = small_model(kind, torch.float32)
    [microbatch] = pack(random_rows(sizes), 10_000, CPU)
    weights = torch.randn(2, len(microbatch.target))

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        log_probs, entropy = token_log_probs(model, microbatch, 0.9)
        (weights[0] * log_probs + weights[1] * entropy).sum().backward()
        return log_probs.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    log_probs, gradient = read()
    calls = take_road()
    on_gpu, gradient_on_gpu = read()
    assert calls
    torch.testing.assert_close(on_gpu, log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient_on_gpu, gradient, atol=1e-5 * gradient.abs().max().item(), rtol=1e-5)


def test_attention_gets_one_dtype_and_unexpanded_keys_once_a_layer(take_road: Callable[[], Calls]) -> None:
    model = small_model("qwen2", torch.float32)
    [microbatch] = pack(random_rows(DIFFERENT), 10_000, CPU)
    road = take_road()
    with torch.no_grad():
        token_log_probs(model, microbatch, 1.0)  # the first call finds out how to read the model
        road.clear()
        with torch.autocast("cpu", torch.bfloat16):
            token_log_probs(model, microbatch, 1.0)
    assert {dtype for call in road for dtype in call[:3]} == {torch.bfloat16}
    layers = model.config.num_hidden_layers
    blocks = len(microbatch.layout.blocks)
    heads = {call[3:] for call in road}
    assert (len(road), heads) in [(layers, {(4, 1)}), (2 * blocks * layers, {(4, 4)})]


def test_a_row_is_described_as_sequences() -> None:
    [microbatch] = pack(random_rows([(3, [2, 1]), (3, [1, 2])]), 100, CPU)  # one block: both prompts come first
    sequences = microbatch.layout.sequences
    assert sequences.query_ends.tolist() == [0, 3, 6, 8, 9, 10, 12]
    assert sequences.key_ends.tolist() == [0, 3, 6, 11, 15, 19, 24]
    first, second = [0, 1, 2], [3, 4, 5]
    expected = [first, second, [*first, 6, 7], [*first, 8], [*second, 9], [*second, 10, 11]]
    assert sequences.keys.tolist() == [place for own in expected for place in own]
    assert (sequences.most_queries, sequences.most_keys, sequences.num_tokens) == (3, 5, 12)


def test_keys_of_a_prompt_sum_their_gradients_in_float32() -> None:
    from rlpost.model.packing import Repeated

    rows = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    Repeated.apply(rows, torch.zeros(3, dtype=torch.int64)).backward(torch.tensor([256.0, 1, 1], dtype=torch.bfloat16))  # type: ignore[attr-defined]
    assert rows.grad is not None
    assert rows.grad.item() == 258  # in bfloat16 256 + 1 is 256


def test_the_mask_that_flash_takes_is_the_own_one() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    own = scaled_dot_product_attention(query, key, value, logprobs.causal_mask(5, 4, None, CPU))
    biased = scaled_dot_product_attention(query, key, value, causal_lower_right(5, 9))
    torch.testing.assert_close(biased, own)
