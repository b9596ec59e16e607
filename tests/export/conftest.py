"""Short replies, and one thread: the models are tiny, and threads would only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def short_replies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare on replies of 6 tokens."""
    monkeypatch.setattr("rlpost.export.export.REPLY", 6)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
