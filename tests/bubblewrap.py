"""Whether programs can be run in bubblewrap's sandbox here."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest

from rlpost.sandbox import Sandbox


@cache
def reason_against() -> str | None:
    """Why not: it is not installed, or this machine forbids it the namespaces it is made of; None where they can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return None if tried.returncode == 0 else f"bubblewrap is forbidden here: {tried.stderr.strip()}"


needs_bubblewrap = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    """A sandbox of bubblewrap's; tests that ask for it are skipped where there can be none."""
    if reason := reason_against():
        pytest.skip(reason)
    return Sandbox()
