"""What vLLM chooses for rlpost's arguments on an H100 that is not there, as JSON: run in a process of its own.

The wheel for CPUs has the same configuration code; only its kernels are missing, and the platform is chosen here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.modules |= {name: ModuleType(name) for name in ("vllm._C", "vllm._C_stable_libtorch")}

import vllm.platforms as platforms  # noqa: E402
from vllm.platforms import cuda  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402

GIB = 2**30


class H100(cuda.CudaPlatformBase):
    """The answers that vLLM's configuration asks of a GPU."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
        return (capability if isinstance(capability, tuple) else divmod(capability, 10)) <= (9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 * GIB

    @classmethod
    def device_count(cls) -> int:
        return 1


platforms._current_platform = H100()  # before anything else of vLLM asks which one it is

import torch  # noqa: E402
import vllm.config.vllm as config_module  # noqa: E402
from vllm import EngineArgs  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402

from rlpost.policies import vllm as policy  # noqa: E402
from rlpost.settings import VLLMSettings  # noqa: E402

# what vLLM finds out by importing the model with its kernels, in a process of its own
_FACTS: dict[str, Any] = {
    **dict.fromkeys((each.name for each in fields(registry._ModelInfo)), False),
    "architecture": "LlamaForCausalLM",
    "is_text_generation_model": True,
    "attn_type": "decoder",
    "default_seq_pooling_type": "LAST",
    "default_tok_pooling_type": "ALL",
    "score_type": "bi-encoder",
    "supports_pp": True,
    "supported_video_pruning_methods": (),
}
LLAMA = registry._ModelInfo(**_FACTS)


def choices(folder: Path, settings: VLLMSettings, **more: Any) -> dict[str, Any]:
    """The arguments for `settings`, and what vLLM makes of them."""
    arguments = policy.engine_arguments(folder, settings, max_model_len=1024, seed=0, **more)
    config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    return {
        "arguments": arguments,
        "use_v2_model_runner": config.use_v2_model_runner,
        "scheduler": config.scheduler_config.get_scheduler_cls().__name__,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        "enforce_eager": config.model_config.enforce_eager,
        "dtype": str(config.model_config.dtype),
    }


def main(folder: Path) -> None:
    """Print the choices for an engine, for one with an adapter, and the arguments where nothing is said of memory."""
    config_module.HAS_TRITON = True  # the wheel for CUDA has it
    registry._LazyRegisteredModel.inspect_model_cls = lambda model: LLAMA  # type: ignore[method-assign]
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_properties = lambda index=0: SimpleNamespace(total_memory=80 * GIB)  # type: ignore[assignment]
    policy.bfloat16_is_fast = lambda device: (True, "")
    chosen = VLLMSettings(max_num_seqs=512, kv_cache_gb=1.5, gpu_memory_utilization=0.1)
    found = {
        "plain": choices(folder, chosen),
        "adapter": choices(folder, chosen, adapter_rank=16),
    }
    torch.cuda.get_device_properties = lambda index=0: SimpleNamespace(total_memory=24 * GIB)  # type: ignore[assignment]
    found["left open"] = policy.engine_arguments(folder, VLLMSettings(sleep=True), max_model_len=1024, seed=0)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
