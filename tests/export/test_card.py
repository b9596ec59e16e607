"""The model card, and its upload to a stand-in of the hub."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlpost import __version__
from rlpost.export.card import Base, Made, base_of, write_card
from tests.command_line import CommandLine
from tests.export.checkpoints import figure, run_with_a_checkpoint
from tests.run_folders import make_run
from tests.says import Says

HOSTILE = "env.prompt_template=```\n# pwned | <script>\n---\nlicense: mit"


def card_of(run: Path, folder: Path, to: str = "hf", base: Base | None = None) -> tuple[dict[str, Any], str]:
    """The metadata and the text of the card of step 2."""
    folder.mkdir(exist_ok=True)
    made = Made(run, run / "checkpoints" / "step-000002", to, "float16", "close", 16, base or base_of(run), [])
    write_card(folder, made)
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_card_says_how_the_run_was_made_and_what_it_reached(tmp_path: Path, says: Says) -> None:
    rows = [
        {"step": 0, "eval/prompts": 50.0, **figure("accuracy_lenient", 0.1, 0.05, 0.2)},
        {"step": 2, "eval/prompts": 50.0, **figure("accuracy_lenient", 0.5, 0.4, 0.6)},
        {"step": 4, "eval/prompts": 50.0, **figure("accuracy_lenient", 0.9, 0.8, 0.95)},  # after the checkpoint
    ]
    run = make_run(tmp_path / "my-run", rows, overrides=["env=gsm8k", "steps=4", "optim.lr=1e-05"])
    data, text = card_of(run, tmp_path / "out", base=Base("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", "apache-2.0", []))
    made = (data["base_model"], data["license"], data["library_name"])
    assert made == ("Qwen/Qwen2.5-0.5B", "apache-2.0", "transformers")
    assert "| accuracy | 10.0% [5.0%, 20.0%] of 50 prompts | 50.0% [40.0%, 60.0%] of 50 prompts |" in text
    assert "90.0%" not in text
    says("export", text.replace(__version__, "VERSION"))


def test_text_of_a_run_stays_in_its_code_block(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a|b`c", overrides=[HOSTILE])
    (run / "config.yaml").write_text("model:\n  path: 'x: {y'\nenv:\n  path: \"`|a\\n# b\"\n")
    (run / "overrides.txt").write_text(HOSTILE)
    data, text = card_of(run, tmp_path / "out", base=Base("x: {y", "x: {y", "mit\nevil: true", []))
    assert (data["base_model"], data["license"]) == ("x: {y", "mit\nevil: true")
    assert "evil" not in data
    outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", text)
    assert re.findall("(?m)^# .*", outside) == ["# `` a|b`c ``"]
    assert "pwned" not in outside
    assert "| data | `` unknown (`\\|a # b) `` |" in text


def test_base_is_followed_through_runs_to_its_card(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: gemma\n---\n# base\n")
    first, second = (make_run(tmp_path / name) for name in ("first", "second"))
    (first / "config.yaml").write_text(f"model:\n  path: {base}\n")
    (second / "config.yaml").write_text(f"model:\n  path: {first}\n")
    assert base_of(second) == Base(str(base), None, "gemma", ["first"])
    _, text = card_of(second, tmp_path / "out")
    assert " | `first` |" in text


def test_ids_at_which_an_adapter_stops_stand_in_the_commands(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path / "my-run"), tmp_path / "out"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Some/Base"}')
    write_card(
        folder, Made(run, run / "checkpoints" / "step-000002", "adapter", None, "close", 16, base_of(run), [7, 2])
    )
    text = (folder / "README.md").read_text()
    assert "max_new_tokens=64, eos_token_id=[7, 2])" in text
    assert """--override-generation-config '{"eos_token_id": [7, 2]}'""" in text


class Hub(BaseHTTPRequestHandler):
    """Takes a commit of small files; remembers who asked for what."""

    asked: list[tuple[str, str | None, bytes]]
    refuses: bool

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.path, self.headers["Authorization"], body))
        address = f"http://{self.headers['Host']}/me/mine"
        answer: dict[str, Any] = {"url": address}
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        elif "/commit/" in self.path:
            answer = {"commitUrl": f"{address}/commit/1", "commitOid": "1", "success": True}
        self.reply(403 if self.refuses else 200, answer)

    def do_GET(self) -> None:
        self.reply(200, {"id": "me/mine", "sha": "0" * 40, "siblings": []})

    def reply(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub on this machine, with a token for it."""

    Hub.asked, Hub.refuses = [], False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    yield Hub
    server.shutdown()


def test_upload_makes_a_private_repository_of_all_files(hub: type[Hub], here: Path, rlpost: CommandLine) -> None:
    run_with_a_checkpoint(Path("runs/my-run"))
    told = rlpost.json("export my-run --hub me/mine")
    assert told["hub"].endswith("/me/mine")
    [(_, key, created)] = [asked for asked in hub.asked if asked[0] == "/api/repos/create"]
    assert (key, json.loads(created)["visibility"]) == ("Bearer secret", "private")
    [(_, _, commit)] = [asked for asked in hub.asked if "/commit/" in asked[0]]
    files = [line["value"] for line in map(json.loads, commit.splitlines()) if line["key"] == "file"]
    folder = Path("exports/my-run-hf-bfloat16")
    assert {file["path"]: base64.b64decode(file["content"]) for file in files} == {
        file.name: file.read_bytes() for file in folder.iterdir()
    }


def test_refused_upload_keeps_the_export_and_says_how_to_go_on(hub: type[Hub], here: Path, rlpost: CommandLine) -> None:
    run_with_a_checkpoint(Path("runs/my-run"))
    hub.refuses = True
    rlpost("export my-run --hub me/mine", 3)
    assert rlpost.err.split()[-4:] == ["hf", "upload", "me/mine", "exports/my-run-hf-bfloat16"]
    assert Path("exports/my-run-hf-bfloat16/model.safetensors").is_file()


def test_upload_without_a_token_is_refused_before_the_export(
    here: Path, monkeypatch: pytest.MonkeyPatch, rlpost: CommandLine, says: Says
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(here / "none"))
    run_with_a_checkpoint(Path("runs/my-run"))
    says("export", rlpost.refusals("export my-run --hub me/mine\nexport my-run --hub a/b/c"))
    assert not Path("exports").exists()
