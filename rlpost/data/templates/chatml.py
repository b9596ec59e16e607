"""ChatML, and the format of Qwen 2.5 and 3, which adds tool calls and their results to it."""

from __future__ import annotations

from rlpost.data.conversation import Message
from rlpost.data.templates.parsing import HeadedTurns, JsonCalls, Turn, UnparsedTextError, read_blocks

TURNS = HeadedTurns("<|im_start|>", "\n", "<|im_end|>", behind="\n", text_end="<|endoftext|>")
CALLS = JsonCalls("arguments")

CHATML = r"""
{%- if tools -%}{{- raise_exception('ChatML has no form for tools: take chat_template_name="qwen"') -}}{%- endif -%}
{%- for m in messages -%}
  {%- if m.tool_calls -%}
    {{- raise_exception('ChatML has no form for tool calls: take chat_template_name="qwen"') -}}
  {%- endif -%}
  {{- '<|im_start|>' + m.role + '\n' -}}
  {%- if m.role == 'assistant' -%}
    {%- generation -%}{{- (m.content or '') + '<|im_end|>' -}}{%- endgeneration -%}
  {%- else -%}
    {{- (m.content or '') + '<|im_end|>' -}}
  {%- endif -%}
  {{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

QWEN = r"""
{%- set rest = messages -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if messages and messages[0].role == 'system' -%}
    {{- messages[0].content + '\n\n' -}}
    {%- set rest = messages[1:] -%}
  {%- endif -%}
  {{- '# Tools\n\nThese functions can be called, one JSON schema a line:\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
  {{- '\n</tools>\n\nWrite each call as a JSON object of its name and arguments between these tags:\n' -}}
  {{- '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for m in rest -%}
  {%- if m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- generation -%}
      {{- m.content or '' -}}
      {%- for call in m.tool_calls or [] -%}
        {%- set f = call.function or call -%}
        {{- ('\n' if m.content or not loop.first else '') + '<tool_call>\n' -}}
        {%- if call.text -%}
          {{- call.text -}}
        {%- else -%}
          {{- '{"name": ' + f.name | tojson + ', "arguments": ' -}}
          {{- (f.arguments if f.arguments is string else f.arguments | tojson) + '}' -}}
        {%- endif -%}
        {{- '\n</tool_call>' -}}
      {%- endfor -%}
      {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def parse_chatml(text: str) -> list[Message]:
    """The messages of a ChatML text; a tool call in it is part of the content."""
    return [turn.message() for turn in TURNS.read(text)]


def parse_qwen(text: str) -> list[Message]:
    """The messages of a Qwen text: the calls that end an answer as its `tool_calls`, each result as a tool's.

    A call whose JSON is bad, and one with words behind it, stays in the content, as does a turn of
    results right behind another, which the template would write as one.
    """
    messages: list[Message] = []
    for turn in TURNS.read(text):
        if turn.role == "tool":
            raise UnparsedTextError("it has a turn of role tool, whose results this format gives to the user's")
        results = None
        if turn.role == "user" and turn.is_complete and not (messages and messages[-1]["role"] == "tool"):
            results = read_blocks(turn.content, "<tool_response>\n", "\n", "\n</tool_response>")
        if results is not None:
            messages.extend({"role": "tool", "content": result} for result in results)
        else:
            messages.append(_with_calls(turn) if turn.role == "assistant" else turn.message())
    return messages


def _with_calls(turn: Turn) -> Message:
    """The assistant's turn as a message, the calls at its end taken out of the content."""
    opening, closing = "<tool_call>\n", "\n</tool_call>"
    content, calls = turn.content, []
    while content.endswith(closing):
        begin = content.rfind(opening)
        call = CALLS.read(content[begin + len(opening) : -len(closing)]) if begin >= 0 else None
        # a line break stands between what is said and a call, and none before a call at the beginning
        if call is None or (begin > 0 and content[begin - 1] != "\n") or begin == 1:
            break
        calls.insert(0, call)
        content = content[: max(0, begin - 1)]
    return turn.message(content=content, tool_calls=calls) if calls else turn.message()
