"""What a GPU runs and a CPU does not: attention in one call for all sequences, or else in padded blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.estimate.needs import LOGITS_ON_GPU, parts_of, work_of
from rlpost.estimate.shape import shape_of_config
from rlpost.model import attention, logprobs
from rlpost.model.device import leave_room
from rlpost.model.logprobs import token_log_probs
from rlpost.model.lora import add_adapter
from rlpost.model.packing import Gathered, pack
from rlpost.model.trainable import recompute_activations
from rlpost.settings import LoRASettings
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

    def noted(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            calls.append((query.dtype, key.dtype, value.dtype, query.shape[1], key.shape[1]))
            return attend(query, key, value, *args, **named)

        return call

    def take() -> Calls:
        monkeypatch.setattr(attention, "SHORT", 0)
        if request.param == "in sequences":
            monkeypatch.setattr(attention, "takes_sequences", lambda query: True)
            monkeypatch.setattr(attention, "varlen_attn", noted(varlen))
        else:
            monkeypatch.setattr(attention, "attend_padded", noted(attention.attend_padded))
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


def test_the_trainer_leaves_an_engine_beside_it_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: fractions.append(part))
    for share, device in ((0.0, "cuda"), (0.4, "cpu"), (0.4, "cuda")):
        leave_room(share, torch.device(device))
    assert fractions == [pytest.approx(0.57)]


def test_keys_of_a_prompt_sum_their_gradients_in_float32() -> None:
    rows = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    Gathered.apply(rows, torch.zeros(3, dtype=torch.int64), True).backward(
        torch.tensor([256.0, 1, 1], dtype=torch.bfloat16)
    )  # type: ignore[attr-defined]
    assert rows.grad is not None
    assert rows.grad.item() == 258  # in bfloat16 256 + 1 is 256


# The memory of a microbatch, against the estimate

SHAPES = {  # narrower than the models
    "SmolLM2-135M": ("llama", 72, 192, 9, 3),
    "Qwen2.5-0.5B": ("qwen2", 112, 608, 14, 2),
    "Qwen2.5-7B": ("qwen2", 112, 592, 7, 1),
    "Qwen3-0.6B": ("qwen3", 128, 384, 16, 8),  # queries are wider than the model, and normed
    "Gemma 3 270M": ("gemma3_text", 80, 256, 4, 1),
}
HEAD_DIM = {"qwen3": 16, "gemma3_text": 32}


class _Kernel(torch.autograd.Function):
    """Keeps what the kernel keeps: its inputs, its output and the logarithm of each query's normaliser."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(query, key, value, out := query.clone(), torch.zeros(query.shape[1], len(query)))
        return out


def saved_bytes(model: PreTrainedModel, microbatch: Any, *, autocast: bool = True) -> int:
    """Bytes that a forward keeps for the backward, each storage once; weights and their casts apart."""
    weights = {size for p in model.parameters() for size in (tuple(p.shape), tuple(p.shape[::-1])) if p.ndim == 2}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # held, so that no address is given away again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tuple(tensor.shape) not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    products = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), products:
        token_log_probs(model, microbatch, 1.0)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def layers_of(name: str, layers: int, microbatch: Any, *, lora: bool = False) -> PreTrainedModel:
    """A random model in the proportions of `name`."""
    kind, hidden, intermediate, heads, kv_heads = SHAPES[name]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"head_dim": HEAD_DIM[kind]} if kind in HEAD_DIM else {}
    config = AutoConfig.for_model(kind, vocab_size=97, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if lora:
        add_adapter(model, LoRASettings(enabled=True, rank=2), "")
    with torch.no_grad():
        token_log_probs(model, microbatch, 1.0)  # the first call finds out how to read the model
    return model


def estimated(model: PreTrainedModel, layers: int, words: list[str], gpu_bytes: int | None, **given: Any) -> int:
    """Bytes of activations, by the estimate, of `layers` such layers."""
    shape = shape_of_config({**model.config.to_dict(), "num_hidden_layers": layers})
    assert shape is not None
    work = work_of(compose(TRAIN_GRPO, words).settings, shape, gpu_bytes=gpu_bytes)
    return next(part.bytes for part in parts_of(replace(work, **given)) if part.name == "activations")


@pytest.mark.parametrize("precision", ["none", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_on_a_cpu_keeps_what_the_estimate_says(name: str, precision: str) -> None:
    [microbatch] = pack(random_rows([(40, [40])] * 6), 10_000, CPU)
    models = [layers_of(name, count, microbatch) for count in (1, 3)]
    few, many = (saved_bytes(model, microbatch, autocast=precision == "bfloat16") for model in models)
    words = [f"model.autocast={precision}", "policy=transformers"]
    # a token of a prompt reads 40 keys at most, one of a completion 80
    given = {"longest": 60, "microbatch": microbatch.num_packed}
    one, three = (estimated(models[0], count, words, None, **given) for count in (1, 3))
    assert many - few == pytest.approx(three - one, rel=0.15)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_keeps_what_the_estimate_says(name: str, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    [microbatch] = pack(random_rows([(12, [30, 24, 18, 30]), (10, [20, 30, 28])]), 10_000, CPU)
    models = [layers_of(name, count, microbatch, lora=lora) for count in (1, 3)]
    monkeypatch.setattr(attention, "takes_sequences", lambda query: True)
    monkeypatch.setattr(attention, "varlen_attn", lambda query, key, value, *_, **__: _Kernel.apply(query, key, value))
    tokens = -(-microbatch.num_packed // logprobs.LENGTHS) * logprobs.LENGTHS  # a CPU fills them up
    words = [f"lora.enabled={lora}", "env.max_completion_tokens=1", f"tokens_per_microbatch={LOGITS_ON_GPU}"]
    for recomputes in (False, True):
        if recomputes:
            for model in models:
                recompute_activations(model)
        few, many = (saved_bytes(model, microbatch) for model in models)
        chosen = [*words, f"model.activation_checkpointing={recomputes}"]
        one, three = (estimated(models[0], count, chosen, 10**10) for count in (1, 3))
        assert (many - few) / tokens == pytest.approx((three - one) / LOGITS_ON_GPU, rel=0.15)
