"""The format of Gemma 2 and 3."""

from __future__ import annotations

from rlpost.data.conversation import Message
from rlpost.data.templates.parsing import HeadedTurns, Turn, UnparsedTextError

TURNS = HeadedTurns(
    "<start_of_turn>", "\n", "<end_of_turn>", behind="\n", begin="<bos>", text_end="<eos>", filler="<pad>"
)


def parse_gemma(text: str) -> list[Message]:
    """The messages of a Gemma text; a system message has become part of the first of the user."""
    return [_message(turn) for turn in TURNS.read(text)]


def _message(turn: Turn) -> Message:
    if turn.role not in ("user", "model"):
        raise UnparsedTextError(f"it has a turn of role {turn.role}, and this format knows user and model alone")
    return turn.message(role="assistant") if turn.role == "model" else turn.message()
