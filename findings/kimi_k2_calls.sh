#!/usr/bin/env bash
# llama-cpp-python 0.3.36 (llama.cpp's copy of Kimi K2's chat template), transformers 5.19.0: no conversation with a call
# can be rendered.
#
# Guess: a template that its maker ships renders, with transformers' apply_chat_template, the calls that it is written for.
# Seen: it collects the names of calls with list.append. transformers compiles templates in jinja's immutable sandbox, where
# changing a list is refused, so every conversation with tool_calls raises a SecurityError. One without calls renders, and
# nothing warns when the tokenizer is loaded.
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.19.0 jinja2
"$folder/venv/bin/pip" download --quiet --no-deps --no-binary=llama-cpp-python --dest "$folder" llama-cpp-python==0.3.36
cat > "$folder/see.py" <<'P'
import sys
import tarfile
from pathlib import Path

from jinja2.exceptions import SecurityError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

[packed] = Path(sys.argv[1]).glob("llama_cpp_python-*.tar.gz")
with tarfile.open(packed) as archive:
    [name] = [n for n in archive.getnames() if n.endswith("/models/templates/moonshotai-Kimi-K2.jinja")] or [
        n for n in archive.getnames() if n.endswith("/models/templates/Kimi-K2-Instruct.jinja")
    ]
    names = [n for n in archive.getnames() if "/models/templates/Kimi-K2-" in n and n.endswith(".jinja")]
    texts = {n.rpartition("/")[2]: archive.extractfile(n).read().decode() for n in names}
assert texts, "the templates have gone"
call = {"id": "functions.sky:0", "type": "function", "function": {"name": "sky", "arguments": {"city": "Rome"}}}
plain = [{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "Sunny."}]
for name, text in texts.items():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<eos>")
    tokenizer.chat_template = text
    assert "Sunny." in tokenizer.apply_chat_template(plain, tokenize=False)
    try:
        tokenizer.apply_chat_template([plain[0], {"role": "assistant", "content": "", "tool_calls": [call]}], tokenize=False)
    except SecurityError as error:
        print(f"{name}: {error}")
    else:
        sys.exit(f"{name} renders a call now")
P
"$folder/venv/bin/python" "$folder/see.py" "$folder"
