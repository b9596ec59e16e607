"""Text of OpenEnv's actions and observations: how an action is written, read and checked, and what the model sees."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rlpost.envs.openenv_sessions import INVALID_FRAME, Refused, fault_text
from rlpost.envs.tool_calls import without_control_tokens

INVALID = "That is not a valid action"  # beginning of the answer to a reply that is not an action
_BESIDE = ("metadata", "reward", "done")  # entries of every observation
_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "array": "a JSON list",
    "object": "a JSON object",
    "null": "null",
}
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


# Actions


@dataclass(frozen=True)
class ActionForm:
    """The fields of an action with their JSON schemas: a JSON object, or the bare value of the one that is required."""

    fields: Mapping[str, Mapping[str, Any]]
    required: Sequence[str]

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> Self:
        """The form of a server's action schema."""
        definitions = schema.get("$defs", {})

        def resolved(field: Mapping[str, Any]) -> Mapping[str, Any]:
            name = str(field.get("$ref", "")).rpartition("/")[2]
            found = {**definitions.get(name, {}), **field}
            return {**found, "anyOf": [resolved(each) for each in found["anyOf"]]} if "anyOf" in found else found

        fields = {name: resolved(field) for name, field in schema.get("properties", {}).items() if name != "metadata"}
        return cls(fields, [name for name in schema.get("required", ()) if name in fields])

    @property
    def bare(self) -> str | None:
        """The field whose value alone is an action; None if an action is a JSON object."""
        return self.required[0] if len(self.required) == 1 else None

    @property
    def text(self) -> str:
        """How an action is written, for the model."""
        if self.bare is not None:
            own = self.fields[self.bare]
            about = f": {own['description']}" if own.get("description") else ""
            return without_control_tokens(f"An action is {_kind(own)} ({self.bare}{about}).")
        parts = []
        for name, own in self.fields.items():
            about = [_kind(own), *([own["description"]] if own.get("description") else [])]
            parts.append(f'"{name}" ({"; ".join([*about, *([] if name in self.required else ["optional"])])})')
        return without_control_tokens(f"An action is a JSON object with {', '.join(parts) or 'no entries'}.")

    def parse(self, text: str) -> dict[str, Any]:
        """The action that `text` means. Raises ValueError, which says to the model why it is none."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and (self.bare is None or self.bare in found):
            action = found
        elif self.bare is not None:
            action = {self.bare: _value(text, found, self.fields[self.bare])}
        else:
            raise ValueError(f"{text[:80]!r} is not a JSON object")
        for name in (*self.required, *action):
            if name not in action:
                raise ValueError(f'"{name}" is missing')
            if name not in self.fields:
                raise ValueError(f'there is no "{name}" in an action, only {", ".join(self.fields)}')
            if wrong := _misfit(action[name], self.fields[name]):
                raise ValueError(f'"{name}" {wrong}')
        return action

    def example(self) -> dict[str, Any] | None:
        """An action that fits the schema, None where none is found."""
        tried = {name: _example(self.fields[name]) for name in self.required}
        return tried if all(_fits(value, self.fields[name]) for name, value in tried.items()) else None

    def written(self, action: Mapping[str, Any]) -> str:
        """An action as the model would write it."""
        value = action if self.bare is None or list(action) != [self.bare] else action[self.bare]
        return value if isinstance(value, str) else json.dumps(value)

    def refusal(self, refused: Refused) -> str | None:
        """The model's text for an action that breaks a finer rule of the server; None for any other error.

        An error about anything but a field of the action is the server's fault.
        """
        of_action = all(fault["loc"] and fault["loc"][0] in self.fields for fault in refused.faults)
        if refused.code != INVALID_FRAME or not refused.faults or not of_action:
            return None
        return f"{INVALID}: {'; '.join(map(fault_text, refused.faults))}"


def is_of_tools(schema: Mapping[str, Any]) -> bool:
    """Whether actions are calls of tools: those of an MCP environment."""
    fields = schema.get("properties", {})
    kind = fields.get("type", {}).get("const")
    return kind in ("call_tool", "list_tools") or (schema.get("title") == "Action" and not fields.keys() - {"metadata"})


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(_kind, field["anyOf"])))
    if "enum" in field or "const" in field:
        return f"one of {', '.join(map(json.dumps, field.get('enum', [field.get('const')])))}"
    least, most = field.get("minimum"), field.get("maximum")
    bounds = (f" from {least}" if least is not None else "") + (f" up to {most}" if most is not None else "")
    return f"{_KINDS.get(str(field.get('type')), 'a JSON value')}{bounds}"


def _value(text: str, read: Any, field: Mapping[str, Any]) -> Any:
    """The value of a field that `text` means, which is `read` as JSON or not JSON. Raises ValueError for none."""
    if not text:
        raise ValueError("it is empty")
    if field.get("type") == "string":
        return text
    if read is None and text != "null":
        if "type" in field:
            raise ValueError(f"{text[:80]!r} is not {_kind(field)}")
        return text  # as of an enumeration, or of several types
    return read


def _misfit(value: Any, field: Mapping[str, Any]) -> str | None:
    """Why a value does not fit a field's schema; None if it does, as far as types, choices and bounds say."""
    return None if _fits(value, field) else f"must be {_kind(field)}, and is {json.dumps(value)[:80]}"


def _fits(value: Any, field: Mapping[str, Any]) -> bool:
    if "anyOf" in field:
        return any(_fits(value, each) for each in field["anyOf"])
    if value not in field.get("enum", [field.get("const", value)]):
        return False
    types = _TYPES.get(str(field.get("type")))
    if types is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
        return False
    least, most = field.get("minimum", -math.inf), field.get("maximum", math.inf)
    return not isinstance(value, int | float) or least <= value <= most


def _example(field: Mapping[str, Any]) -> Any:
    if "anyOf" in field:
        return _example(field["anyOf"][0])
    if "enum" in field or "const" in field:
        return field.get("enum", [field.get("const")])[0]
    least = field.get("minimum", 0)
    given = {"integer": least, "number": least, "boolean": True, "string": "a", "array": [], "object": {}}
    return given.get(str(field.get("type")))


# Observations


def observation_text(observation: Mapping[str, Any]) -> str:
    """The observation for the model: its one text, or its entries as JSON; a tool's result as text."""
    if "tool_name" in observation:
        return without_control_tokens(_result_text(observation))
    entries = {name: value for name, value in observation.items() if name not in _BESIDE and value is not None}
    values = list((entries or observation.get("metadata") or {}).values())
    if len(values) == 1 and isinstance(values[0], str):
        return without_control_tokens(values[0])
    shown = json.dumps(entries or observation.get("metadata") or {}, ensure_ascii=False)
    return without_control_tokens(shown if values else "")


def tool_failure(observation: Mapping[str, Any]) -> str | None:
    """The type of a failed call's error; None if it succeeded."""
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, dict):
        return str(error.get("error_type"))
    return "tool" if isinstance(result, dict) and result.get("is_error") is True else None


def tools_of(observation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas of listed tools, as the model reads them. Raises KeyError or TypeError if they are malformed."""
    # a server's words must not end the turn that shows them
    listed = json.loads(without_control_tokens(json.dumps(observation["tools"], ensure_ascii=False)))
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in listed
    ]


def _result_text(observation: Mapping[str, Any]) -> str:
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, dict):
        return str(error.get("message"))
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(parts, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "\n".join(part["text"] for part in parts)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
