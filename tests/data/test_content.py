from typing import Any

import pytest

from rlpost.data import ContentBase
from rlpost.errors import DataError

TEXT = ContentBase("text", text="What is this?")
PICTURE = ContentBase("image", url="https://example.org/cat.png", name="cat", size=12)
SOUND = ContentBase("audio", data="UklGRg==", mime_type="audio/wav")
REPORT = ContentBase("file", data="JVBERg==", mime_type="application/pdf", name="report.pdf")
CALL = ContentBase("function_call", function_name="add", function_args={"a": 1})


@pytest.mark.parametrize(
    ("part", "written"),
    [
        (TEXT, {"type": "text", "text": "What is this?"}),
        (PICTURE, {"type": "image", "url": "https://example.org/cat.png", "name": "cat", "size": 12}),
        (SOUND, {"type": "audio", "base64": "UklGRg==", "mime_type": "audio/wav"}),
        (ContentBase("video", url="/films/cat.mp4"), {"type": "video", "url": "/films/cat.mp4"}),
        (
            REPORT,
            {"type": "file", "base64": "JVBERg==", "mime_type": "application/pdf", "name": "report.pdf"},
        ),
        (CALL, {"type": "function_call", "name": "add", "arguments": {"a": 1}}),
        (ContentBase("function_call", function_name="now"), {"type": "function_call", "name": "now"}),
        (
            ContentBase("image", url="data:image/png;base64,AA=="),
            {"type": "image", "url": "data:image/png;base64,AA=="},
        ),
    ],
)
def test_a_part_goes_to_the_form_of_processors_and_back(part: ContentBase, written: dict[str, Any]) -> None:
    assert part.to_part() == written
    assert ContentBase.from_part(written) == part


@pytest.mark.parametrize(
    ("part", "written"),
    [
        (TEXT, {"type": "text", "text": "What is this?"}),
        (ContentBase("image", url="cat.png"), {"type": "image_url", "image_url": {"url": "cat.png"}}),
        (
            ContentBase("image", data="AA==", mime_type="image/png"),
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        ),
        (SOUND, {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),
        (
            REPORT,
            {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERg==", "filename": "report.pdf"}},
        ),
    ],
)
def test_a_part_goes_to_the_form_of_openai_and_back(part: ContentBase, written: dict[str, Any]) -> None:
    assert part.to_openai() == written
    assert ContentBase.from_part(written) == part


@pytest.mark.parametrize(
    ("written", "part"),
    [
        ({"type": "image", "image": "cat.png"}, ContentBase("image", url="cat.png")),
        ({"type": "image", "path": "/cat.png"}, ContentBase("image", url="/cat.png")),
        (
            {"type": "image", "image": "data:image/png;base64,AA=="},
            ContentBase("image", data="AA==", mime_type="image/png"),
        ),
        ({"type": "video_url", "video_url": {"url": "cat.mp4"}}, ContentBase("video", url="cat.mp4")),
    ],
)
def test_other_forms_that_are_in_use_are_read(written: dict[str, Any], part: ContentBase) -> None:
    assert ContentBase.from_part(written) == part


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "picture", "url": "x"}, "unknown type of a part, 'picture': it is one of text, image"),
    ],
)
def test_a_part_without_its_field_or_with_anothers_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        ContentBase(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (ContentBase("video", url="x"), "no part of type video"),
        (ContentBase("audio", url="x"), "no part of type audio by its url"),
        (CALL, "no part of type function_call"),
    ],
)
def test_what_openai_has_no_form_for_is_refused(part: ContentBase, message: str) -> None:
    with pytest.raises(DataError, match=message):
        part.to_openai()


def test_a_dict_that_is_not_a_part_is_refused() -> None:
    with pytest.raises(DataError, match="unknown type of a part, 'thought'"):
        ContentBase.from_part({"type": "thought"})
