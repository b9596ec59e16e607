"""Parts of a message that is more than text: images, sound, video, files, calls of functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from rlpost.errors import DataError
from rlpost.nearest import did_you_mean, nearest

ContentType = Literal["text", "image", "audio", "video", "file", "function_call"]

# type -> the fields one of which it has to have, and those it may have besides
_MEDIA = (("url", "data"), ("mime_type", "name", "size"))
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "image": _MEDIA,
    "audio": _MEDIA,
    "video": _MEDIA,
    "file": _MEDIA,
    "function_call": (("function_name",), ("function_args",)),
}


@dataclass(frozen=True, slots=True)
class ContentBase:
    """One part of a message: `History(role="user", content=[ContentBase("text", text="What is this?"), ...])`.

    A `text` has its text; an `image`, `audio`, `video` or `file` either a `url` (or path) or `data`,
    its bytes in base64, and may have `mime_type` ("image/png"), `name` and `size` (bytes); a
    `function_call` has its `function_name` and `function_args`.

    A message carries its parts as they are. They are rendered by what takes them: text by any
    tokenizer, the rest by the processor of a model that reads it.

    Raises DataError for an unknown type, and for fields that are missing or another type's.
    """

    type: ContentType
    text: str | None = None
    url: str | None = None
    data: str | None = None
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None
    function_name: str | None = None
    function_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.type not in _FIELDS:
            suggestion = did_you_mean(nearest(str(self.type), _FIELDS), f"known are {', '.join(_FIELDS)}")
            raise DataError(f"no part of a message is of type {self.type!r}{suggestion}")
        needed, allowed = _FIELDS[self.type]
        given = [f.name for f in fields(self) if f.name != "type" and getattr(self, f.name) is not None]
        if sum(name in given for name in needed) != 1:
            raise DataError(
                f"a part of type {self.type} needs {' or '.join(needed)}: given are {', '.join(given) or 'none'}"
            )
        foreign = [name for name in given if name not in needed + allowed]
        if foreign:
            raise DataError(f"a part of type {self.type} has no {foreign[0]}: leave it out")

    # The dicts that chat templates and APIs know

    def to_part(self) -> dict[str, Any]:
        """The part as processors of transformers read it: `{"type": "image", "url": ...}`; nothing is lost."""
        if self.type == "function_call":
            arguments = {} if self.function_args is None else {"arguments": self.function_args}
            return {"type": "function_call", "name": self.function_name, **arguments}
        said = {"text": self.text, "url": self.url, "base64": self.data}
        said |= {"mime_type": self.mime_type, "name": self.name, "size": self.size}
        return {"type": self.type, **{key: value for key, value in said.items() if value is not None}}

    def to_openai(self) -> dict[str, Any]:
        """The part as OpenAI's chat API takes it.

        It knows no names and sizes but a file's name. Raises DataError for a type that it has no
        form for, such as video and sound by its address, and for data without `mime_type`.
        """
        if self.type == "text":
            return {"type": "text", "text": self.text}
        if self.type == "image":
            return {"type": "image_url", "image_url": {"url": self.url or self._data_url()}}
        if self.type == "audio" and self.data is not None:
            return {"type": "input_audio", "input_audio": {"data": self.data, "format": self._subtype()}}
        if self.type == "file" and self.data is not None:
            name = {} if self.name is None else {"filename": self.name}
            return {"type": "file", "file": {"file_data": self._data_url(), **name}}
        how = f" by its {'url' if self.url else 'function_name'}" if self.type != "video" else ""
        raise DataError(f"OpenAI's chat messages take no part of type {self.type}{how}: give its data, or leave it out")

    @classmethod
    def from_part(cls, part: Mapping[str, Any]) -> ContentBase:
        """The part that a dict of either form says. Raises DataError for one that cannot be read."""
        try:
            return cls._read(part)
        except KeyError as missing:
            raise DataError(f"a part of type {part.get('type')} has no {missing.args[0]}: give it") from missing

    @classmethod
    def _read(cls, part: Mapping[str, Any]) -> ContentBase:
        kind = part.get("type")
        match kind:
            case "image_url" | "audio_url" | "video_url":
                return cls._media(str(kind).removesuffix("_url"), part[kind]["url"], {})
            case "input_audio":
                sound = part["input_audio"]
                return cls("audio", data=sound["data"], mime_type=f"audio/{sound['format']}")
            case "file" if "file" in part:
                if "file_data" not in part["file"]:
                    raise DataError("a file that was uploaded cannot be read by its file_id: give its file_data")
                return cls._media("file", part["file"]["file_data"], {"name": part["file"].get("filename")})
            case "function_call":
                return cls("function_call", function_name=part["name"], function_args=part.get("arguments"))
            case "image" | "audio" | "video" | "file":
                return cls._from_processor_part(str(kind), part)
            case _:
                return cls(kind, text=part.get("text"))  # type: ignore[arg-type]  # refused there, if unknown

    @classmethod
    def _from_processor_part(cls, kind: str, part: Mapping[str, Any]) -> ContentBase:
        more = {name: part.get(name) for name in ("mime_type", "name", "size")}
        if "base64" in part:
            return cls(kind, data=part["base64"], **more)  # type: ignore[arg-type]
        source = next((part[name] for name in ("url", "path", kind) if name in part), None)
        if source is not None and not isinstance(source, str):
            raise DataError(
                f"a part of type {kind} holds a {type(source).__name__}: give its url, its path, or its bytes as base64"
            )
        return cls._media(kind, source, more) if kind in part else cls(kind, url=source, **more)  # type: ignore[arg-type]

    @classmethod
    def _media(cls, kind: str, source: str | None, more: dict[str, Any]) -> ContentBase:
        """A medium by its address; one of `data:` with its bytes."""
        if source is not None and source.startswith("data:") and ";base64," in source:
            mime_type, _, data = source.removeprefix("data:").partition(";base64,")
            return cls(kind, data=data, **{**more, "mime_type": mime_type or more.get("mime_type")})  # type: ignore[arg-type]
        return cls(kind, url=source, **more)  # type: ignore[arg-type]

    def _data_url(self) -> str:
        if self.mime_type is None:
            raise DataError(f"a part of type {self.type} has data without mime_type, which its address needs: set it")
        return f"data:{self.mime_type};base64,{self.data}"

    def _subtype(self) -> str:
        if self.mime_type is None or "/" not in self.mime_type:
            raise DataError(f"a part of type {self.type} has data whose format mime_type does not say: set it")
        return self.mime_type.partition("/")[2]
