"""Chat templates that behave as those of six families of models do, on small tokenizers of our own.

What each writes is the real one's: its special tokens, headers, line breaks, what it strips, how it
writes tool calls and results, and what it refuses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

CHATML = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{{ '' }}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ '' }}{% endif -%}
"""

QWEN = """\
{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' and m.tool_calls -%}
    {{- '<|im_start|>assistant' -}}
    {%- if m.content -%}{{- '\n' + m.content -}}{%- endif -%}
    {%- for call in m.tool_calls -%}
      {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson + '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
  {%- set system, rest = messages[0].content | trim, messages[1:] -%}
{%- else -%}
  {%- set system, rest = '', messages -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' -}}
{{- system + '<|eot_id|>' -}}
{%- for m in rest -%}
  {%- if m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}{{- raise_exception('one tool call at a time') -}}{%- endif -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + m.tool_calls[0].function.name -}}
    {{- '", "parameters": ' + m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' -}}
  {%- elif m.role == 'tool' -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""

GEMMA = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for m in messages -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role == 'tool' -%}
    {{- raise_exception('Conversation roles must alternate user/assistant') -}}
  {%- endif -%}
  {%- set role = 'model' if m.role == 'assistant' else m.role -%}
  {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""

MISTRAL = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
  {%- set system, rest = messages[0].content + '\n\n', messages[1:] -%}
{%- else -%}
  {%- set system, rest = '', messages -%}
{%- endif -%}
{%- for m in rest -%}
  {%- if m.role == 'user' -%}
    {{- '[INST] ' + (system if SYSTEM_WITH else '') + m.content + '[/INST]' -}}
  {%- elif m.tool_calls -%}
    {{- '[TOOL_CALLS] [' -}}
    {%- for call in m.tool_calls -%}
      {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') -}}
    {%- endfor -%}
    {{- ']' + eos_token -}}
  {%- elif m.role == 'tool' -%}
    {{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
  {%- else -%}
    {{- ' ' + m.content | trim + eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""

PLAIN = """\
{%- for m in messages -%}
### {{ m.role | capitalize }}:
{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}

{{ '' }}
{%- endfor -%}
{%- if add_generation_prompt %}### Assistant:
{{ '' }}{% endif -%}
"""


@dataclass(frozen=True)
class Family:
    """A template, the special tokens that it writes, and which of them begin and end a text."""

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None


CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
MISTRAL_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
FAMILIES = {
    "chatml": Family(CHATML, CHATML_TOKENS, "<|im_end|>"),
    "qwen": Family(QWEN, CHATML_TOKENS, "<|im_end|>"),
    "llama3": Family(LLAMA3, LLAMA3_TOKENS, "<|eot_id|>", "<|begin_of_text|>"),
    "gemma": Family(GEMMA, GEMMA_TOKENS, "<eos>", "<bos>"),  # whose end of a turn is not its end of a text
    "mistral": Family(MISTRAL.replace("SYSTEM_WITH", "loop.first"), MISTRAL_TOKENS, "</s>", "<s>"),
    "plain": Family(PLAIN, ("<s>", "</s>"), "</s>", "<s>"),
}
# tokenizers for formats that are written by name: their special tokens
HEADED_TOKENS = ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>")
MISTRAL7_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_CONTENT]")
DEEPSEEK_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
BY_NAME = FAMILIES | {
    "llama4": Family("", HEADED_TOKENS, "<|eot|>", "<|begin_of_text|>"),
    "mistral": Family("", MISTRAL7_TOKENS, "</s>", "<s>"),
    "deepseek": Family("", DEEPSEEK_TOKENS, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
}
# each ends the last answer in a way of its own: with its name's first special token, and more or less behind it
ENDINGS = {
    "phi": "{{ '<|end|>\n' }}{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% endif %}",
    "command": "{{ '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}",
    "gpt-oss": "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}",
    "base": "{{ '<|im_end|>\n' }}",
}
TURNS = """\
{%- for m in messages -%}
{{ '<|start|>' + m.role + '<|message|>' + m.content }}ENDING
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|message|>OPENED' }}{% endif -%}
"""


def ending(name: str, opened: str = "") -> Family:
    """Turns that end as ENDINGS says; the generation prompt ends with `opened`, as R1's does with a thought."""
    tokens = ("<|endoftext|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|im_end|>")
    tokens = (*tokens, "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>")
    return Family(TURNS.replace("ENDING", ENDINGS[name]).replace("OPENED", opened), tokens, "<|endoftext|>")


# as the template of Mistral 7B v0.3 does: the system message stands with the last message, if a user's
SYSTEM_LAST = Family(MISTRAL.replace("SYSTEM_WITH", "loop.last"), MISTRAL_TOKENS, "</s>", "<s>")


@cache
def bytes_tokenizer(family: Family) -> Any:
    """A token a byte, and the special ones; a text begins with the family's first token if it has one."""
    return _finished([], family)


@cache
def merging_tokenizer(family: Family) -> Any:
    """Merges of bytes learned from a few lines, among them line breaks and words with the space before."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    lines = ["\n\n\n What is Four? Four. I think: Six.", "Assistant: Four. Be brief. \n\n", ">\n\nFour: Six\n\n"] * 20
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    learned.train_from_iterator(lines, trainer)
    return _finished([tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]], family)


def _finished(merges: list[tuple[str, str]], family: Family) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [*family.special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if family.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, vocabulary[family.bos])]
        )
    others = [token for token in family.special if token not in (family.bos, family.eos)]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.eos, additional_special_tokens=others
    )
    fast.chat_template = family.template
    fast.name_or_path = "models/Small-1B"
    return fast


# Kinds of templates that render an answer otherwise once more follows, or keep less than the messages say. Each writes
# turns as <|start|>role<|message|>content<|end|>, with one habit of a family of models.
_KIND_TOKENS = ("<|endoftext|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_OPENING = "{%- if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif -%}"
_LAST_QUESTION = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
"""
_TURN = "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
_CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
KINDS = {
    # earlier thoughts go once a question follows; the last answer has an empty one if it has none (Qwen 3)
    "forgets": _LAST_QUESTION
    + """\
{%- for m in messages -%}
  {%- set thoughts = m.reasoning_content or '' -%}
  {{- '<|start|>' + m.role + '<|message|>' -}}
  {%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thoughts) -%}
    {{- '<think>\n' + thoughts + '\n</think>\n\n' -}}
  {%- endif -%}
  {{- m.content }}"""
    + _CALLS
    + """{{ '<|end|>' -}}
{%- endfor -%}
"""
    + _OPENING,
    # the generation prompt begins a thought, which no rendered answer has; arguments of calls are JSON text, and a
    # call has no content (R1)
    "opens": """\
{%- for m in messages -%}
  {{- '<|start|>' + m.role + '<|message|>' -}}
  {%- if m.tool_calls -%}
    {%- set f = m.tool_calls[0].function -%}
    {{- '<call>' + f.name + ' ' + f.arguments if m.content is none else '' -}}{{- '</call><|end|>' -}}
  {%- else -%}
    {{- (m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content) + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|message|><think>\n' }}{% endif -%}
""",
    # thoughts begin with a sentence, which stands in the generation prompt alone (Apriel 1.6)
    "reasons": """\
{%- for m in messages -%}
  {{- '<|start|>' + m.role + '<|message|>' -}}
  {{- m.reasoning_content + '\n[BEGIN FINAL RESPONSE]\n' if m.reasoning_content and loop.last else '' -}}
  {{- m.content + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|message|>Here are my reasoning steps:\n' }}{% endif -%}
""",
    # thoughts under another name, before the last answer alone; another end once a question follows; calls end with a
    # token of their own (gpt-oss)
    "channels": _LAST_QUESTION
    + """\
{%- for m in messages -%}
  {%- if m.role == 'assistant' and m.thinking and loop.index0 > ns.last -%}
    {{- '<|start|>assistant.thoughts<|message|>' + m.thinking + '<|end|>' -}}
  {%- endif -%}
  {%- if m.tool_calls -%}
    {{- '<|start|>assistant.' + m.tool_calls[0].function.name + '<|message|>' -}}
    {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' -}}
  {%- else -%}
    {{- '<|start|>' + m.role + '<|message|>' + m.content -}}
    {{- '<|return|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}
""",
    # an empty thought stands in the generation prompt, and before the last answer alone (small Qwen 3.5)
    "empties": _LAST_QUESTION
    + """\
{%- for m in messages -%}
  {{- '<|start|>' + m.role + '<|message|>' -}}
  {{- '<think>\n\n</think>\n\n' if m.role == 'assistant' and loop.index0 > ns.last else '' -}}
  {{- m.content + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|message|><think>\n\n</think>\n\n' }}{% endif -%}
""",
    # behind a result there is no header, and a second call is written otherwise than a first (DeepSeek V3)
    "chains": """\
{%- set ns = namespace(called=false) -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}{{- '<result>' + m.content + '</result>' -}}
  {%- elif m.tool_calls -%}
    {{- '\n' if ns.called else '<|start|>assistant<|message|>' -}}{%- set ns.called = true -%}"""
    + _CALLS
    + """{{ '<|end|>' -}}
  {%- elif m.role == 'assistant' and loop.previtem.role == 'tool' -%}{{- m.content + '<|end|>' -}}
  {%- else -%}"""
    + _TURN
    + """{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|start|>assistant<|message|>' }}{% endif -%}
""",
    # text beside a call, results and later system messages are left out (Llama 3.1, Phi, SmolLM3)
    "drops": """\
{%- for m in messages -%}
  {%- if m.tool_calls -%}{{- '<|start|>assistant<|message|>' -}}"""
    + _CALLS
    + """{{ '<|end|>' -}}
  {%- elif m.role != 'tool' and (m.role != 'system' or loop.first) -%}"""
    + _TURN
    + """{%- endif -%}
{%- endfor -%}
"""
    + _OPENING,
    # content is read in parts alone (Idefics 3, SmolVLM)
    "parts": """\
{%- for m in messages -%}
{{ '<|start|>' + m.role + '<|message|>' }}
{%- for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{{ '<|end|>' }}
{%- endfor -%}
"""
    + _OPENING,
    # the day stands in the system message (Llama 3.2, gpt-oss)
    "dated": "{{ '<|start|>system<|message|>Today: ' + strftime_now('%d %b %Y') + '<|end|>' }}"
    + "{%- for m in messages -%}"
    + _TURN
    + "{%- endfor -%}"
    + _OPENING,
}


def kind(name: str) -> Any:
    """A tokenizer of bytes with a template of `KINDS`."""
    return bytes_tokenizer(Family(KINDS[name], _KIND_TOKENS, "<|endoftext|>"))


def stretches(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool]) -> list[str]:
    """The text of `ids` as what is read and what is trained in turn; what is read comes first."""
    texts = [""] if mask[:1] == [True] else []
    for _, stretch in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        texts.append(tokenizer.decode([token for token, _ in stretch]))
    return texts
