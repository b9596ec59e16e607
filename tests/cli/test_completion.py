"""Completion as the shells ask for it: what bash took apart is put together, and nothing else is printed."""

from __future__ import annotations

import pytest
import typer

from rlpost.cli import completion
from rlpost.cli.main import app


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


def ask(shell: str, line: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setenv("_RLPOST_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    with pytest.raises(SystemExit) as ended:
        completion.answer(typer.main.get_command(app))
    return ended.value.code


def test_zsh_and_fish_get_whole_words_and_descriptions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("fish", "rlpost train grpo loss.kl_c", monkeypatch) == 0
    assert capsys.readouterr().out.splitlines() == [
        "loss.kl_coef=\tweight of the KL penalty (beta); 0 loads no reference model",
        "loss.kl_coef=0.0\tas it is",
    ]
    assert ask("zsh", "rlpost train grpo env=gs", monkeypatch) == 0
    assert capsys.readouterr().out.startswith('_arguments \'*: :(("env=gsm8k":"Grade-school word problems')


def test_square_brackets_in_a_description_are_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask("fish", "rlpost train grpo env=dataset env.rew", monkeypatch)
    assert "several: [a.py:f,exact]" in capsys.readouterr().out


def test_an_error_in_an_unfinished_line_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("fish", "rlpost trian gr", monkeypatch) == completion.NOTHING_TO_OFFER
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_verb_before_its_settings_is_offered_word_by_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask("fish", "rlpost config show train ", monkeypatch)
    verbs = ("grpo", "sft", "dpo", "expert-iteration", "distill")
    assert capsys.readouterr().out.splitlines() == [f"{name}\ta verb" for name in verbs]
    ask("fish", "rlpost config explain optim.lr eval model.dev", monkeypatch)
    assert capsys.readouterr().out.startswith("model.device=\t")
    ask("fish", "rlpost config diff gsm8k-q", monkeypatch)
    assert capsys.readouterr().out.startswith("gsm8k-qwen0.5b-gpu\t")
