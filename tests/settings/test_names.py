"""The names of rlpost.settings."""

from __future__ import annotations

import ast
from pathlib import Path

from rlpost import settings


def test_every_class_of_a_module_is_a_name_of_the_package() -> None:
    for file in Path(settings.__file__).parent.glob("[a-z]*.py"):
        classes = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
        assert {getattr(settings, name).__module__ for name in classes} <= {f"rlpost.settings.{file.stem}"}


def test_another_name_is_none_of_the_package() -> None:
    assert not hasattr(settings, "Bananas")
