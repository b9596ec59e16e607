"""Packed, prompt-sharing log-probs against a model's own forward on each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlpost.errors import ConfigError
from rlpost.model import logprobs as logprobs_module
from rlpost.model.logprobs import chunked_log_probs, token_log_probs
from rlpost.model.lora import add_adapter
from rlpost.model.packing import Row, pack
from rlpost.model.precision import autocast
from rlpost.model.trainable import recompute_activations
from rlpost.settings import Autocast, LoRASettings
from tests.model_families import own_log_probs

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ARCHITECTURES = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 6},  # shorter than the sequences below
}


def small_model(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=97, **SMALL, **ARCHITECTURES[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def random_rows(sizes: Sequence[tuple[int, Sequence[int]]]) -> list[Row]:
    """One group for each (prompt length, completion lengths)."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for prompt_length, lengths in sizes:
        prompt = torch.randint(0, 97, (prompt_length,), generator=generator)
        for length in lengths:
            response = torch.randint(0, 97, (length,), generator=generator)
            sampled = torch.rand(length, generator=generator) < 0.8
            advantage = torch.randn((), generator=generator).item()
            rows.append(Row(prompt, response, sampled, torch.zeros(length), advantage))
    return rows


DIFFERENT = [(7, [3, 9, 1]), (4, [5]), (11, [2, 8])]
ALIKE = [(4, [3, 2]), (4, [2, 2]), (4, [1, 3]), (4, [2, 3, 1]), (4, [3, 1, 2]), (6, [2, 2])]


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("sizes", [DIFFERENT, ALIKE], ids=["different shapes", "shapes alike"])
def test_packed_log_probs_are_those_of_each_sequence_alone(
    kind: str, temperature: float, sizes: list[tuple[int, list[int]]]
) -> None:
    model = small_model(kind)
    rows = random_rows(sizes)
    [microbatch] = pack(rows, 10_000, torch.device("cpu"))
    with torch.no_grad():
        log_probs, entropy = token_log_probs(model, microbatch, temperature)
        expected = [own_log_probs(model, row, temperature) for row in rows]
    torch.testing.assert_close(log_probs, torch.cat([e[0] for e in expected]), atol=3e-6, rtol=0, check_dtype=False)
    torch.testing.assert_close(entropy, torch.cat([e[1] for e in expected]), atol=3e-5, rtol=0, check_dtype=False)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (ALIKE, [3, 2, 1]),
        (DIFFERENT, [1, 1, 1]),
        ([(2, [3, 3]), (2, [3, 90]), (2, [3, 3]), (2, [3, 3])], [1, 1, 2]),  # a long one does not pad its neighbours
    ],
)
def test_neighbouring_groups_of_one_shape_are_attended_together(
    sizes: list[tuple[int, list[int]]], expected: list[int]
) -> None:
    [microbatch] = pack(random_rows(sizes), 10_000, torch.device("cpu"))
    assert [block.num_prompts for block in microbatch.layout.blocks] == expected


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("of_log_prob", "of_entropy"), [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_the_chunked_gradient_is_that_of_full_logits(
    bias: bool, of_log_prob: float, of_entropy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "CHUNK", 4)  # 10 tokens, and 22 that fill up, in chunks of 4
    monkeypatch.setattr(logprobs_module, "HEAD_ROWS", 5)  # 13 rows in 5, 5 and 3
    torch.manual_seed(0)
    hidden = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(5, 13, bias=bias).double()
    target, weights = torch.randint(0, 13, (10,)), torch.randn(2, 10, dtype=torch.float64)
    leaves = [hidden, *head.parameters()]

    def gradients(log_probs: torch.Tensor, entropy: torch.Tensor) -> list[torch.Tensor]:
        each = ((of_log_prob, weights[0], log_probs), (of_entropy, weights[1], entropy))
        total = torch.stack([coef * (weight * values).sum() for coef, weight, values in each if coef])
        return list(torch.autograd.grad(total.sum(), leaves))

    log_p = (head(hidden) / 0.7).log_softmax(-1)
    expected = gradients(log_p.gather(-1, target[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1))
    for own, reference in zip(gradients(*chunked_log_probs(hidden, head, target, 0.7)), expected, strict=True):
        torch.testing.assert_close(own, reference, atol=1e-12, rtol=1e-12)


def test_microbatches_keep_to_their_budget_and_share_prompts() -> None:
    rows = random_rows([(10, [4, 4, 4, 4]), (3, [4])])
    batches = list(pack(rows, 20, torch.device("cpu")))
    assert [b.num_packed for b in batches] == [18, 18, 7]  # 10+4+4, the prompt again +4+4, 3+4
    assert [len(b.rows) for b in batches] == [2, 2, 1]
    above = pack(random_rows([(10, [30, 2])]), 20, torch.device("cpu"))
    assert [b.num_packed for b in above] == [40, 12]


def test_a_cpu_reads_few_different_lengths() -> None:
    """oneDNN keeps memory for every shape that it has met, so new lengths all the time would be a leak."""
    model = small_model("llama")
    read: list[tuple[int, ...]] = []
    model.get_decoder().register_forward_pre_hook(  # type: ignore[operator]
        lambda module, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    for length in range(1, 40):
        [microbatch] = pack(random_rows([(7, [length, 5])]), 10_000, torch.device("cpu"))
        token_log_probs(model, microbatch, 1.0)
    assert set(read) == {(1, 32), (1, 64)}


def test_what_fills_a_row_up_has_no_gradient() -> None:
    model = small_model("qwen2")
    [microbatch] = pack(random_rows([(5, [3, 4])]), 10_000, torch.device("cpu"))
    hidden: list[torch.Tensor] = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, output: hidden.append(output) or output.retain_grad())
    log_probs, entropy = token_log_probs(model, microbatch, 1.0)
    (log_probs.sum() + entropy.sum()).backward()
    [states] = hidden
    assert (states.shape[1], microbatch.num_packed) == (32, 12)
    assert states.grad is not None
    assert states.grad[:, :12].any()
    assert not states.grad[:, 12:].any()


# Activation checkpointing


def read(model: PreTrainedModel) -> torch.Tensor:
    [microbatch] = pack(random_rows(DIFFERENT), 10_000, torch.device("cpu"))
    return token_log_probs(model, microbatch, 0.7)[0]


@pytest.mark.parametrize("kind", [Autocast.none, Autocast.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_recomputed_activations_give_bitwise_the_same_gradient(lora: bool, kind: Autocast) -> None:
    model = small_model("llama", torch.float32)
    if lora:
        pytest.importorskip("peft")
        add_adapter(model, LoRASettings(enabled=True, rank=4), "")

    def gradient() -> dict[str, torch.Tensor]:
        model.zero_grad()
        with autocast(kind, model.device):
            read(model).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    whole = gradient()
    recompute_activations(model)
    again = gradient()
    assert set(again) == set(whole)
    assert all(torch.equal(again[name], grad) for name, grad in whole.items())
    assert not any(module.training for module in model.modules())  # dropout stays off


def test_layers_run_twice_with_gradients_and_once_without() -> None:
    model = small_model("llama")
    recompute_activations(model)
    runs = []
    mlp = model.get_submodule("model.layers.0.mlp")
    mlp.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    with torch.no_grad():
        read(model)
    assert runs == [False]
    read(model).sum().backward()
    assert runs == [False, True, True]


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear"):
        recompute_activations(torch.nn.Linear(2, 2))
