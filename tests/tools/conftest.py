"""Fixtures of the tools and of their sandbox."""

from __future__ import annotations

import pytest

from rlpost.sandbox import Limits, Sandbox
from tests.bubblewrap import sandbox as sandbox
from tests.tools.sandbox.attacks import Attacked


@pytest.fixture
def attacked(monkeypatch: pytest.MonkeyPatch) -> Attacked:
    """A small sandbox to attack."""
    return Attacked(monkeypatch, Sandbox(limits=Limits(memory_mb=128)))
