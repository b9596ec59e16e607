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
    ("fields", "message"),
    [
        ({"type": "picture", "url": "x"}, "unknown type of a part, 'picture': it is one of text, image"),
    ],
)
def test_a_part_without_its_field_or_with_anothers_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        ContentBase(**fields)
    assert message in str(caught.value)


def test_a_dict_that_is_not_a_part_is_refused() -> None:
    with pytest.raises(DataError, match="unknown type of a part, 'thought'"):
        ContentBase.from_part({"type": "thought"})
