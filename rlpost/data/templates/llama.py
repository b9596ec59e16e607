"""The formats of Llama 3 (3.1 to 3.3) and Llama 4."""

from __future__ import annotations

import json
from collections.abc import Callable

from rlpost.data.conversation import Message
from rlpost.data.templates.parsing import HeadedTurns, JsonCalls, Turn, UnparsedTextError, as_json

TURNS_3 = HeadedTurns(
    "<|start_header_id|>",
    "<|end_header_id|>\n\n",
    "<|eot_id|>",
    begin="<|begin_of_text|>",
    text_end="<|end_of_text|>",
    filler="<|finetune_right_pad_id|>",
)
TURNS_4 = HeadedTurns(
    "<|header_start|>",
    "<|header_end|>\n\n",
    "<|eot|>",
    begin="<|begin_of_text|>",
    text_end="<|end_of_text|>",
    filler="<|finetune_right_pad|>",
)
CALLS = JsonCalls("parameters")

_TOOLS = r"""
{%- set rest = messages -%}
{%- if tools -%}
  {{- OPENING + 'system' + CLOSING + '\n\n' -}}
  {%- if messages and messages[0].role == 'system' -%}
    {{- messages[0].content + '\n\n' -}}
    {%- set rest = messages[1:] -%}
  {%- endif -%}
  {{- 'These functions can be called. A call is a JSON object and nothing else: ' -}}
  {{- '{"name": <name>, "parameters": {<parameter>: <value>}}' -}}
  {%- for tool in tools -%}{{- '\n\n' + tool | tojson(indent=4) -}}{%- endfor -%}
  {{- END -}}
{%- endif -%}
"""

_CALL = r"""
{%- set f = call.function or call -%}
{%- if call.text -%}
  {{- call.text -}}
{%- else -%}
  {{- '{"name": ' + f.name | tojson + ', "parameters": ' -}}
  {{- (f.arguments if f.arguments is string else f.arguments | tojson) + '}' -}}
{%- endif -%}
"""

LLAMA3 = (
    r"""
{%- set OPENING, CLOSING, END = '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>' -%}
{{- '<|begin_of_text|>' -}}
"""
    + _TOOLS
    + r"""
{%- for m in rest -%}
  {{- OPENING + ('ipython' if m.role == 'tool' else m.role) + CLOSING + '\n\n' -}}
  {%- if m.tool_calls -%}
    {%- if m.content or m.tool_calls | length != 1 -%}
      {{- raise_exception('Llama 3 writes one call, with nothing beside it') -}}
    {%- endif -%}
    {%- set call = m.tool_calls[0] -%}
    {%- generation -%}
"""
    + _CALL
    + r"""
      {{- END -}}
    {%- endgeneration -%}
  {%- elif m.role == 'assistant' -%}
    {%- generation -%}{{- (m.content or '') + END -}}{%- endgeneration -%}
  {%- elif m.role == 'tool' -%}
    {{- m.content | tojson + END -}}
  {%- else -%}
    {{- (m.content or '') + END -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- OPENING + 'assistant' + CLOSING + '\n\n' -}}{%- endif -%}
"""
)

LLAMA4 = (
    r"""
{%- set OPENING, CLOSING, END = '<|header_start|>', '<|header_end|>', '<|eot|>' -%}
{{- '<|begin_of_text|>' -}}
"""
    + _TOOLS
    + r"""
{%- for m in rest -%}
  {{- OPENING + ('ipython' if m.role == 'tool' else m.role) + CLOSING + '\n\n' -}}
  {%- if m.role == 'assistant' -%}
    {%- generation -%}
      {%- if m.tool_calls -%}
        {{- '<|python_start|>' + (m.content or '') + '<|python_end|>' -}}
        {%- for call in m.tool_calls -%}
"""
    + _CALL
    + r"""
        {%- endfor -%}
      {%- else -%}
        {{- m.content or '' -}}
      {%- endif -%}
      {{- END -}}
    {%- endgeneration -%}
  {%- elif m.role == 'tool' -%}
    {{- m.content | tojson + END -}}
  {%- else -%}
    {{- (m.content or '') + END -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- OPENING + 'assistant' + CLOSING + '\n\n' -}}{%- endif -%}
"""
)


def parse_llama3(text: str) -> list[Message]:
    """The messages of a Llama 3 text; an answer that is one call alone becomes its `tool_calls`."""
    return [_message(turn, _alone) for turn in TURNS_3.read(text)]


def parse_llama4(text: str) -> list[Message]:
    """The messages of a Llama 4 text; the calls behind `<|python_end|>` become `tool_calls`."""
    return [_message(turn, _behind_python) for turn in TURNS_4.read(text)]


def _message(turn: Turn, with_calls: Callable[[Turn], Message]) -> Message:
    if turn.role == "assistant":
        return with_calls(turn)
    if turn.role == "tool":
        raise UnparsedTextError("it has a turn of role tool, which this format calls ipython")
    return _result(turn) if turn.role == "ipython" else turn.message()


def _alone(turn: Turn) -> Message:
    call = CALLS.read(turn.content)
    return turn.message() if call is None else turn.message(content="", tool_calls=[call])


def _behind_python(turn: Turn) -> Message:
    opening, closing = "<|python_start|>", "<|python_end|>"
    if turn.content.startswith(opening) and closing in turn.content:
        content, _, written = turn.content.removeprefix(opening).partition(closing)
        calls = CALLS.read_all(written, separator="")
        if calls is not None:
            return turn.message(content=content, tool_calls=calls)
    return turn.message()


def _result(turn: Turn) -> Message:
    """A tool's message where the turn holds its words as a JSON string, as the template writes them."""
    try:
        said = json.loads(turn.content)
    except (ValueError, RecursionError):
        said = None
    if turn.is_complete and isinstance(said, str) and as_json(said) == turn.content:
        return {"role": "tool", "content": said}
    return turn.message()
