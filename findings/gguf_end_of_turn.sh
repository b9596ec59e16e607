#!/usr/bin/env bash
# transformers 5.19.0, gguf 0.19.0: a GGUF file says where a turn ends, and transformers does not read it.
#
# GGUF has two keys for ends: tokenizer.ggml.eos_token_id for a text and tokenizer.ggml.eot_token_id for a turn. llama.cpp
# stops at both. Instruct models whose template ends turns with another token than a text have both, Gemma 2 and 3 for
# example (<eos> and <end_of_turn>).
#
# Guess: a model that transformers reads with gguf_file= has both ids in config.eos_token_id, from which
# generation_config is made, so generate() stops at the end of a turn.
# Seen: only the end of a text. generate() goes on behind every answer up to max_new_tokens, and the tokenizer that is read
# beside it knows the other token as special, without a role.
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
# any build of torch will do; for a small one: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu TORCH=torch==2.13.0+cpu
"$folder/venv/bin/pip" install --quiet "${TORCH:-torch==2.13.0}" transformers==5.19.0 gguf==0.19.0
cat > "$folder/see.py" <<'P'
import sys
import gguf
import numpy as np
from transformers import AutoConfig

file = sys.argv[1]
writer = gguf.GGUFWriter(file, "llama")
writer.add_context_length(64)
writer.add_embedding_length(32)
writer.add_block_count(1)
writer.add_feed_forward_length(48)
writer.add_head_count(2)
writer.add_head_count_kv(1)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(16)
writer.add_vocab_size(5)
writer.add_tokenizer_model("gpt2")
writer.add_token_list(["<eos>", "<end_of_turn>", "a", "b", "ab"])
writer.add_token_types([3, 3, 1, 1, 1])
writer.add_token_merges(["a b"])
writer.add_eos_token_id(0)
writer.add_eot_token_id(1)
shapes = {"token_embd": (5, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32)}
shapes |= {"blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48)}
for name, shape in shapes.items():
    writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

fields = gguf.GGUFReader(file).fields
written = {key: int(fields[f"tokenizer.ggml.{key}"].contents()) for key in ("eos_token_id", "eot_token_id")}
folder, _, name = file.rpartition("/")
read = AutoConfig.from_pretrained(folder, gguf_file=name).eos_token_id
print("in the file:", written, " read by transformers:", read)
sys.exit(0 if written == {"eos_token_id": 0, "eot_token_id": 1} and read == 0 else 1)
P
mkdir "$folder/model"
"$folder/venv/bin/python" "$folder/see.py" "$folder/model/m.gguf"
