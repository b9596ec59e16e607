"""The pages of docs/ do what they show: their files are written and their commands run, from top to bottom."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import read_table

from rlpost.cli.main import run
from rlpost.objectives.functional import VARIANTS
from rlpost.rewards.attacks import BREAKING, PAYING
from rlpost.rewards.functions import Finished, Rewards, load_reward
from tests.judge_server import reply_of, serving

pytestmark = pytest.mark.thorough

DOCS = Path(__file__).parents[1] / "docs"
ANY_BLOCK = re.compile(r"^```(\w*)[ ]?(\S*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w+)[ ]?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """(language, name of the file or nothing, text) of each code block."""
    return BLOCK.findall((DOCS / page).read_text())


def obey(command: str) -> None:
    """Run one command line of a page, rlpost's in this process; `# exits with 3` at its end says so."""
    program, *arguments = shlex.split(command, comments=True)
    if program == "rlpost":
        assert run(arguments) == int(command.partition("# exits with ")[2] or 0), command
    else:
        assert program == "python", command
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def follow(page: str) -> None:
    """Write the page's files into the current folder and obey its commands, from top to bottom."""
    for language, name, text in blocks(page):
        if name:
            Path(name).write_text(text)
        else:
            assert language == "sh"
            for line in text.splitlines():
                obey(line)


def test_own_data_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow("own-data.md")
    assert len(Path("shopping.jsonl").read_text().splitlines()) == 200
    assert len(list(Path("runs").glob("*/checkpoints/latest/model"))) == 4


def test_own_environment_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    follow("own-environment.md")
    assert len(list(Path("runs").glob("*/checkpoints/latest/model"))) == 3
    program = next(text for _, name, text in blocks("own-environment.md") if name == "capitals.py")
    assert len(program.splitlines()) <= 40  # with its settings, blank lines and docstrings


def test_rewards_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow("rewards.md")
    assert '"reward/failed": 2.0' in Path("runs/fragile/metrics.jsonl").read_text()
    log = Path("runs/fragile/log.txt").read_text()
    assert "./fragile.py:score" in log


def test_judges_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(lambda body: f"Score: {len(reply_of(body)) % 11}") as server:
        monkeypatch.setenv("JUDGE_URL", server.url)
        follow("judges.md")
        judged = {reply_of(asked) for asked in server.asked}
        assert len(judged) == len(server.asked) > 8  # of the 16 replies of two steps
        files = sorted(Path("runs/polite/rollouts").iterdir())
        rows = [row for file in files for row in read_table(file).to_pylist()]
        assert len(rows) == 16
        earned = [len(row["completion"]) % 11 / 10 for row in rows]
        assert [row["reward"] for row in rows] == pytest.approx(earned)
        again = Rewards([load_reward("./polite.py:polite")], [1.0])  # in a process that has judged nothing
        prompts = [re.findall("Write one line.*?[.]", row["prompt"])[0] for row in rows]
        played = [Finished(p, row["completion"], [], {}, []) for p, row in zip(prompts, rows, strict=True)]
        assert [score.reward for score in again.score(played)] == pytest.approx(earned)
        assert len(server.asked) == len(judged)  # nobody was asked again


def test_a_judge_in_this_process_gives_the_mean_of_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_MODEL", "builtin:tiny")
    [program] = [text for _, name, text in blocks("judges.md") if name == "local_judge.py"]
    made: dict[str, Any] = {"__name__": "local_judge"}
    exec(compile(program, "local_judge.py", "exec"), made)
    offered = {"prompts": ["Thank them."], "completions": ["Thanks!"], "answer": [None]}
    [score] = asyncio.run(made["polite"](**offered))
    assert asyncio.run(made["polite"](**offered)) == [score]  # from the cache
    messages = made["judge"].messages("Thank them.", "Thanks!")
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"
    ids = made["tokenizer"](f"{text}Score: ", return_tensors="pt")["input_ids"]
    chances = made["model"](ids).logits[0, -1].double().exp()[made["tokenizer"]("0123456789")["input_ids"]].tolist()
    expected = sum(n * chance for n, chance in enumerate(chances)) / sum(chances)
    assert score == pytest.approx(expected / 9, abs=1e-5)


def test_hand_on_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow("hand-on.md")
    assert "`small`" in Path("handed-on/README.md").read_text()
    assert Path("exports/small-hf-float32/model.safetensors").is_file()
    assert "`builtin:tiny`" in Path("runs/small/checkpoints/latest/model/README.md").read_text()


def test_every_attack_stands_on_its_page() -> None:
    page = (DOCS / "rewards.md").read_text()
    named = [name for row in re.findall(r"^\| ([a-z, ]+) \|", page, re.MULTILINE) for name in row.split(", ")]
    assert named[1:] == [*map(as_words, (*BREAKING, *PAYING))]


def as_words(attack: Callable[..., object]) -> str:
    """The name of a check as it is printed."""
    return attack.__name__.replace("_", " ")


def test_the_loss_done_with_a_pencil_comes_out() -> None:
    [program] = [text for language, _, text in blocks("losses.md") if language == "python"]
    exec(compile(program, "losses.md", "exec"), {})  # it asserts what it says


def test_every_loss_stands_on_its_page_with_its_defaults() -> None:
    page = (DOCS / "losses.md").read_text()
    for name, variant in VARIANTS.items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        for key in variant.coefficients:
            assert key in row


def test_shell_commands_of_the_pages_and_the_help_are_quoted_for_zsh() -> None:
    root = DOCS.parent
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
    texts = [
        text for page in pages for language, _, text in ANY_BLOCK.findall(page.read_text()) if language in ("", "sh")
    ]
    texts += [file.read_text() for file in (root / "rlpost" / "cli").glob("*.py")]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    commands = [line for line in lines if re.match(r"(rlpost|pip|uv|python|vllm|ray|make|source|git) \S", line)]
    assert len(commands) > 100
    outside_quotes = {line: re.sub(r"'[^']*'|\"[^\"]*\"|(^|\s)#.*", "", line) for line in commands}
    assert [line for line, bare in outside_quotes.items() if re.search(r"[\[\]*?]", bare)] == []


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in target or os.path.exists(page.parent / target), f"{page.name}: {target}"


TOUR = (DOCS / "tour.md").read_text()


@pytest.mark.parametrize("number", range(TOUR.count("```python")))
def test_the_tour_shows_the_lines_of_the_file_that_it_names_last(number: int) -> None:
    before, shown = TOUR.split("```python\n")[number : number + 2]
    file = re.findall(r"`(rlpost/[\w/]+\.py)`", before.rpartition("\n\n```\n")[2] or before)[-1]
    rest = iter((DOCS.parent / file).read_text().splitlines())
    for line in shown.partition("```")[0].splitlines():
        assert line.strip() == "..." or line in rest, f"{file} has no such line, or it is in another place: {line}"


def test_every_file_that_the_tour_names_is_there() -> None:
    named = {DOCS.parent / path for path in re.findall(r"`((?:rlpost|docs|conf)/[\w/.]+\.(?:py|md))`", TOUR)}
    assert len(named) > 20
    assert [path for path in named if not path.is_file()] == []
