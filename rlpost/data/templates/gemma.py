"""The format of Gemma 2 and 3."""

from __future__ import annotations

from rlpost.data.conversation import Message
from rlpost.data.templates.parsing import HeadedTurns, Turn, UnparsedTextError

TURNS = HeadedTurns(
    "<start_of_turn>", "\n", "<end_of_turn>", behind="\n", begin="<bos>", text_end="<eos>", filler="<pad>"
)

GEMMA = r"""
{%- if tools -%}{{- raise_exception('Gemma has no form for tools') -}}{%- endif -%}
{{- '<bos>' -}}
{%- set system, rest = '', messages -%}
{%- if messages and messages[0].role == 'system' -%}
  {%- if messages | length < 2 or messages[1].role != 'user' -%}
    {{- raise_exception('Gemma puts a system message at the head of the first of the user: let one follow') -}}
  {%- endif -%}
  {%- set system, rest = messages[0].content + '\n\n', messages[1:] -%}
{%- endif -%}
{%- for m in rest -%}
  {%- if m.tool_calls or m.role not in ('user', 'assistant') -%}
    {{- raise_exception('Gemma has messages of the user and the assistant alone, without tool calls') -}}
  {%- endif -%}
  {%- if m.role == 'assistant' -%}
    {{- '<start_of_turn>model\n' -}}
    {%- generation -%}{{- (m.content or '') + '<end_of_turn>' -}}{%- endgeneration -%}
  {%- else -%}
    {{- '<start_of_turn>user\n' + (system if loop.first else '') + (m.content or '') + '<end_of_turn>' -}}
  {%- endif -%}
  {{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""


def parse_gemma(text: str) -> list[Message]:
    """The messages of a Gemma text; a system message has become part of the first of the user."""
    return [_message(turn) for turn in TURNS.read(text)]


def _message(turn: Turn) -> Message:
    if turn.role not in ("user", "model"):
        raise UnparsedTextError(f"it has a turn of role {turn.role}, and this format knows user and model alone")
    return turn.message(role="assistant") if turn.role == "model" else turn.message()
