"""GRPOLoss on a batch: values by hand, what it reads, what it refuses."""

from __future__ import annotations

from math import exp, inf, log
from typing import Any

import pytest
import torch
from model_families import tiny_model
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.data.ragged import ragged
from rlpost.model.logprobs import verdict_of
from rlpost.objectives import GRPOLoss, GRPOLossOutput
from rlpost.objectives.functional import VARIANTS
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.policies import TransformersWrapper
from rlpost.settings import SamplingSettings
from rlpost.torchrl.batches import select_rows
from rlpost.torchrl.losses import CLIPPING

FULL = [[3, 4, 5, 6, 7], [3, 4, 8], [9, 1, 2, 3]]
PROMPTS = [2, 2, 1]
LENGTHS = [len(row) - prompt for row, prompt in zip(FULL, PROMPTS, strict=True)]  # 3, 1, 3 trained tokens
ADVANTAGES = [1.0, -1.0, 0.5]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, tie_word_embeddings=False, **sizes)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def log_probs_of(model: LlamaForCausalLM, temperature: float = 1.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """log π and entropy at every id, by the plain forward of each sequence alone; 0 at the first."""
    log_probs, entropies = [], []
    for row in FULL:
        ids = torch.tensor(row)
        log_p = (model(ids[None]).logits[0] / temperature).log_softmax(-1)[:-1]
        nothing = log_p.new_zeros(1)
        log_probs.append(torch.cat([nothing, log_p.gather(-1, ids[1:, None]).squeeze(-1)]))
        entropies.append(torch.cat([nothing, -(log_p.exp() * log_p).sum(-1)]))
    return log_probs, entropies


def batch(old: list[torch.Tensor], **more: Any) -> TensorDict:
    fields = {
        "tokens": {
            "full": ragged([torch.tensor(row) for row in FULL]),
            "prompt": ragged([torch.tensor(row[:n]) for row, n in zip(FULL, PROMPTS, strict=True)]),
        },
        "masks": {
            "all_attention_mask": ragged([torch.ones(len(row), dtype=torch.bool) for row in FULL]),
            "all_assistant_mask": ragged([torch.arange(len(row)) >= len(row) - 1 for row in FULL]),  # the last id alone
        },
        "log_probs": {"full": ragged(old)},
        "advantage": torch.tensor(ADVANTAGES, dtype=torch.float64),
    }
    return TensorDict(fields | more, batch_size=[3])


def shifted(log_probs: list[torch.Tensor], by: float) -> list[torch.Tensor]:
    return [row.detach() + by for row in log_probs]


def trained(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [row[n:] for row, n in zip(rows, PROMPTS, strict=True)]


def test_values_are_means_over_the_trained_tokens_alone(model: LlamaForCausalLM) -> None:
    log_probs, entropies = log_probs_of(model)
    loss = GRPOLoss(model, kl_to_ref_coeff=0.3, kl_to_inference_coeff=0.2)
    ref = {"ref_log_probs": {"full": ragged(shifted(log_probs, 0.1))}}
    out: Any = loss(batch(shifted(log_probs, -log(1.5)), next=ref))  # every ratio is 1.5, every reference 0.1 above
    # 3 tokens of advantage 1 at the bound 1.2; one of -1 and three of 0.5, of which the latter at the bound
    assert out.loss_objective.item() == pytest.approx((3 * -1.2 + 1.5 + 3 * -0.6) / 7, abs=1e-6)
    assert out.clip_fraction.item() == pytest.approx(6 / 7)
    assert out.kl_approx.item() == pytest.approx(-log(1.5), abs=1e-6)
    assert out.ESS.item() == pytest.approx(1.0)
    entropy = torch.cat(trained(entropies)).mean().item()
    assert out.entropy.item() == pytest.approx(entropy, abs=1e-5)
    assert out.loss_entropy.item() == pytest.approx(-0.01 * entropy, abs=1e-6)
    assert out.kl_to_ref.item() == pytest.approx(0.00517092, abs=1e-6)  # k3(0.1)
    assert out.loss_kl_to_ref.item() == pytest.approx(0.3 * 0.00517092, abs=1e-6)
    k3 = exp(-log(1.5)) - 1 + log(1.5)
    assert out.loss_kl_to_inference.item() == pytest.approx(0.2 * k3, abs=1e-6)
    terms = (out.loss_objective, out.loss_entropy, out.loss_kl_to_ref, out.loss_kl_to_inference)
    assert out.loss.item() == pytest.approx(sum(term.item() for term in terms), abs=1e-12)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", -(3 * 1.0 - 1.0 + 3 * 0.5) / 7),
        ("prompt_mean", -(1.0 - 1.0 + 0.5) / 3),
        ("sequence_mean", -(1.0 - 1.0 + 0.5) / 3),
        ("constant_length", -(3 * 1.0 - 1.0 + 3 * 0.5) / 15),
    ],
)
def test_aggregations_of_an_on_policy_batch(model: LlamaForCausalLM, aggregation: str, expected: float) -> None:
    out = GRPOLoss(model, aggregation=aggregation)(batch(shifted(log_probs_of(model)[0], 0.0)))
    assert out.loss_objective.item() == pytest.approx(expected, abs=1e-6)


def test_without_an_aggregation_each_token_keeps_its_loss(model: LlamaForCausalLM) -> None:
    out = GRPOLoss(model, aggregation="none", entropy_bonus=False)(batch(shifted(log_probs_of(model)[0], 0.0)))
    expected = torch.tensor([[0, 0, -1, -1, -1], [0, 0, 1, 0, 0], [0, -0.5, -0.5, -0.5, 0]], dtype=torch.float64)
    torch.testing.assert_close(out.loss.detach(), expected, atol=1e-6, rtol=0)
    assert out.entropy is None
    assert out.loss_entropy is None


# between the tokens of lfm2 is a convolution, and linear attention in qwen3_5_text: a packed row would change them
@pytest.mark.parametrize(("kind", "temperature"), [("llama", 1.0), ("lfm2", 1.0), ("lfm2", 0.8), ("qwen3_5_text", 0.8)])
def test_the_gradient_is_that_of_the_plain_forward(
    model: LlamaForCausalLM, tiny_tokenizer: Any, kind: str, temperature: float
) -> None:
    read: Any = model if kind == "llama" else tiny_model(kind)
    assert verdict_of(read).reads_packed == (kind == "llama")
    log_probs, entropies = log_probs_of(read, temperature)
    old = shifted(log_probs, 0.1)
    actor = TransformersWrapper(read, tiny_tokenizer, sampling=SamplingSettings(temperature=temperature))
    loss = GRPOLoss(read if temperature == 1.0 else actor, entropy_coeff=0.2)(batch(old)).loss
    advantage = torch.tensor(ADVANTAGES).repeat_interleave(torch.tensor(LENGTHS))
    ratio = (torch.cat(trained(log_probs)) - torch.cat(trained(old))).exp()  # 0.905: within the clip
    expected = (-(ratio * advantage) - 0.2 * torch.cat(trained(entropies))).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5, rel=1e-6)
    parameters = list(read.parameters())
    for own, plain in zip(
        *(torch.autograd.grad(each, parameters, materialize_grads=True) for each in (loss, expected)), strict=True
    ):
        torch.testing.assert_close(own, plain, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("strategy", "num_trained"), [("sft", 7), ("rlhf", 3), ("generic", 9)])
def test_the_masking_strategy_says_what_is_trained(model: LlamaForCausalLM, strategy: str, num_trained: int) -> None:
    out = GRPOLoss(model, masking_strategy=strategy, aggregation="none", entropy_bonus=False)(
        batch(shifted(log_probs_of(model)[0], 0.0))
    )
    assert int((out.loss_objective != 0).sum()) == num_trained
    rows = batch(shifted(log_probs_of(model)[0], 0.0))
    del rows["tokens", "prompt"]  # then "sft" reads the assistant mask
    rlhf = GRPOLoss(model, masking_strategy="rlhf")(rows).loss
    assert GRPOLoss(model)(rows).loss.item() == rlhf.item()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_what_the_ragged_one_gives(model: LlamaForCausalLM, side: str) -> None:
    old = shifted(log_probs_of(model)[0], 0.3)

    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(
            [torch.nn.functional.pad(r, (5 - len(r), 0) if side == "left" else (0, 5 - len(r))) for r in rows]
        )

    dense = batch(old)
    for name in (("tokens", "full"), ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")):
        dense[name] = padded(list(dense[name].unbind()))
    dense["log_probs", "full"] = padded(old)
    expected = GRPOLoss(model)(batch(old)).loss
    assert GRPOLoss(model)(dense).loss.item() == pytest.approx(expected.item(), abs=1e-12)


def test_tokens_far_from_the_sampler_can_be_left_out(model: LlamaForCausalLM) -> None:
    log_probs, _ = log_probs_of(model)
    old = shifted(log_probs, 0.0)
    old[0][3] -= 1.0  # (1)^2 / 2 is above 0.4
    same = [GRPOLoss(model, kl_mask_threshold=t)(batch(old)).loss.item() for t in (None, inf, 1e9)]
    assert same[0] == same[1] == same[2]
    out = GRPOLoss(model, kl_mask_threshold=0.4)(batch(old))
    assert out.loss_objective.item() == pytest.approx(-(2 * 1.0 - 1.0 + 3 * 0.5) / 6, abs=1e-6)


@pytest.mark.parametrize("variant", ["grpo", "cispo", "gspo", "dual_clip"])
@pytest.mark.parametrize("clip_epsilon", [0.2, (0.2, 0.28)])
def test_outputs_are_finite_scalars(model: LlamaForCausalLM, variant: str, clip_epsilon: Any) -> None:
    old = shifted(log_probs_of(model)[0], 0.4)
    out = GRPOLoss(model, variant=variant, clip_epsilon=clip_epsilon, kl_to_inference_coeff=0.0)(batch(old))
    for name in GRPOLossOutput.__slots__:
        value = getattr(out, name)
        if value is not None:
            assert value.shape == (), name
            assert value.isfinite(), name
            assert value.requires_grad == name.startswith("loss_"), name
    assert 0 <= out.clip_fraction.item() <= 1
    assert out.kl_to_inference is not None  # a coefficient of 0 still measures
    assert out.kl_to_ref is None


def test_cispo_keeps_the_gradient_of_a_clipped_token(model: LlamaForCausalLM) -> None:
    rows = batch(shifted(log_probs_of(model)[0], -log(1.5)), advantage=torch.ones(3, dtype=torch.float64))
    largest = {}
    for variant in ("grpo", "cispo"):
        loss = GRPOLoss(model, variant=variant, entropy_bonus=False)(rows).loss
        largest[variant] = max(each.abs().max() for each in torch.autograd.grad(loss, list(model.parameters())))
    assert largest["grpo"] == 0
    assert largest["cispo"] > 0.001


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_a_sequence_whose_reward_failed_leaves_no_trace(model: LlamaForCausalLM, aggregation: str) -> None:
    old = shifted(log_probs_of(model)[0], 0.1)
    ref = {"ref_log_probs": {"full": ragged(shifted(log_probs_of(model)[0], 0.2))}}
    rows = batch(old, next=ref, advantage=torch.tensor([float("nan"), -1.0, 0.5], dtype=torch.float64))
    rows["valid"] = torch.tensor([False, True, True])  # the first is the longest
    without = select_rows(rows, [1, 2])
    loss = GRPOLoss(model, aggregation=aggregation, kl_to_ref_coeff=0.3, kl_to_inference_coeff=0.2, entropy_coeff=0.1)
    together, alone = loss(rows), loss(without)
    for name in GRPOLossOutput.__slots__:
        assert getattr(together, name).item() == pytest.approx(getattr(alone, name).item(), rel=1e-6), name
    gradients = [torch.autograd.grad(each.loss, list(model.parameters())) for each in (together, alone)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-6)


def test_what_is_missing_is_named(model: LlamaForCausalLM) -> None:
    old = shifted(log_probs_of(model)[0], 0.0)
    for name, error in {"tokens": ValueError, "advantage": ValueError, "log_probs": KeyError}.items():
        with pytest.raises(error, match=name):
            GRPOLoss(model)(batch(old).exclude(name))
    with pytest.raises(KeyError, match="ref_log_probs"):
        GRPOLoss(model, kl_to_ref_coeff=0.1)(batch(old))
    assert GRPOLoss(model, kl_to_ref_coeff=0.0)(batch(old)).kl_to_ref is None  # a weight of 0 needs no reference


def test_what_does_not_fit_is_refused(model: LlamaForCausalLM) -> None:
    old = shifted(log_probs_of(model)[0], 0.0)
    given = batch(old)
    nothing = ragged([torch.zeros(len(row), dtype=torch.bool) for row in FULL])
    masks = {"all_attention_mask": given["masks", "all_attention_mask"], "all_assistant_mask": nothing}
    wrong = {"full": given["tokens", "full"], "prompt": torch.zeros(3, 2, dtype=torch.int64)}
    for rows, error, part in [
        (batch([old[0][:4], *old[1:]]), ValueError, r"\[4, 3, 4\].*\[5, 3, 4\]"),
        (batch(old, advantage=torch.zeros(3, 2, 2)), ValueError, "advantage"),
        (batch(old, masks=masks), ValueError, "trained"),
        (batch(old, tokens=wrong), ValueError, "prompt"),
    ]:
        with pytest.raises(error, match=part):
            GRPOLoss(model, masking_strategy="rlhf" if part == "trained" else "sft")(rows)


def test_a_variant_averages_as_its_command_does(model: LlamaForCausalLM) -> None:
    for variant in CLIPPING:
        settings = compose(TRAIN_GRPO, [f"loss={variant}"]).settings.loss
        objective = PolicyObjective(settings, temperature=1.0, max_completion_tokens=8)
        assert GRPOLoss(model, variant=variant).aggregation == objective.aggregation == VARIANTS[variant].aggregation


@pytest.mark.parametrize(
    ("arguments", "error", "part"),
    [
        ({"aggregation": "token_men"}, ValueError, "token_mean"),
        ({"masking_strategy": "all"}, ValueError, "all"),
        ({"variant": "reinforce"}, ValueError, "reinforce"),
        ({"clip_epsilom": 0.1}, TypeError, "clip_epsilom"),
    ],
)
def test_impossible_arguments_are_refused(
    model: LlamaForCausalLM, arguments: dict[str, Any], error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        GRPOLoss(model, **arguments)
