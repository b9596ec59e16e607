"""Where the files of IFEval, IFBench and NLTK are, for the tests that need them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlpost.rewards.ifeval import packaged_nltk_data

DATA = Path(os.environ.get("RLPOST_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
NLTK_DATA = packaged_nltk_data() or DATA / "nltk_data"
IFEVAL_ROWS = DATA / "ifeval" / "input_data.jsonl"
IFEVAL_REPLIES = DATA / "ifeval" / "input_response_data_gpt4_20231107_145030.jsonl"
IFEVAL_VERDICTS = DATA / "ifeval" / "verdicts_gpt4_20231107.jsonl"
IFBENCH_ROWS = DATA / "ifbench" / "IFBench_test.jsonl"

needs_ifeval = pytest.mark.skipif(
    not (IFEVAL_ROWS.is_file() and NLTK_DATA.is_dir()), reason="the IFEval and NLTK files are not on this machine"
)
needs_ifbench = pytest.mark.skipif(
    not (IFBENCH_ROWS.is_file() and NLTK_DATA.is_dir()), reason="the IFBench and NLTK files are not on this machine"
)
needs_nltk_data = pytest.mark.skipif(not NLTK_DATA.is_dir(), reason="NLTK's files are not on this machine")


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def find_nltk_data_in(folders: list[str], patch: pytest.MonkeyPatch) -> None:
    """Meanwhile NLTK looks in `folders` alone, whatever was found before and whatever is packaged."""
    import nltk

    from rlpost.rewards import ifeval

    ifeval.require_nltk_data.cache_clear()
    patch.setattr(ifeval, "packaged_nltk_data", lambda: None)
    patch.setattr(nltk.data, "path", folders)
