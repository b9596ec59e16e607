"""What vLLM is asked for on a GPU, and what it makes of that: read from its configuration, no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlpost.estimate.needs import USUAL_SHARE
from rlpost.policies.base import Request
from rlpost.policies.vllm import sampling_params
from rlpost.settings import SamplingSettings

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).with_name("cuda_choices.py")

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def choices(tiny_folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(tiny_folder)], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["plain", "adapter"])
def test_vllm_takes_its_second_runner_and_schedules_ahead(choices: dict[str, Any], kind: str) -> None:
    """Seeds, processed log-probs, pushes and versions were read in this road's source: another one has to be read."""
    found = choices[kind]
    assert found["use_v2_model_runner"] is True
    assert found["async_scheduling"] is True
    assert found["scheduler"] == "AsyncScheduler"
    assert found["enforce_eager"] is False
    assert found["chunked_prefill"] is True
    assert found["dtype"] == "torch.bfloat16"


def test_its_memory_and_its_steps_are_those_that_were_chosen(choices: dict[str, Any]) -> None:
    found = choices["plain"]
    assert found["kv_cache_memory_bytes"] == found["arguments"]["kv_cache_memory_bytes"] == 1_500_000_000
    assert found["max_num_batched_tokens"] == 16384  # an AsyncLLM would take 2,048
    assert found["arguments"]["gpu_memory_utilization"] == 0.1
    assert found["arguments"]["max_num_seqs"] == 512
    assert found["arguments"]["logprobs_mode"] == "processed_logprobs"
    assert found["arguments"]["enable_sleep_mode"] is False
    assert choices["adapter"]["arguments"]["max_lora_rank"] == 16
    left_open = choices["left open"]
    assert "kv_cache_memory_bytes" not in left_open
    assert (left_open["gpu_memory_utilization"], left_open["enable_sleep_mode"]) == (USUAL_SHARE, True)
    assert left_open["max_num_batched_tokens"] == 8192  # on 24 GB


@pytest.mark.parametrize("stop", [[], ["\n\n"], ["<|im_start|>"]])
def test_vllm_decodes_tokens_only_to_find_a_stop_text(stop: list[str], tiny_tokenizer: Any) -> None:
    request = Request([1, 2], max_tokens=4, seed=0)
    [params] = sampling_params([request], SamplingSettings(stop=stop), tiny_tokenizer, [7, 9])
    assert params.detokenize is bool(stop)
    assert params.skip_special_tokens is (stop != ["<|im_start|>"])
    assert (params.logprobs, params.stop_token_ids) == (0, [7, 9])
