"""`rlpost chat`: which model is meant, pipes, and the conversation on a terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpost.chat import Chat, load_policy
from rlpost.cli import chat
from rlpost.cli.chat import model_settings, piped_messages, what_is_loaded
from rlpost.cli.main import run as rlpost
from rlpost.errors import ConfigError, DataError
from rlpost.settings import ModelSettings, SamplingSettings
from tests.model_folders import write_model


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder with one finished run and a Hugging Face folder."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/sums/checkpoints/step-000002/model", "models/mine"):
        write_model(Path(folder))
    (Path("runs/sums/checkpoints") / "latest").symlink_to("step-000002")


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Makes bytes what comes through stdin."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("asked", "path", "loaded"),
    [
        ("smollm2", "packaged:smollm2", "smollm2 (packaged:smollm2)"),
        ("builtin:tiny", "builtin:tiny", "builtin:tiny"),
        ("sums", "runs/sums/checkpoints/latest/model", "sums (step-000002)"),
        ("runs/sums", "runs/sums/checkpoints/latest/model", "runs/sums (step-000002)"),
        (
            "runs/sums/checkpoints/step-000002",
            "runs/sums/checkpoints/step-000002/model",
            "runs/sums/checkpoints/step-000002 (step-000002)",
        ),
        ("models/mine", "models/mine", "models/mine"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B, from the hub unless it is cached"),
        ("qwen", "Qwen/Qwen2.5-0.5B-Instruct", "qwen (Qwen/Qwen2.5-0.5B-Instruct), from the hub unless it is cached"),
    ],
)
def test_an_option_a_run_a_folder_or_a_hub_id_is_a_model(asked: str, path: str, loaded: str) -> None:
    settings = model_settings(asked)
    assert settings.path == path
    assert what_is_loaded(asked, settings) == loaded


def test_settings_of_the_model_stand_behind_it() -> None:
    words = ["model.chat_template_kwargs={enable_thinking:false}", "model.chat_template=plain"]
    for asked in ("tiny", "sums", "models/mine"):
        settings = model_settings(asked, words)
        assert settings.chat_template_kwargs == "{enable_thinking:false}"
        assert settings.chat_template == "plain"
        assert settings.path == model_settings(asked).path
    with pytest.raises(ConfigError, match=r"did you mean model\.chat_template"):
        model_settings("tiny", ["model.chat_templat=plain"])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("smolm2", "smolm2 is not a model, run or folder; did you mean smollm2?"),
        ("smus", "smus is not a model, run or folder; did you mean sums?"),
        ("bananas", "bananas is not a model, run or folder; a hub id has the form OWNER/NAME"),
        ("runs/smus", "runs/smus does not exist; did you mean runs/sums?"),
        ("builtin:tiy", "builtin:tiy is unknown"),
        ("models", "models holds no model"),
    ],
)
def test_a_wrong_path_is_one_line_before_anything_is_loaded(
    asked: str, message: str, pipe: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(b"hello")
    assert rlpost(["chat", asked]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_a_pipe_is_one_message_or_one_a_line(pipe: Callable[[bytes], None]) -> None:
    pipe("first é\n\nsecond\n".encode())
    assert piped_messages(lines=False) == ["first é\n\nsecond"]
    pipe(b"first\n\nsecond\n")
    assert piped_messages(lines=True) == ["first", "second"]
    for nothing in (b"", b" \n"):
        pipe(nothing)
        with pytest.raises(DataError, match="stdin is empty"):
            piped_messages(lines=False)
    pipe(b"a\xff")
    with pytest.raises(DataError, match="byte 1 is not UTF-8"):
        piped_messages(lines=False)


def test_only_the_reply_goes_to_stdout(pipe: Callable[[bytes], None], capfd: pytest.CaptureFixture[str]) -> None:
    pipe(b"hello\n")
    assert rlpost(["chat", "tiny", "--max-tokens", "9"]) == 0
    captured = capfd.readouterr()
    assert captured.out.endswith("\n")
    assert all(c.isprintable() or c in "\n\t" for c in captured.out)
    loading, numbers, loaded, _ = captured.err.splitlines()
    assert loading == "loading tiny (builtin:tiny) ..."
    assert re.fullmatch(r"precision (bfloat16|float32) sampling \(.+\)", numbers)
    assert loaded.startswith("LlamaForCausalLM, ")
    assert "9 tokens, " in captured.err
    assert captured.err.endswith("cut at --max-tokens 9\n")


def test_json_is_one_object_a_reply(pipe: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]) -> None:
    pipe(b"one\ntwo\n")
    assert rlpost(["chat", "tiny", "--json", "--lines", "--max-tokens", "4"]) == 0
    replies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [reply["prompt"] for reply in replies] == ["one", "two"]
    assert set(replies[0]) == {"prompt", "reply", "tokens", "seconds", "finish_reason"}
    assert (replies[0]["tokens"], replies[0]["finish_reason"]) == (4, "length")


@pytest.fixture(scope="module")
def session(tiny_folder: Path) -> Chat:
    policy, _ = load_policy(ModelSettings(path=str(tiny_folder)))
    return Chat(policy, sampling=SamplingSettings(), max_tokens=6)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, session: Chat) -> Callable[[list[str]], None]:
    """Types these lines at the prompt, then Ctrl-D."""

    def hold(lines: list[str]) -> None:
        session.system = None
        session.reset()
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat.talk(session)

    return hold


def test_each_reply_ends_with_its_tokens_and_why(
    typed: Callable[[list[str]], None], session: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(["hello", "", "more"])
    out = capsys.readouterr().out
    assert len(session.messages) == 4
    assert out.count(" tokens/s, ") == 2
    assert all(c.isprintable() or c == "\n" for c in out)


def test_commands_change_the_conversation_and_never_reach_the_model(
    typed: Callable[[list[str]], None], session: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(["hello", "/system Be \x1bbrief.", "/help", "/rest", "/quit", "never read"])
    out = capsys.readouterr().out
    assert (session.system, session.messages) == ("Be \x1bbrief.", [])
    assert "system prompt: Be \\x1bbrief." in out
    assert "there is no command /rest; did you mean /reset?" in out
    typed(["/system x", "/system", "hello", "/reset"])
    assert (session.system, session.messages) == (None, [])


def test_a_full_context_is_said_and_the_conversation_goes_on(
    typed: Callable[[list[str]], None], session: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(["x" * 3000, "hello"])
    captured = capsys.readouterr()
    assert "error: the message has " in captured.err
    assert len(session.messages) == 2


def test_ctrl_c_at_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch, session: Chat) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", SimpleNamespace(readline=interrupted))
    with pytest.raises(KeyboardInterrupt):
        chat.talk(session)


def test_help_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert rlpost(["chat", "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 40
