#!/usr/bin/env bash
# transformers 5.19.0, tokenizers 0.23.3: advice that spoils a tokenizer it is not about.
#
# A folder holds a Llama-like byte-level tokenizer.json of 100,100 tokens, and a config.json of model_type "llama" that does not say which
# version of transformers wrote it, as configurations written by other tools do not. Loading the tokenizer logs that it
# has "an incorrect regex pattern" and that fix_mistral_regex=True should be given.
#
# Guess: the warning is about Mistral's tokenizers, so it does not appear for a Llama, and the flag changes nothing there.
# Seen: the warning appears for any model type once "transformers_version" is missing. Without the flag the ids are those
# of the file. With the flag, as advised, the rule for splitting words becomes Mistral's, and the ids are others: numbers
# of three digits, which the file keeps whole, are cut into digits. Nothing says so.
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.19.0 tokenizers==0.23.3
cat > "$folder/see.py" <<'P'
import json, logging, sys
from pathlib import Path
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.utils import logging as hf

folder = Path(sys.argv[1])
folder.mkdir()
# Llama 3's rule: up to three digits stay together
words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>"], show_progress=False
)
tokenizer.train_from_iterator(["what is 128 + 256? 128 and 256 are 384"] * 20, trainer)
described = json.loads(tokenizer.to_str())
vocabulary = described["model"]["vocab"]
vocabulary |= {f"unused {n}": n for n in range(len(vocabulary), 100_100)}  # smaller ones are not looked at
tokenizer = Tokenizer.from_str(json.dumps(described))
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}))
(folder / "config.json").write_text(json.dumps({"model_type": "llama"}))

said: list[str] = []
class Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())
hf.get_logger("transformers").addHandler(Keep())

text = "what is 128 + 256?"
own = tokenizer.encode(text).tokens
plain = AutoTokenizer.from_pretrained(folder)
warned = any("fix_mistral_regex=True" in line for line in said)
advised = AutoTokenizer.from_pretrained(folder, fix_mistral_regex=True)
(folder / "config.json").write_text(json.dumps({"model_type": "llama", "transformers_version": "4.40.0"}))
said.clear()
AutoTokenizer.from_pretrained(folder)
print("the file         ", own)
print("loaded           ", plain.tokenize(text))
print("loaded as advised", advised.tokenize(text))
print("warned without a version:", warned, " with one:", bool(said))
as_seen = (
    warned and not said and plain.tokenize(text) == own and "128" in "".join(own)
    and any("128" in token for token in own) and not any("128" in token for token in advised.tokenize(text))
)
sys.exit(0 if as_seen else 1)
P
"$folder/venv/bin/python" "$folder/see.py" "$folder/model" 2>/dev/null
