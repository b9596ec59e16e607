"""Real vLLM on tiny models: log-probs, weight pushes that arrive, and engines that fail."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlpost.collectors import LLMCollector
from rlpost.data import ReplayBuffer
from rlpost.data.ragged import strings
from rlpost.envs import DatasetChatEnv
from rlpost.errors import ConfigError, PolicyError
from rlpost.imports import is_installed
from rlpost.model.conversion import tiny_tokenizer
from rlpost.model.load import load_model
from rlpost.model.logprobs import token_log_probs
from rlpost.model.lora import add_adapter, save_adapter
from rlpost.model.packing import Row, pack
from rlpost.model.tokenizer import load_tokenizer
from rlpost.policies import Face, Request, TransformersWrapper, vllm_engine, vLLMWrapper
from rlpost.settings import DType, Engine, LoRASettings, SamplingSettings, VLLMSettings
from rlpost.weight_sync.vllm import vLLMAdapterUpdater, vLLMUpdater
from tests.policies.test_transformers import assert_stops_at, remaining, stops_in
from tests.processes import children, kill_engines_since

pytestmark = pytest.mark.vllm

with_peft = pytest.mark.skipif(not is_installed("peft"), reason="peft is not installed")
REQUESTS = [Request([5, 9, 80, 33 + i], 24, 7 + i) for i in range(8)]


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def build_model(folder: Path, family: str = "qwen2", **config: Any) -> Path:
    """A random model; Qwen2 has biases on q, k and v, which vLLM fuses, and a head that may be tied."""
    tokenizer = tiny_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": 0}
    made = AutoConfig.for_model(family, **SIZES, **HEADS, **ids, vocab_size=len(tokenizer), **config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # biases too, which would else be 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def started(folder: Path, engine: Engine, **more: Any) -> vLLMWrapper:
    settings = VLLMSettings(engine=engine, dtype=DType.float32, max_num_seqs=16, timeout_seconds=120)
    policy = vLLMWrapper(
        folder, load_tokenizer(folder), settings=settings, sampling=SamplingSettings(), max_model_len=200, **more
    )
    policy.start()
    return policy


def disturb(model: PreTrainedModel, size: float = 0.1) -> None:
    """Add noise to all that is trained."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn_like(parameter))


def agree(policy: vLLMWrapper, model: PreTrainedModel) -> bool:
    """Whether log-probs are those of the model, with a temperature too."""
    return gap(policy, model, 1.0) < 1e-3 and gap(policy, model, 0.7) < 1e-3


def ids_of(policy: vLLMWrapper, requests: Sequence[Request] = REQUESTS, **sampling: Any) -> list[list[int]]:
    """The ids of freshly sampled completions."""
    return [completion.token_ids for completion in policy.generate(requests, SamplingSettings(**sampling))]


def gap(
    policy: vLLMWrapper, model: PreTrainedModel, temperature: float, requests: Sequence[Request] = REQUESTS
) -> float:
    """Mean |log µ − log π| over freshly sampled completions."""
    completions = policy.generate(requests, SamplingSettings(temperature=temperature))
    rows = [
        Row(torch.tensor(asked.prompt_ids), torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool), log_probs, 0.0)
        for asked, done in zip(requests, completions, strict=True)
        for ids, log_probs in [(done.token_ids, torch.tensor(done.log_probs))]
    ]
    [microbatch] = pack(rows, 10_000, model.device)
    with torch.no_grad():
        log_probs, _ = token_log_probs(model, microbatch, temperature)
    return (log_probs - microbatch.sampler_log_probs).abs().mean().item()


Case = tuple[Path, vLLMWrapper]


@pytest.fixture(scope="module", params=[("tied", Engine.in_process), ("untied", Engine.own_process)], ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    kind, engine = request.param
    folder = build_model(tmp_path_factory.mktemp(kind) / "qwen2", tie_word_embeddings=kind == "tied")
    policy = started(folder, engine)
    yield folder, policy
    policy.close()


def test_what_is_not_drawn_from_is_left_out_of_the_log_probs(case: Case) -> None:
    """Sampled by vLLM and computed plainly; transformers' draws are compared with the same computation."""
    folder, policy = case
    model = load_model(folder)
    vLLMUpdater(policy).push(model)
    all_of_them = SamplingSettings(temperature=0.8, min_p=0.05, top_k=40, top_p=0.7)
    for sampling in (SamplingSettings(top_k=5), SamplingSettings(min_p=0.3), all_of_them):
        for request, done in zip(REQUESTS[:3], policy.generate(REQUESTS[:3], sampling), strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([request.prompt_ids + done.token_ids])).logits[0]
            steps = logits[len(request.prompt_ids) - 1 : -1].float()
            expected = [remaining(row, sampling)[t].log() for row, t in zip(steps, done.token_ids, strict=True)]
            assert done.log_probs == pytest.approx(torch.stack(expected).tolist(), abs=1e-3), sampling


def test_a_stop_text_ends_a_completion_as_in_transformers(case: Case) -> None:
    _, policy = case
    assert_stops_at(policy, REQUESTS, stops_in(policy.generate(REQUESTS, SamplingSettings())))
    assert_stops_at(policy, [Request([5, 9, 7], 40, seed) for seed in range(40)], ["<|im_start|>"])


def test_pushed_weights_agree_with_the_trainer(case: Case) -> None:
    folder, policy = case
    model = load_model(folder)
    before = ids_of(policy, temperature=0.0)
    assert agree(policy, model)
    disturb(model)
    version = policy.version
    assert vLLMUpdater(policy).push(model) == version + 1  # type: ignore[operator]
    assert ids_of(policy, temperature=0.0) != before
    assert agree(policy, model)
    with torch.no_grad():
        ids = torch.tensor([REQUESTS[0].prompt_ids])
        likeliest = model(ids).logits[0, -1].argmax().item()
    assert ids_of(policy, REQUESTS[:1], temperature=0.0)[0][0] == likeliest


def test_weights_of_a_group_arrive_and_empty_the_prefix_cache(case: Case) -> None:
    folder, policy = case
    model = load_model(folder)
    # longer than a block of the cache, so that the second request reads the first one's keys and values
    long = [Request([5 + i % 50 for i in range(150)], 8, 1), Request([5 + i % 50 for i in range(151)], 8, 2)]
    updater = vLLMUpdater(policy, master_address="127.0.0.1", timeout_seconds=60)
    for changed in (0.1, 0.2):  # the group is formed at the first push
        policy.generate(long, SamplingSettings())
        disturb(model, changed)
        version = policy.version
        assert updater.push(model) == version + 1  # type: ignore[operator]
        assert gap(policy, model, 1.0, long) < 1e-3
        assert agree(policy, model)
        assert policy.call_workers("check_weights_changed") == [True]
    assert policy.call_workers("check_weights_changed") == [False]
    with pytest.raises(PolicyError, match=r"q_proj\.weight .*k_proj\.weight"):
        policy.call_workers("update_weight_broadcast", "model.layers.0.self_attn.q_proj.weight", "float32", [64, 64])


def test_a_resting_policy_frees_its_cache_and_samples_the_same(case: Case) -> None:
    _, policy = case
    # longer than a block of the cache, so that a prefix that was kept would be read, as the zeros it has become
    long = [Request([5 + i % 50 for i in range(150)], 8, seed) for seed in range(4)]
    completions = policy.generate(long, SamplingSettings())
    here = type(policy.model).__name__ == "LLM"  # the cache of an engine in another process is not to be seen
    assert not here or policy.model.collective_rpc(cached) != [0.0]
    policy.rest()
    assert not here or policy.model.collective_rpc(cached) == [0.0]
    again = policy.generate(long, SamplingSettings())
    assert [c.token_ids for c in again] == [c.token_ids for c in completions]
    for one, other in zip(again, completions, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_an_engine_that_sleeps_on_a_gpu_wakes_to_sample(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own methods are called, which a CPU's worker ignores with a warning; their order: test_sleep.py."""
    _, policy = case
    before = ids_of(policy)
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        gpu.setattr(policy.settings, "sleep", True)
        policy.rest()
    assert ids_of(policy) == before


def cached(worker: Any) -> float:
    """The sum of what lies in a worker's KV cache, signs left out."""
    return sum(layer.float().abs().sum().item() for layer in worker.model_runner.kv_caches)


def test_a_tensordict_is_answered_as_transformers_does(case: Case) -> None:
    folder, policy = case
    model = load_model(folder)
    vLLMUpdater(policy).push(model)
    prompts = TensorDict({"text": {"prompt": strings(["a longer prompt", "hi"])}}, batch_size=[2])
    policy.face = Face(input_mode="text", generate_kwargs={"max_new_tokens": 12})
    answered = policy(prompts)
    reading = TransformersWrapper(model, policy.tokenizer, generate=False)
    with torch.no_grad():
        expected = reading(TensorDict({"tokens": answered["tokens"]}, batch_size=[2]))["log_probs", "full"]
    sampled = answered["masks", "all_assistant_mask"].unbind()
    pairs = list(zip(answered["log_probs", "full"].unbind(), expected.unbind(), sampled, strict=True))
    assert [mask.sum().item() for mask in sampled] == [r.numel() for r in answered["tokens", "response"].unbind()]
    for told, again, mask in pairs:
        torch.testing.assert_close(told[mask], again[mask], atol=1e-4, rtol=0)
        ratio = (again[mask] - told[mask]).exp()
        assert ratio.sum() ** 2 / ratio.square().sum() / ratio.numel() > 0.99  # the effective sample size
    policy.face = Face(input_mode="tokens", generate=False)
    read = policy(TensorDict({"tokens": answered["tokens"]}, batch_size=[2]))["log_probs", "full"]
    for whole, (_, again, _) in zip(read.unbind(), pairs, strict=True):
        torch.testing.assert_close(whole, again, atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match=r"0\.7"):
        policy.token_log_probs([[5, 6]], SamplingSettings(temperature=0.7))
    policy.face = Face()


def test_an_engine_that_runs_may_be_given_and_stays_its_owners(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, owner = case
    if type(owner.model).__name__ != "LLM":
        return
    policy = vLLMWrapper(owner.model, seed=owner.seed)
    policy.start()  # it has started
    assert (policy.folder, policy.max_model_len) == (folder, 200)
    assert policy.tokenizer("abc")["input_ids"] == owner.tokenizer("abc")["input_ids"]
    assert ids_of(policy) == ids_of(owner)
    monkeypatch.setattr(owner.model.llm_engine.model_config, "logprobs_mode", "raw_logprobs")  # vLLM's own default
    other = vLLMWrapper(owner.model, seed=owner.seed)
    assert other.generate(REQUESTS[:1], SamplingSettings())
    with pytest.raises(ConfigError, match="logprobs_mode='processed_logprobs'"):
        other.generate(REQUESTS[:1], SamplingSettings(temperature=0.7))
    policy.close()
    assert owner.generate(REQUESTS[:1], SamplingSettings())


@pytest.mark.parametrize(("into", "total"), [("buffer", 10), ("queue", 20), ("none", 1)])
def test_a_collector_delivers_whole_rounds_from_vllm(case: Case, into: str, total: int) -> None:
    _, policy = case
    env = DatasetChatEnv([{"question": f"q{i}"} for i in range(5)], num_envs=4, max_completion_tokens=3)
    buffer = ReplayBuffer() if into == "buffer" else None
    received: queue.Queue[Any] | None = queue.Queue() if into == "queue" else None
    collector = LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=4,
        total_dialog_turns=total,
        replay_buffer=buffer,
        queue=received,
    )
    batches: list[Any] = list(collector)
    if buffer is not None:
        batches = [buffer.take(len(buffer))]
    elif received is not None:
        batches = [received.get_nowait() for _ in range(received.qsize())]
    assert sum(batch.numel() for batch in batches) == max(4, ceil(total / 4) * 4)


def test_how_far_sampling_is_is_told_and_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _, policy = case
    monkeypatch.setattr(vllm_engine, "TELL_EVERY", 0.0)
    silent = ids_of(policy)
    before, told = policy.tokens_sampled, []
    policy.on_ended = lambda ended: told.append((ended, policy.tokens_sampled - before))
    try:
        said = ids_of(policy)
    finally:
        policy.on_ended = None
    assert said == silent
    assert told == sorted(told)
    assert told[0][0] < told[-1][0]
    assert (told[-1][0], policy.tokens_sampled - before) == (len(REQUESTS), sum(map(len, said)))


def test_a_request_is_sampled_with_the_weights_that_came_last(case: Case, tmp_path: Path) -> None:
    folder, policy = case
    model = load_model(folder)
    disturb(model)
    model.save_pretrained(tmp_path)
    policy.load_folder(tmp_path, 5)
    done = [future.result(60) for future in [policy.submit(request) for request in REQUESTS]]
    assert {(c.policy_version, len(c.version_changes)) for c in done} == {(5, 0)}
    assert [c.token_ids for c in done] == ids_of(policy)
    assert gap(policy, model, 1.0) < 1e-3
    policy.load_folder(folder, 0)  # as it was
    assert gap(policy, load_model(folder), 1.0) < 1e-3


def test_an_incomplete_push_is_refused_before_anything_changes(case: Case) -> None:
    folder, policy = case
    before = ids_of(policy)
    weights = dict(load_model(folder).named_parameters())
    del weights["model.layers.0.mlp.up_proj.weight"]
    version = policy.version
    with pytest.raises(PolicyError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        vLLMUpdater(policy).push(weights)
    assert policy.version == version
    assert ids_of(policy) == before


def adapted(folder: Path) -> PreTrainedModel:
    """The model of `folder` with an adapter that changes it."""
    torch.manual_seed(1)
    model = load_model(folder)
    add_adapter(model, LoRASettings(enabled=True, rank=4), str(folder))
    disturb(model, 0.2)
    return model


@with_peft
def test_merged_weights_agree_with_the_trainer(case: Case) -> None:
    folder, policy = case
    updater, model = vLLMUpdater(policy), adapted(folder)
    updater.push(load_model(folder))
    assert gap(policy, model, 1.0) > 0.05  # the engine has the model without its adapter
    updater.push(model)
    assert agree(policy, model)


@with_peft
@pytest.mark.parametrize("engine", list(Engine), ids=lambda engine: engine.value)
def test_the_adapter_itself_agrees_with_the_trainer(engine: Engine, tmp_path: Path) -> None:
    folder = build_model(tmp_path / "qwen2", tie_word_embeddings=True)
    model = adapted(folder)
    save_adapter(model, tmp_path / "adapter")
    with closing(started(folder, engine, adapter_rank=4, adapter=tmp_path / "adapter")) as policy:
        assert policy.version == 0
        assert gap(policy, model, 1.0) < 1e-3  # the adapter of a checkpoint, from the start
        updater = vLLMAdapterUpdater(policy)
        for version in (1, 2):  # the second replaces the first under the same name
            before = ids_of(policy)
            disturb(model, 0.2)
            assert gap(policy, model, 1.0) > 0.05
            assert updater.push(model) == version
            assert agree(policy, model)
            assert ids_of(policy) != before


def test_a_push_that_fails_half_way_leaves_no_engine_behind(tiny_folder: Path) -> None:
    policy = started(tiny_folder, Engine.in_process)
    weights = {n: w.detach() for n, w in load_model(tiny_folder).named_parameters()}
    weights["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(PolicyError, match="closed"):
        vLLMUpdater(policy).push(weights)
    assert policy.version == 0
    with pytest.raises(PolicyError, match="taking new"):
        policy.generate(REQUESTS, SamplingSettings())


def test_vllm_leaves_the_classes_of_transformers_as_they_are(tmp_path: Path) -> None:
    """In this process vLLM would rewrite Olmo2Model, and the trained model could not be called any more."""
    build_model(tmp_path, "olmo2")
    before = load_model(tmp_path)
    with closing(started(tmp_path, Engine.in_process)) as policy:
        for model in (before, load_model(tmp_path)):
            assert gap(policy, model, 1.0) < 1e-3
        disturb(before)
        vLLMUpdater(policy).push(before)
        assert gap(policy, before, 1.0) < 1e-3


DEAD = r"EngineDead|\bdied\b"  # not by the time limit, whose error says how long it waited


def test_a_dead_engine_is_named_and_not_waited_for(tiny_folder: Path) -> None:
    before = children()
    policy = started(tiny_folder, Engine.own_process)
    kill_engines_since(before)
    with pytest.raises(PolicyError, match=DEAD):
        policy.generate(REQUESTS, SamplingSettings())
    policy.close()


FORGETFUL = """
import sys
from pathlib import Path
from rlpost.policies import vLLMWrapper
from rlpost.settings import DType, Engine, VLLMSettings

settings = VLLMSettings(engine=Engine.own_process, dtype=DType.float32, max_num_seqs=4, timeout_seconds=120)
policy = vLLMWrapper(Path(sys.argv[1]), settings=settings, max_model_len=64)
if __name__ == "__main__":  # which the engine's process does not run
    policy.start()
    print("started")
"""


def test_an_engine_that_nobody_closed_ends_with_python(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, str(tmp_path / "forgetful.py"), str(tiny_folder)],
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp"), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "started"), done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "tmp").iterdir() if path.is_socket() or "rlpost" in path.name] == []


@pytest.mark.slow
def test_a_given_engine_that_dies_is_not_waited_for(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM

    before = children()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # vLLM's default: an engine in another process
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    llm = LLM(str(tiny_folder), dtype="float32", max_model_len=200, enforce_eager=True)
    policy = vLLMWrapper(llm, settings=VLLMSettings(timeout_seconds=120))
    model = load_model(tiny_folder)
    disturb(model)
    vLLMUpdater(policy).push(model)
    assert gap(policy, model, 1.0) < 1e-3
    kill_engines_since(before)
    with pytest.raises(PolicyError, match=DEAD):
        policy.generate(REQUESTS, SamplingSettings())
    with pytest.raises(PolicyError, match="not running"):
        policy.generate(REQUESTS, SamplingSettings())
