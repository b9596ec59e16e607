"""The scripts run, parse and stop at the first failure."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*") if path.is_file() and not path.suffix)
SHELL = [*SCRIPTS, ROOT / ".ci" / "run"]
TARGETS = {
    "setup": "setup",
    "quickstart": "setup",
    **dict.fromkeys(("test", "test-all", "check"), "setup-dev"),
}  # and their set-up


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_a_script_for_each_target() -> None:
    assert {path.name for path in SCRIPTS} >= set(TARGETS)


@pytest.mark.parametrize("script", SHELL, ids=name)
def test_a_script_is_executable_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", SHELL, ids=name)
def test_a_script_stops_at_the_first_failure_and_runs_from_anywhere(script: Path) -> None:
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines
    root = "../.." if script.parent.name == "dev" else ".."
    assert f'cd "$(dirname "$0")/{root}"' in lines


def test_ci_runs_the_tests_through_make() -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands[-1] == "make test-all"


def recipe(target: str) -> tuple[list[str], list[str]]:
    """(what it depends on, its commands) of a target of the Makefile."""
    match = re.search(rf"^{target}:(.*)\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None, f"the Makefile has no target {target}"
    return match[1].split(), [line.strip() for line in match[2].splitlines()]


@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"setup"}))
def test_every_target_sets_up_first_and_calls_its_script(target: str) -> None:
    depends_on, commands = recipe(target)
    assert depends_on == [TARGETS[target]]
    assert [command.removeprefix("@") for command in commands] == [f"scripts/{target}"]


def test_a_run_is_set_up_without_the_development_tools() -> None:
    assert recipe("setup") == ([], ["@scripts/setup"])
    assert recipe("setup-dev") == ([], ["@scripts/setup dev"])
