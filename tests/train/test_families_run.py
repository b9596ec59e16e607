"""Trainings of models that a packed row would change: every loss is that of the model's own forward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import own_log_probs, talking_model, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlpost.catalog import TRAIN_GRPO, TRAIN_SFT
from rlpost.config.compose import compose
from rlpost.errors import ConfigError, PolicyError
from rlpost.imports import is_installed
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.objectives.supervised import SFTObjective
from rlpost.policies.vllm import vLLMWrapper
from rlpost.settings.commands import RunRequest
from rlpost.train import grpo, sft

HYBRIDS_AND_CAPS = ["qwen3_5_text", "lfm2", "gemma2", "phimoe"]
SHORT = [
    "model.autocast=none",
    "model.dtype=float32",
    "policy=transformers",
    "eval.enabled=false",
    "checkpoint.every=0",
]
SHORT += ["steps=2", "optim.lr=1e-3", "env.max_completion_tokens=8"]


# tied but for the last: heads wider than the hidden size, windows, caps and no head in vLLM, scaled logits, experts
UNDER_VLLM = ["qwen3", "gemma3_text", "gemma2", "granite", "qwen3_moe"]
EXACT = 1e-3  # nats a token: the most that float32 kernels explain
REWARD = """
def reward(completions, **columns):
    return [float(sum(text.encode()) % 7) for text in completions]
"""


def saved(kind: str, folder: Path, tokenizer: Any) -> Path:
    """A tiny model of the family as a folder of transformers."""
    tiny_model(kind).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(loop: Any, command: Any, folder: Path, *words: str) -> list[dict[str, Any]]:
    composed = compose(command, [*SHORT, *words])
    request = RunRequest(folder, None, composed.overrides, ["rlpost", "train", "grpo"], composed.yaml)
    assert command.train(composed.settings, request) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "lfm2" else pytest.mark.slow) for kind in HYBRIDS_AND_CAPS]
)
def test_grpo_trains_on_the_losses_of_the_model_s_own_forward(
    kind: str, tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(kind, tmp_path / "model", tiny_tokenizer)
    seen = compare(monkeypatch, PolicyObjective, policy_losses)
    words = [
        "prompts_per_step=2",
        "group_size=3",
        "loss.kl_coef=0.2",
        "loss.entropy_coef=0.1",
        "sampling.temperature=1.0",
    ]
    lines = run(grpo, TRAIN_GRPO, tmp_path / "r", f"model.path={folder}", *words)
    assert len(seen) >= 2
    assert all(line["sampler/logprob_gap"] < 1e-4 for line in lines)
    assert lines[-1]["kl/ref"] > 1e-7  # it has moved
    said = " ".join(capsys.readouterr().out.split())
    assert "reads " in said
    assert "one sequence a row, a prompt once for each of its completions: up to 3 times slower" in said


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "gemma2" else pytest.mark.slow) for kind in HYBRIDS_AND_CAPS]
)
def test_sft_trains_on_the_losses_of_the_model_s_own_forward(
    kind: str, tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(model: Any, rows: Any, normaliser: float) -> dict[str, float]:
        return {"loss/sft": -sum(own_log_probs(model, row, 1.0)[0].sum().item() for row in rows) / normaliser}

    folder = saved(kind, tmp_path / "model", tiny_tokenizer)
    seen = compare(monkeypatch, SFTObjective, loss)
    lines = run(sft, TRAIN_SFT, tmp_path / "r", f"model.path={folder}", "minibatch_size=4", "env.limit=8")
    assert [line["loss/sft"] for line in lines] == pytest.approx(seen, abs=1e-6)  # a microbatch each
    assert lines[0]["loss/sft"] != lines[1]["loss/sft"]


def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_sampled(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    from transformers import BertConfig

    config = BertConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(
        ConfigError, match="BertLMHeadModel cannot be trained: its log-probs of a token depend on later"
    ):
        run(grpo, TRAIN_GRPO, tmp_path / "r", f"model.path={tmp_path / 'model'}")
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def sampled_by_vllm(kind: str, tmp_path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """The lines of two GRPO steps on rewards that differ, with a look of the gate at all weights after each push."""
    if not is_installed("vllm"):
        pytest.skip("vLLM is not installed")
    folder = tmp_path / "model"
    talking_model(kind, tie_word_embeddings=kind != "qwen3_moe").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"Say {number}."}) for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = [f"model.path={folder}", "policy=vllm", "policy.dtype=float32", "policy.timeout_seconds=60", "gate.every=1"]
    words += ["env=dataset", f"env.path={tmp_path / 'rows.jsonl'}", f"env.reward={tmp_path / 'reward.py'}:reward"]
    words += ["prompts_per_step=2", "group_size=4", "sampling.temperature=1.0", "checkpoint.every=2"]
    return run(grpo, TRAIN_GRPO, tmp_path / "r", *words)


@pytest.mark.vllm
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", UNDER_VLLM)
def test_vllm_samples_what_is_trained_where_no_two_widths_are_equal(
    kind: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
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
@pytest.mark.timeout(240)
def test_a_tied_head_that_a_push_leaves_out_is_named_where_logits_are_scaled(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = vLLMWrapper.load_weights

    def without_the_head(self: vLLMWrapper, weights: Any) -> None:
        head = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
        original(self, {**weights, "lm_head.weight": head})

    monkeypatch.setattr(vLLMWrapper, "load_weights", without_the_head)
    with pytest.raises(PolicyError, match=r"after the push of step 1: .*a tied head has stayed as it was"):
        sampled_by_vllm("granite", tmp_path, tiny_tokenizer)
