from typing import Any

import pytest

from rlpost.data import ContentBase
from rlpost.errors import DataError


@pytest.mark.parametrize(
    ("part", "written"),
    [
        (ContentBase("text", text="What is this?"), {"type": "text", "text": "What is this?"}),
        (
            ContentBase("image", url="https://example.org/cat.png", name="cat", size=12),
            {"type": "image", "url": "https://example.org/cat.png", "name": "cat", "size": 12},
        ),
        (
            ContentBase("audio", data="UklGRg==", mime_type="audio/wav"),
            {"type": "audio", "base64": "UklGRg==", "mime_type": "audio/wav"},
        ),
        (
            ContentBase("function_call", function_name="add", function_args={"a": 1}),
            {"type": "function_call", "name": "add", "arguments": {"a": 1}},
        ),
        (ContentBase("function_call", function_name="now"), {"type": "function_call", "name": "now"}),
    ],
)
def test_a_part_goes_to_the_form_of_processors_and_back(part: ContentBase, written: dict[str, Any]) -> None:
    assert part.to_part() == written
    assert ContentBase.from_part(written) == part


def test_a_part_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(DataError, match="'thought'"):
        ContentBase.from_part({"type": "thought"})
