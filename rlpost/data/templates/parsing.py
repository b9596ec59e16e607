"""What the readers of all chat formats share: turns with headers, and calls written as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rlpost.data.conversation import PADDING_ROLE, Message
from rlpost.errors import DataError


class UnparsedTextError(DataError, RuntimeError):
    """A text that is no conversation in the format it was read as."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as it stands in a text; not `is_complete` where its end is missing."""

    role: str
    content: str
    is_complete: bool = True

    def message(self, **entries: Any) -> Message:
        """The turn as a message; `entries` replace and add to what it says."""
        message: Message = {"role": self.role, "content": self.content, **entries}
        return message if self.is_complete else {**message, "is_complete": False}


@dataclass(frozen=True, slots=True)
class HeadedTurns:
    """A text of turns, each `opening role closing content end`, with `behind` after the end.

    `begin` may stand before the first turn. `text_end` may end a text in place of `end`, and it and
    `filler` may fill a text on either side, as padding does.
    """

    opening: str
    closing: str
    end: str
    behind: str = ""
    begin: str = ""
    text_end: str = ""
    filler: str = ""

    def read(self, text: str) -> list[Turn]:
        """The turns of `text`. Raises UnparsedTextError where it holds none, or something between them."""
        body, ended = self._without_filling(text)
        turns: list[Turn] = []
        place = 0
        while place < len(body):
            turn, place = self._turn_at(place, body)
            turns.append(turn)
        if not turns:
            raise UnparsedTextError(f"no {self.opening} is in it")
        if ended and not turns[-1].is_complete:
            turns[-1] = Turn(turns[-1].role, turns[-1].content)
        return turns

    def _without_filling(self, text: str) -> tuple[str, bool]:
        """`text` without what begins and fills it, and whether `text_end` ended it."""
        fillers = [token for token in (self.text_end, self.filler) if token]
        ended = False
        while found := next((token for token in fillers if text.endswith(token)), None):
            text, ended = text.removesuffix(found), ended or found == self.text_end
        while found := next((token for token in fillers if text.startswith(token)), None):
            text = text.removeprefix(found)
        return text.removeprefix(self.begin), ended

    def _turn_at(self, place: int, text: str) -> tuple[Turn, int]:
        """The turn whose header begins at `place`, and where the next one begins."""
        if not text.startswith(self.opening, place):
            raise UnparsedTextError(f"{shown(text[place:])} stands outside of any message")
        header_end = text.find(self.closing, place)
        role = text[place + len(self.opening) : header_end]
        if header_end < 0 or not role or role == PADDING_ROLE or self.opening in role or self.end in role:
            raise UnparsedTextError(f"{shown(text[place:])} is no whole header of a message")
        start = header_end + len(self.closing)
        end, following = text.find(self.end, start), text.find(self.opening, start)
        if end < 0 or 0 <= following < end:  # cut off, or the next turn comes before an end
            stop = following if following >= 0 else len(text)
            return Turn(role, text[start:stop], is_complete=False), stop
        behind = end + len(self.end)
        if behind < len(text) and not text.startswith(self.behind, behind):
            raise UnparsedTextError(f"{shown(text[behind:])} stands outside of any message")
        return Turn(role, text[start:end]), min(behind + len(self.behind), len(text))


def shown(text: str) -> str:
    """The beginning of `text`, as an error quotes it."""
    return repr(text[:40] + "..." if len(text) > 40 else text)


# Calls


def as_json(value: Any) -> str:
    """`value` as the `tojson` of chat templates writes it."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as JSON objects `{"name": ..., arguments_key: {...}}`, with an "id" last where `with_id`."""

    arguments_key: str
    with_id: bool = False

    def read(self, text: str) -> dict[str, Any] | None:
        """The call that `text` is; None where it is none.

        That is `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, with its `id`
        where it has one. `text` is kept in it where a template would write the same call differently.
        """
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(read, dict) or not isinstance(read.get("name"), str):
            return None
        arguments = read.get(self.arguments_key, {})
        if not isinstance(arguments, dict):
            return None
        call: dict[str, Any] = {"type": "function", "function": {"name": read["name"], "arguments": arguments}}
        if self.with_id and isinstance(read.get("id"), str) and read["id"]:
            call["id"] = read["id"]
        return call if text == self._written(call) else {**call, "text": text}

    def read_all(self, text: str, separator: str) -> list[dict[str, Any]] | None:
        """The calls that `text` is, with `separator` between them; None where it is anything else."""
        calls: list[dict[str, Any]] = []
        place = 0
        while True:
            try:
                _, end = json.JSONDecoder().raw_decode(text, place)
            except (ValueError, RecursionError):
                return None
            call = self.read(text[place:end])
            if call is None:
                return None
            calls.append(call)
            if end == len(text):
                return calls
            if not text.startswith(separator, end):
                return None
            place = end + len(separator)

    def _written(self, call: dict[str, Any]) -> str:
        """The JSON object of a call as templates write it."""
        function = call["function"]
        fields = {"name": function["name"], self.arguments_key: function["arguments"]}
        return as_json({**fields, "id": call["id"]} if "id" in call else fields)


def read_blocks(text: str, opening: str, separator: str, closing: str) -> list[str] | None:
    """What stands in the blocks that `text` is; None where it is anything else."""
    if len(text) < len(opening) + len(closing) or not (text.startswith(opening) and text.endswith(closing)):
        return None
    return text[len(opening) : len(text) - len(closing)].split(closing + separator + opening)
