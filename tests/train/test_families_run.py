"""Trainings of models that a packed row would change: every loss is that of the model's own forward."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import own_log_probs, talking_model, tiny_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlpost.catalog import TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.errors import ConfigError, PolicyError
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.objectives.supervised import SFTObjective
from rlpost.policies.vllm import vLLMWrapper
from rlpost.runs.reader import read_run
from rlpost.train.gate import Disagreement
from tests.asynchronous import write_rows
from tests.trainings import metrics, train_in

HYBRIDS_AND_CAPS = ["qwen3_5_text", "lfm2", "gemma2", "phimoe"]
SHORT = [
    *["model.autocast=none", "model.dtype=float32", "eval.enabled=false", "checkpoint.every=0", "steps=2"],
    *["optim.lr=1e-3", "env.max_completion_tokens=8"],
]


# tied but for the last: heads wider than the hidden size, windows, caps and no head in vLLM, scaled logits, experts
UNDER_VLLM = ["qwen3", "gemma3_text", "gemma2", "granite", "qwen3_moe"]
EXACT = 1e-3  # nats a token: the most that float32 kernels explain


def saved(model: Any, folder: Path, tokenizer: Any) -> str:
    """The words of a training of a model that is saved in `folder`."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"model.path={folder}"


def run(command: Command[Any], folder: Path, *words: str) -> list[dict[str, Any]]:
    assert train_in(command, folder, [*SHORT, *words]) == 0
    return metrics(folder)


def compare(monkeypatch: pytest.MonkeyPatch, objective: Any, expected: Callable[..., dict[str, float]]) -> list[float]:
    """Hold every loss that `objective` gives to `expected` of the model's own forward; the steps' losses."""
    seen: list[float] = []
    original = objective.__call__

    def checked(self: Any, model: Any, microbatch: Any, normaliser: float) -> Any:
        output = original(self, model, microbatch, normaliser)
        with torch.no_grad():
            terms = expected(model, microbatch.rows, normaliser)
        given = output.losses if hasattr(output, "losses") else {"loss/sft": output.loss}
        assert {name: given[name].item() for name in terms} == pytest.approx(terms, abs=1e-5)
        seen.append(output.loss.item())
        return output

    monkeypatch.setattr(objective, "__call__", checked)
    return seen


def policy_losses(model: Any, rows: Any, normaliser: float) -> dict[str, float]:
    """GRPO's terms where π_old is the trainer's own: ratio 1, the k3 estimate of the KL, and the entropy."""
    policy = kl = entropies = 0.0
    for row in rows:
        own, entropy = own_log_probs(model, row, 1.0)
        difference = row.ref_log_probs[row.sampled] - own
        policy -= row.advantage * len(own)
        kl += (difference.exp() - difference - 1).sum().item()
        entropies += entropy.sum().item()
    return {
        "loss/policy": policy / normaliser,
        "loss/kl": 0.2 * kl / normaliser,
        "loss/entropy": -0.1 * entropies / normaliser,
    }


def families(usual: str) -> pytest.MarkDecorator:
    """Each family; all but the `usual` one are slow."""
    kinds = [pytest.param(kind, marks=[] if kind == usual else pytest.mark.slow) for kind in HYBRIDS_AND_CAPS]
    return pytest.mark.parametrize("kind", kinds)


@families(usual="lfm2")
def test_grpo_trains_on_the_losses_of_the_own_forward(
    kind: str, tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tiny_model(kind), tmp_path / "model", tiny_tokenizer)
    seen = compare(monkeypatch, PolicyObjective, policy_losses)
    words = ["policy=transformers", "prompts_per_step=2", "group_size=3", "sampling.temperature=1.0"]
    lines = run(TRAIN_GRPO, tmp_path / "r", model, *words, "loss.kl_coef=0.2", "loss.entropy_coef=0.1")
    assert len(seen) >= 2
    assert all(line["sampler/logprob_gap"] < 1e-4 for line in lines)
    assert lines[-1]["kl/ref"] > 1e-7  # it has moved
    assert "reads" in [fact.name for fact in read_run(tmp_path / "r").facts]


@families(usual="gemma2")
def test_sft_trains_on_the_losses_of_the_own_forward(
    kind: str, tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(model: Any, rows: Any, normaliser: float) -> dict[str, float]:
        return {"loss/sft": -sum(own_log_probs(model, row, 1.0)[0].sum().item() for row in rows) / normaliser}

    model = saved(tiny_model(kind), tmp_path / "model", tiny_tokenizer)
    seen = compare(monkeypatch, SFTObjective, loss)
    lines = run(TRAIN_SFT, tmp_path / "r", model, "minibatch_size=4", "env.limit=8")
    assert [line["loss/sft"] for line in lines] == pytest.approx(seen, abs=1e-6)  # a microbatch each
    assert lines[0]["loss/sft"] != lines[1]["loss/sft"]


def test_bidirectional_model_is_refused_before_sampling(tmp_path: Path, tiny_tokenizer: Any) -> None:
    config = AutoConfig.for_model("bert", vocab_size=len(tiny_tokenizer), hidden_size=32, intermediate_size=32)
    config.num_hidden_layers = config.num_attention_heads = 1
    model = saved(AutoModelForCausalLM.from_config(config), tmp_path / "model", tiny_tokenizer)
    with pytest.raises(ConfigError, match="BertLMHeadModel"):
        run(TRAIN_GRPO, tmp_path / "r", model, "policy=transformers")
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def sampled_by_vllm(kind: str, tmp_path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """The lines of two GRPO steps on rewards that differ, with a look of the gate at all weights after each push."""
    model = talking_model(kind, tie_word_embeddings=kind != "qwen3_moe")
    words = [*write_rows(tmp_path), *SHORT, saved(model, tmp_path / "model", tokenizer)]
    words = [word for word in words if word not in ("model=tiny", "policy=transformers")]
    engine = "own_process" if kind == UNDER_VLLM[0] else "in_process"  # which starts sooner
    words += [
        "policy=vllm",
        f"policy.engine={engine}",
        "policy.dtype=float32",
        "policy.timeout_seconds=60",
        "gate.every=1",
    ]
    assert train_in(TRAIN_GRPO, tmp_path / "r", [*words, "sampling.temperature=1.0", "checkpoint.every=2"]) == 0
    return metrics(tmp_path / "r")


@pytest.mark.vllm
@pytest.mark.parametrize("kind", UNDER_VLLM)
def test_vllm_samples_what_is_trained_for_unequal_widths(kind: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    lines = sampled_by_vllm(kind, tmp_path, tiny_tokenizer)  # an alarm of the gate would have ended it
    assert [line["policy/version"] for line in lines] == [0, 1]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert all(0 < line["sampler/logprob_gap"] < EXACT for line in lines)
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "model", tmp_path / "r" / "checkpoints" / "latest" / "model")
    )
    assert ("lm_head.weight" in before) == (kind == "qwen3_moe")
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.vllm
def test_tied_head_that_a_push_leaves_out_is_named(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = vLLMWrapper.load_weights

    def without_the_head(self: vLLMWrapper, weights: Any) -> None:
        head = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
        original(self, {**weights, "lm_head.weight": head})

    monkeypatch.setattr(vLLMWrapper, "load_weights", without_the_head)
    with pytest.raises(PolicyError, match=re.escape(Disagreement.head.value)):
        sampled_by_vllm("granite", tmp_path, tiny_tokenizer)
