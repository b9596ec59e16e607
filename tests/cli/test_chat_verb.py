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
from rlpost.cli.chat import chat_settings, piped_messages
from rlpost.errors import ConfigError, DataError
from rlpost.settings import ModelSettings, SamplingSettings
from tests.command_line import CommandLine
from tests.model_folders import write_model
from tests.says import Says


@pytest.fixture(autouse=True)
def models(here: Path) -> None:
    """A finished run and a Hugging Face folder."""
    for folder in ("runs/sums/checkpoints/step-000002/model", "models/mine"):
        write_model(Path(folder))
    Path("runs/sums/checkpoints/latest").symlink_to("step-000002")


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Makes bytes what comes through stdin."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ("smollm2", "packaged:smollm2"),
        ("builtin:tiny", "builtin:tiny"),
        ("sums", "runs/sums/checkpoints/latest/model"),
        ("runs/sums", "runs/sums/checkpoints/latest/model"),
        ("runs/sums/checkpoints/step-000002", "runs/sums/checkpoints/step-000002/model"),
        ("models/mine", "models/mine"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("qwen", "Qwen/Qwen2.5-0.5B-Instruct"),
    ],
)
def test_an_option_a_run_a_folder_or_a_hub_id_is_a_model(asked: str, path: str) -> None:
    assert chat_settings(asked)[0].path == path


def test_settings_of_the_model_and_of_sampling_stand_behind_it() -> None:
    words = ["model.chat_template_kwargs={enable_thinking:false}", "model.chat_template=plain", "sampling.top_k=7"]
    for asked in ("tiny", "sums", "models/mine"):
        settings, sampling = chat_settings(asked, words)
        assert (sampling.top_p, sampling.top_k) == (0.9, 7)
        assert settings.chat_template_kwargs == "{enable_thinking:false}"
        assert settings.chat_template == "plain"
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        chat_settings("tiny", ["model.chat_templat=plain"])


WRONG = """
    chat smolm2
    chat smus
    chat bananas
    chat runs/smus
    chat builtin:tiy
    chat models
"""


def test_a_wrong_path_is_one_line_before_anything_is_loaded(
    pipe: Callable[[bytes], None], rlpost: CommandLine, says: Says
) -> None:
    pipe(b"hello")
    says("chat", rlpost.refusals(WRONG))


def test_a_pipe_is_one_message_or_one_a_line(pipe: Callable[[bytes], None], says: Says) -> None:
    pipe("first é\n\nsecond\n".encode())
    assert piped_messages(lines=False) == ["first é\n\nsecond"]
    pipe(b"first\n\nsecond\n")
    assert piped_messages(lines=True) == ["first", "second"]
    for nothing in (b"", b" \n"):
        pipe(nothing)
        with says.refused("chat", DataError, "stdin"):
            piped_messages(lines=False)


def test_only_the_reply_goes_to_stdout(pipe: Callable[[bytes], None], capfd: pytest.CaptureFixture[str]) -> None:
    pipe(b"hello\n")
    rlpost = CommandLine(capfd)
    out = rlpost("chat tiny --max-tokens 9")
    assert out.endswith("\n")
    assert all(c.isprintable() or c in "\n\t" for c in out)
    loading, numbers, loaded, _ = rlpost.err.splitlines()
    assert "builtin:tiny" in loading
    assert re.fullmatch(r"precision (bfloat16|float32) sampling \(.+\)", numbers)
    assert loaded.startswith("LlamaForCausalLM, ")
    assert "9 tokens, " in rlpost.err
    assert rlpost.err.endswith("--max-tokens 9\n")


def test_json_is_one_object_a_reply(pipe: Callable[[bytes], None], rlpost: CommandLine) -> None:
    pipe(b"one\ntwo\n")
    replies = [json.loads(line) for line in rlpost.lines("chat tiny --json --lines --max-tokens 4")]
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
    assert "Be \\x1bbrief." in out
    assert "/reset?" in out  # for /rest
    typed(["/system x", "/system", "hello", "/reset"])
    assert (session.system, session.messages) == (None, [])


def test_a_full_context_is_said_and_the_conversation_goes_on(
    typed: Callable[[list[str]], None], session: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(["x" * 3000, "hello"])
    assert "error: " in capsys.readouterr().err
    assert len(session.messages) == 2


def test_ctrl_c_at_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch, session: Chat) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", SimpleNamespace(readline=interrupted))
    with pytest.raises(KeyboardInterrupt):
        chat.talk(session)
