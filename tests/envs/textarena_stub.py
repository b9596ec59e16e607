"""The packages that stand in for TextArena and NLTK."""

from __future__ import annotations

from pathlib import Path

STUBS = Path(__file__).with_name("stubs")
TEXTARENA = (STUBS / "textarena.py").read_text()
