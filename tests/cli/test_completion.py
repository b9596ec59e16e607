"""Completion as the shells ask for it: what bash took apart is put together, and nothing else is printed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import typer

from rlpost.cli import completion
from rlpost.cli.main import app

Ask = Callable[..., tuple[int | str | None, str]]


@pytest.mark.parametrize(
    ("words", "joined", "before"),
    [
        (["rlpost", "tra"], ["rlpost", "tra"], ""),
        (["rlpost", "train", "grpo", ""], ["rlpost", "train", "grpo", ""], ""),
        (["rlpost", "eval", "env", "=", "gs"], ["rlpost", "eval", "gs"], "env="),
        (["rlpost", "eval", "env", "="], ["rlpost", "eval", ""], "env="),
        (["rlpost", "eval", "env", "=", "gsm8k", "mo"], ["rlpost", "eval", "env=gsm8k", "mo"], ""),
        (["rlpost", "eval", "env", "=", "gsm8k", "seed", "="], ["rlpost", "eval", "env=gsm8k", ""], "seed="),
        (["rlpost", "eval", "env=gs"], ["rlpost", "eval", "env=gs"], ""),  # = is not a word break here
    ],
)
def test_words_that_bash_took_apart_are_joined(words: list[str], joined: list[str], before: str) -> None:
    environ = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    assert completion.join_broken_words(environ) == before
    assert environ["COMP_WORDS"].split("\n") == joined
    assert environ["COMP_CWORD"] == str(len(joined) - 1)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Asks as a shell does: the exit code, and what is printed."""

    def offered(line: str, shell: str = "fish") -> tuple[int | str | None, str]:
        monkeypatch.setenv("_RLPOST_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        with pytest.raises(SystemExit) as ended:
            completion.answer(typer.main.get_command(app))
        out, err = capsys.readouterr()
        assert err == ""
        return ended.value.code, out

    return offered


def test_zsh_and_fish_get_whole_words_and_descriptions(ask: Ask) -> None:
    code, out = ask("rlpost train grpo loss.kl_c")
    assert code == 0
    described, value = out.splitlines()
    assert re.match("loss.kl_coef=\t\\w+ of ", described)
    assert value.startswith("loss.kl_coef=0.0\t")
    code, out = ask("rlpost train grpo env=gs", "zsh")
    assert code == 0
    assert out.startswith('_arguments \'*: :(("env=gsm8k":"Grade')


def test_square_brackets_in_a_description_are_no_markup(ask: Ask) -> None:
    _, out = ask("rlpost train grpo env=dataset env.rew")
    assert "[a.py:f,exact]" in out


def test_an_error_in_an_unfinished_line_is_silent(ask: Ask) -> None:
    code, out = ask("rlpost trian gr")
    assert (code, out) == (completion.NOTHING_TO_OFFER, "")


def test_a_verb_before_its_settings_is_offered_word_by_word(ask: Ask) -> None:
    _, out = ask("rlpost config show train ")
    assert [line.split()[0] for line in out.splitlines()] == ["grpo", "sft", "dpo", "expert-iteration", "distill"]
    for line, offered in {
        "rlpost config explain optim.lr eval model.dev": "model.device=\t",
    }.items():
        assert ask(line)[1].startswith(offered)
