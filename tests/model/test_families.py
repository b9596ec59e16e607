"""Every family of models is trained and sampled as its own forward says, or refused: see docs/models.md."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import FAMILIES, WORDS, own_log_probs, row, table_rows, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlpost.config.paths import cache_folder
from rlpost.errors import ConfigError
from rlpost.model import family_probe
from rlpost.model.attention import shared_prompt_attention
from rlpost.model.families import OWN_FILES, REFUSED, VERSIONS, Verdict, explain, fingerprint
from rlpost.model.logprobs import READERS, examine, microbatches_of, token_log_probs, verdict_of
from rlpost.model.packing import Row, pack
from rlpost.model.weight_sums import EngineSums, probe_input
from rlpost.model.weights import NamedAsSaved, SavedWeights
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.policies import Request, TransformersWrapper
from rlpost.settings import GRPOLossSettings, SamplingSettings
from tests.model.test_logprobs import random_rows
from tests.says import Says

# each is right packed and known to be
FAST = ["llama", "mistral", "gemma3_text", "granite", "deepseek_v3"]
# layers other than attention, a window or a mask of their own, caps, sinks, or a body that takes no packed row
PLAIN = [
    *("qwen3_5_text", "qwen3_next", "lfm2", "falcon_h1", "bamba", "granitemoehybrid", "jamba", "nemotron_h"),
    *("olmo_hybrid", "kimi_linear", "minimax", "recurrent_gemma", "mamba", "mamba2", "phimoe", "doge"),
    *("gemma2", "gpt_oss", "stablelm", "nemotron", "falcon", "mpt", "llama4_text"),
]


@cache
def family(kind: str) -> PreTrainedModel:
    """The tiny model of a family, made once: nobody changes it."""
    return tiny_model(kind)


def group_rows() -> list[Row]:
    """Three completions of one prompt and two of another, longer than every window of the families."""
    return random_rows([(9, [3, 12, 7]), (4, [8, 8])])


def check_against_its_own_forward(model: PreTrainedModel) -> None:
    rows = group_rows()
    read = [token_log_probs(model, part, 0.8) for part in microbatches_of(model, rows, 10_000, model.device)]
    expected = [own_log_probs(model, row, 0.8) for row in rows]
    for values, own in zip(zip(*read, strict=True), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(values), torch.cat(own), atol=2e-4, rtol=1e-4)


def check_row_of_the_table(kind: str, verdict: Verdict) -> None:
    """The family's row of docs/models.md is what was found, and what was found is right."""
    assert table_rows()[kind] == row(kind, verdict)
    if verdict.reading != REFUSED:
        check_against_its_own_forward(family(kind))


@pytest.mark.parametrize("kind", FAST)
def test_attention_alone_is_read_in_one_row(kind: str) -> None:
    verdict = verdict_of(family(kind))
    assert (verdict.reads_packed, verdict.sampling, explain(family(kind), verdict, 8)) == (True, "padded", None)
    check_row_of_the_table(kind, verdict)


@pytest.mark.parametrize("kind", PLAIN)
def test_what_a_packed_row_would_change_is_read_one_sequence_a_row(kind: str) -> None:
    verdict = verdict_of(family(kind))
    assert verdict.reading.startswith("alone")
    check_row_of_the_table(kind, verdict)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_table_of_the_docs_is_what_is_found(kind: str) -> None:
    check_row_of_the_table(kind, verdict_of(family(kind)))


def test_the_table_has_every_family_and_refuses_at_most_five() -> None:
    rows = table_rows()
    assert list(rows) == list(FAMILIES)
    assert sum("| refused |" in line for line in rows.values()) <= 5
    assert set(FAST) | set(PLAIN) <= set(FAMILIES)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "gemma2", "phimoe", "llama"])
def test_sampled_log_probs_are_those_of_the_whole_sequences(kind: str, tiny_tokenizer: Any) -> None:
    """Prompts of three lengths, and completions that end at different tokens."""
    model = family(kind)
    policy = TransformersWrapper(model, tiny_tokenizer)
    sampling = SamplingSettings(temperature=0.8)
    prompts = [list(range(5, 16)), list(range(20, 31)), [40, 41, 42], list(range(60, 66))]
    requests = [Request(ids, 4 + 2 * number, number) for number, ids in enumerate(prompts)]
    for request, completion in zip(requests, policy.generate(requests, sampling), strict=True):
        assert len(completion.token_ids) == request.max_tokens or completion.finish_reason == "stop"
        ids = torch.tensor(completion.token_ids)
        sampled = Row(torch.tensor(request.prompt_ids), ids, torch.ones(len(ids), dtype=torch.bool), ids * 0.0, 1.0)
        expected, _ = own_log_probs(model, sampled, 0.8)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["lfm2", "gemma2"])
def test_a_split_does_not_change_a_gradient_read_plainly(kind: str) -> None:
    model = family(kind)
    rows = group_rows()
    objective = PolicyObjective(GRPOLossSettings(entropy_coef=0.1), temperature=0.8, max_completion_tokens=16)

    def gradient(budget: int) -> torch.Tensor:
        model.zero_grad()
        for microbatch in microbatches_of(model, rows, budget, model.device):
            objective(model, microbatch, objective.normaliser(rows)).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = gradient(10_000)
    assert whole.norm() > 0
    for budget in (1, 30):
        assert (gradient(budget) - whole).norm() / whole.norm() < 1e-4


def test_a_prompt_counts_as_often_as_it_is_read() -> None:
    """9 + 3 + 12 + 7 and 4 + 8 + 8 tokens with prompts shared."""
    for kind, expected in (("llama", 51), ("lfm2", 73)):
        [whole] = microbatches_of(family(kind), group_rows(), 1000, torch.device("cpu"))
        assert whole.num_packed == expected


def test_a_models_own_head_gives_few_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.model.logprobs.CHUNK", 5)
    model = tiny_model("lfm2")
    verdict_of(model)
    sizes: list[int] = []
    head = model.get_output_embeddings()
    assert head is not None
    head.register_forward_hook(lambda _m, _i, out: sizes.append(out.shape[-2]))
    [microbatch] = pack(group_rows(), 1000, model.device)
    token_log_probs(model, microbatch, 1.0)[0].sum().backward()
    assert max(sizes) == 5
    assert sum(sizes) == 2 * microbatch.target.numel()  # forward, and again backward


def test_what_is_slower_says_why_and_how_much(says: Says) -> None:
    verdict = Verdict("alone, own head", "alike", "sdpa", "a packed row has its log-probs off by 2.1")
    says("model", explain(family("lfm2"), verdict, 8))


def test_a_verdict_is_kept_by_configuration() -> None:
    model = tiny_model("llama", max_position_embeddings=77)  # of no other test
    first = examine(model)
    kept = cache_folder() / "families" / f"{fingerprint(model)}.json"
    marked = Verdict(**json.loads(kept.read_text()) | {"reason": "as it was kept"})
    kept.write_text(json.dumps(asdict(marked)))
    assert examine(tiny_model("llama", max_position_embeddings=77)) == marked
    kept.write_text("{")  # cut short
    assert examine(model) == first
    model.config.logit_scale = 0.5
    assert cache_folder() / "families" / f"{fingerprint(model)}.json" != kept


def test_a_verdict_is_of_the_installed_versions_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, str | None] = {"torch": "2.13.0", "transformers": "5.1.0", "vllm": "0.20.0"}
    monkeypatch.setattr("rlpost.model.families.installed_version", installed.get)
    found = [fingerprint(family("llama"))]
    for library in VERSIONS:  # one that comes to be installed is another version too
        before, installed[library] = installed.get(library), "0.0.1"
        found.append(fingerprint(family("llama")))
        installed[library] = before
    assert len(set(found)) == 1 + len(VERSIONS)
    installed["vllm"] = "0.0.1"  # it reads nothing that is trained
    assert fingerprint(family("llama")) == found[0]
    assert {"torch", "transformers"} <= set(VERSIONS)


def test_a_model_that_reads_later_tokens_is_refused() -> None:
    config = AutoConfig.for_model("bert", vocab_size=WORDS, hidden_size=64, intermediate_size=96, is_decoder=False)
    config.num_hidden_layers, config.num_attention_heads = 2, 2
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    [microbatch] = pack(group_rows(), 1000, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"BertLMHeadModel .* later"):
        token_log_probs(model, microbatch, 1.0)


# a family, sizes of a real model, what its copy has (kinds of layers, and layers), and whether it is read packed
REAL = {
    "Qwen2.5-0.5B": (
        "qwen2",
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
        (1, 2),
        True,
    ),
    "Qwen3-Next-80B": ("qwen3_next", {}, (2, 4), False),  # of a linear and a full layer
    "Gemma-2-9B": ("gemma2", {}, (2, 2), False),  # of a window and none
}


@pytest.mark.parametrize("name", REAL)
def test_a_large_model_is_tried_by_a_small_copy(name: str) -> None:
    kind, sizes, expected, is_packed = REAL[name]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
        copied: Any = type(model)(family_probe.small_config(model, 2))
    assert sum(p.numel() for p in copied.parameters()) * 4 < 60e6  # bytes
    layers = copied.model.layers
    assert (len({family_probe.layer_kind(layer) for layer in layers}), len(layers)) == expected
    assert examine(model).reads_packed == is_packed


def test_a_kept_verdict_ends_with_any_file_that_reads_or_attends() -> None:
    parts = (*READERS.values(), pack, shared_prompt_attention, examine, family_probe.tried_on_a_small_copy)
    assert {Path(inspect.getfile(part)).name for part in parts} <= set(OWN_FILES)


@pytest.mark.parametrize("name", ["h.0.attn.c_attn", "h.0.self_attention.query_key_value"])
def test_weights_that_an_engine_turns_or_orders_anew_are_compared(name: str) -> None:
    """GPT-2's are (in, out); Bloom's hold q, k and v head by head, and vLLM's all q, all k and all v."""
    weight, bias, question = torch.randn(12, 5), torch.randn(12), probe_input(5, torch.float32)
    answer = weight @ question + bias
    if name.endswith("query_key_value"):
        kept, answer = weight, answer.view(2, 3, 2).transpose(0, 1).flatten()
    else:
        kept = weight.T
    own = f"{name}.weight"
    sums = EngineSums({}, {own: answer.tolist()}, {own: "float32"}, {})
    assert sums.differing({own: kept, f"{name}.bias": bias}) == ([], 1)
    assert sums.differing({own: kept + 1e-3, f"{name}.bias": bias}) == ([own], 1)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "granitemoe", "gpt_neox"])
def test_weights_are_pushed_under_the_names_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """transformers keeps a layer's experts in one tensor, and most checkpoints do not."""
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    saved, pushed = SavedWeights(tmp_path), NamedAsSaved(model.state_dict(), tmp_path)
    assert saved.keys() != model.state_dict().keys()
    assert pushed.keys() == saved.keys()
    assert all(torch.equal(pushed[name], saved[name]) for name in saved)
