"""Real vLLM on tiny models: log-probs, weight pushes that arrive, and engines that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rlpost.batching import Row, pack
from rlpost.errors import PolicyError
from rlpost.extras import is_installed
from rlpost.logprobs import token_log_probs
from rlpost.models import load_model, load_tokenizer, tiny_tokenizer
from rlpost.policies import Request, vLLMWrapper
from rlpost.settings import DType, Engine, ModelSettings, SamplingSettings, VLLMSettings
from rlpost.weight_sync.vllm import vLLMUpdater

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not is_installed("vllm"), reason="vLLM is not installed"),
    pytest.mark.timeout(240),
]

REQUESTS = [Request([5, 9, 80, 33 + i], 24, 7 + i) for i in range(8)]


def build_qwen2(folder: Path, tied: bool) -> Path:
    """A random Qwen2: biases on q, k and v, which vLLM fuses, and a head that may be tied."""
    tokenizer = tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # biases too, which would else be 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def started(folder: Path, engine: Engine) -> vLLMWrapper:
    settings = VLLMSettings(engine=engine, dtype=DType.float32, max_num_seqs=16, timeout_seconds=120)
    policy = vLLMWrapper(
        folder, load_tokenizer(folder), settings=settings, sampling=SamplingSettings(), max_model_len=128
    )
    policy.start()
    return policy


def gap(policy: vLLMWrapper, model: PreTrainedModel, temperature: float) -> float:
    """Mean |log µ − log π| over freshly sampled completions."""
    completions = policy.generate(REQUESTS, SamplingSettings(temperature=temperature))
    rows = [
        Row(
            torch.tensor(request.prompt_ids),
            torch.tensor(done.token_ids),
            torch.ones(len(done.token_ids), dtype=torch.bool),
            torch.tensor(done.log_probs),
            0.0,
        )
        for request, done in zip(REQUESTS, completions, strict=True)
    ]
    [microbatch] = pack(rows, 10_000, model.device)
    with torch.no_grad():
        log_probs, _ = token_log_probs(model, microbatch, temperature)
    return (log_probs - microbatch.sampler_log_probs).abs().mean().item()


@pytest.fixture(scope="module", params=[("tied", Engine.in_process), ("untied", Engine.own_process)], ids=str)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, vLLMWrapper]]:
    kind, engine = request.param
    folder = build_qwen2(tmp_path_factory.mktemp(kind) / "qwen2", tied=kind == "tied")
    policy = started(folder, engine)
    yield folder, policy
    policy.close()


def test_pushed_weights_change_the_output_and_agree_with_the_trainer(case: tuple[Path, vLLMWrapper]) -> None:
    folder, policy = case
    model = load_model(folder, ModelSettings(path=str(folder)))
    greedy = SamplingSettings(temperature=0.0)
    before = [c.token_ids for c in policy.generate(REQUESTS, greedy)]
    assert gap(policy, model, 1.0) < 1e-3
    assert gap(policy, model, 0.7) < 1e-3
    updater = vLLMUpdater(policy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    version = policy.version
    assert updater.push(model) == version + 1  # type: ignore[operator]
    assert [c.token_ids for c in policy.generate(REQUESTS, greedy)] != before
    assert gap(policy, model, 1.0) < 1e-3
    assert gap(policy, model, 0.7) < 1e-3
    with torch.no_grad():
        ids = torch.tensor([REQUESTS[0].prompt_ids])
        likeliest = model(ids).logits[0, -1].argmax().item()
    assert policy.generate(REQUESTS[:1], greedy)[0].token_ids[0] == likeliest


def test_completions_are_stamped_and_repeat_from_their_seeds(case: tuple[Path, vLLMWrapper]) -> None:
    _, policy = case
    policy.version = 41
    first = policy.generate(REQUESTS, SamplingSettings())
    again = policy.generate(REQUESTS, SamplingSettings())
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert {c.policy_version for c in first} == {41}
    assert all(len(c.token_ids) == len(c.log_probs) <= 24 for c in first)
    policy.version = 0


def test_an_incomplete_push_is_refused_before_anything_changes(case: tuple[Path, vLLMWrapper]) -> None:
    folder, policy = case
    before = [c.token_ids for c in policy.generate(REQUESTS, SamplingSettings())]
    weights = dict(load_model(folder, ModelSettings(path=str(folder))).named_parameters())
    del weights["model.layers.0.mlp.up_proj.weight"]
    version = policy.version
    with pytest.raises(PolicyError, match=r"lacks 1 weights, model\.layers\.0\.mlp\.up_proj\.weight"):
        vLLMUpdater(policy).push(weights)
    assert policy.version == version
    assert [c.token_ids for c in policy.generate(REQUESTS, SamplingSettings())] == before


def test_a_push_that_fails_half_way_leaves_no_engine_behind(tiny_folder: Path) -> None:
    policy = started(tiny_folder, Engine.in_process)
    weights = {n: w.detach() for n, w in load_model(tiny_folder, ModelSettings(path="")).named_parameters()}
    weights["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(PolicyError, match="the engine was closed"):
        vLLMUpdater(policy).push(weights)
    assert policy.version == 0
    with pytest.raises(PolicyError, match="a weight push failed half-way"):
        policy.generate(REQUESTS, SamplingSettings())


@pytest.mark.parametrize("used", [False, True], ids=["before its first request", "after one"])
def test_a_dead_engine_is_named_and_not_waited_for(tiny_folder: Path, used: bool) -> None:
    import psutil

    policy = started(tiny_folder, Engine.own_process)
    if used:
        policy.generate(REQUESTS, SamplingSettings())
    for child in psutil.Process().children(recursive=True):
        if "python" in child.name() or "VLLM" in child.name():
            child.kill()
    # not by the time limit, whose error says how long it waited
    with pytest.raises(
        PolicyError, match=r"vLLM failed while sampling 8 completions: (EngineDeadError|.*process died)"
    ):
        policy.generate(REQUESTS, SamplingSettings())
    policy.close()
