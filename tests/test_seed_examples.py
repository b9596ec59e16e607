"""The examples of the seed documents, with changed imports and a small local model."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict

from rlpost.extras import is_installed


@pytest.mark.vllm
@pytest.mark.skipif(not is_installed("vllm"), reason="vLLM is not installed")
@pytest.mark.timeout(240)
def test_a_collector_of_dialog_turns_with_vllm(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, which starts sooner
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    from rlpost.collectors import LLMCollector
    from rlpost.envs import LLMEnv
    from rlpost.policies import vLLMWrapper
    from rlpost.testing import DummyStrDataLoader

    threads = torch.get_num_threads()
    llm_model = vllm.LLM(str(tiny_folder), max_model_len=512)  # on a machine whose memory is shared
    tokenizer: Any = llm_model.get_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    policy = vLLMWrapper(llm_model)
    dataloader = DummyStrDataLoader(1)
    env = LLMEnv.from_dataloader(
        dataloader=dataloader,
        tokenizer=tokenizer,
        from_text=True,
        batch_size=1,
        group_repeats=True,
    )
    collector = LLMCollector(
        env=env,
        policy_factory=lambda: policy,
        dialog_turns_per_batch=env.batch_size[0],
        total_dialog_turns=3,
    )
    printed = ""
    for i, data in enumerate(collector):
        if i == 2:
            printed = str(data)
            break

    assert data is not None
    assert isinstance(data, LazyStackedTensorDict)
    assert (data.batch_size, data.stack_dim) == (torch.Size([1, 1]), 1)
    for name in ("attention_mask", "collector", "done", "terminated", "text", "text_response", "tokens"):
        assert name in printed
    prompts = list(islice(DummyStrDataLoader(1), 3))
    assert data["text"][0][0] == prompts[2]["text"][0]
    ids, sampled = data["tokens"][0, 0], data["tokens_response"][0, 0]
    prompt = tokenizer(data["text"][0][0])["input_ids"]
    assert ids.tolist() == prompt + sampled.tolist()
    assert data["text_response"][0][0] == tokenizer.decode(sampled, skip_special_tokens=True)
    assert data["attention_mask"].shape == data["tokens"].shape
    assert data["collector", "traj_ids"].tolist() == [[2]]
    assert data["done"].tolist() == [[[False]]]  # as the model read it
    del collector
    llm_model.llm_engine.engine_core.shutdown()
    torch.set_num_threads(threads)
