"""Typical mistakes: each is answered with one line that says what, where and what to do, and its exit code."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.command_line import CommandLine
from tests.says import Says

pytestmark = pytest.mark.thorough

VERBS = {"train", "eval", "chat", "doctor", "runs", "rollouts", "config", "env", "reward"}
QUICK = "train grpo model=tiny policy=scripted steps=1 eval.enabled=false prompts_per_step=1 group_size=2"
OWN = f"{QUICK} env=dataset"

# command lines by their exit code; nothing heavy may be imported for these
VISIBLE = {
    2: """
        train grpo stesp=3
        train grpo modle=tiny
        train grpo model=tinny
        train grpo recipe=arithmetic-smolm2-cpu
        train grpo --resum auto
        train grpo --bananas
        train grpo --config x.yaml
        train grpo --seed 7
        train grpo seed=-1
        train grpo --resume
        train grpo --beta null
        train grpo --packing true
        train grpo steps=three
        train grpo steps = 3
        train grpo ~env
        train grpo optim.lr=[1e-5]
        train grpo -m optim.lr=1e-5, 3e-5
        train grpo env.operations=[add, subtract]
        train grpo group_size=1
        train grpo minibatch_size=7
        train grpo optim.lr=-1
        train grpo steps=0
        train grpo model.device=gpu
        train grpo path=rows.jsonl
        train grpo data=rows.jsonl
        train grpo rows.jsonl
        train grpo env=rows.jsonl
        train grpo env=./fine.py
        train grpo my.yaml
        train grpo recipe=my
        train grpo plugin=./nope.py
        train grpo model.path=./pickled
        train grpo --resume folder
        train grpo --name taken
        train grpo --name -x
        train grpo --name lrs
        train grpo --name x --out y
        train grpo --resume lastest
        train grpo --resume taken
        train grpo env=dataset env.path=rows.jsonl
        train grpo env=dataset env.path=rows.jsonl env.reward=./nope.py:score
        train grpo env=dataset env.path=rows.jsonl env.reward=./broken.py:score
        train grpo env=dataset env.path=rows.jsonl env.reward=./raises.py:score
        train grpo env=dataset env.path=rows.jsonl env.reward=./fine.py:scoer
        train grpo env=dataset env.path=rows.jsonl env.reward=numbr
        train grpo env=dataset env.path=rows.jsonl env.reward=fine:score
        train grpo env=dataset env.path=rows.jsonl env.reward=./fine.py::score
        train grpo env=dataset env.path=rows.jsonl env.reward=./raises.py:score --dry-run
        eval env=dataset env.path=rows.jsonl env.reward=./raises.py:score
        env test dataset env.path=rows.jsonl env.reward=./raises.py:score
        config show train sft --epochs 2
        doctor dpo --max-length 3
        eval grpo
        eval runs/taken
        eval model.path=taken
        eval model=runs/lrs
        eval model.path=./folder
        eval optim.lr=1
        chat
        chat smollm2 --learning-rate 1
        chat x --temperature -1
        runs rollouts x --limit 0
        runs rollouts x --sort rewrd
        runs ls
        runs show lrs -f
        runs show x -n -1
        config explain recipe
        config list modle
        config show evl
        env tst x
        env test gsm8k steps=3
        reward new mine.py
        doctor --machine please
        help
        -V
        trian grpo
        grpo
        bananas
        train steps=3
    """,
    3: """
        train grpo env=dataset env.reward=number env.path=zzzz.jsonl
        train grpo env=dataset env.reward=number env.path=empty.jsonl
        train grpo env=dataset env.reward=number env.path=no-answer.jsonl
        train grpo env=dataset env.reward=number env.path=line7.jsonl
        train grpo env=dataset env.reward=number env.path=folder
        train grpo env=dataset env.reward=number env.path=latin1.csv
        train grpo env=dataset env.reward=number env.path=rows.jsonl env.prompt_column=promt
        train grpo env=dataset env.reward=number env.path=rows.jsonl env.prompt_template={pormpt}
        train grpo env=dataset env.reward=number env.path=rows.jsonl env.test_path=nope.csv
        train grpo env=dataset env.reward=./level.py:score env.path=rows.jsonl
        train sft env=dataset env.path=labels.jsonl
        train grpo env=gsm8k env.path=utf16.jsonl
        train sft env=gsm8k env.path=plain16.jsonl
        train grpo env=gsm8k env.path=pickled
        train sft env=gsm8k env.path=runs/taken
        train grpo env=gsm8k env.path=rows.xlsx
        train grpo env=gsm8k env.path=nope.xlsx
        train grpo env=gsm8k env.path=two
        train grpo env=gsm8k env.path=rows.jsonl
        train grpo env=gsm8k env.path=rows.jsonl --dry-run
        eval model=tiny env=gsm8k env.path=rows.jsonl
        train grpo env=math env.path=rows.parquet
        train grpo env=gsm8k env.path=unmarked.jsonl
        train grpo env=ifeval env.path=rows.jsonl
    """,
}

# these need the environment, the tokenizer or the disk: the mistake -> (command line, exit code, part of the answer)
FOUND_LATER: dict[str, tuple[str, int, str]] = {
    "a GPU that is not there": (f"{QUICK} policy=transformers model.device=cuda:7", 2, "model.device=cuda:7 cannot be"),
    "prompt longer than asked": (f"{QUICK} env.max_prompt_tokens=4", 3, "45 tokens, more than env.max_prompt_tokens=4"),
    "prompt longer than the context": (
        f"{QUICK} policy=transformers env.max_completion_tokens=100000",
        3,
        "than the model's context of 2048 tokens; type env.max_completion_tokens=2003 or less",
    ),
    "too few values": (f"{OWN} env.path=rows.jsonl env.reward=./few.py:score", 3, "few.py:score"),
    "a reward that always raises": (f"{OWN} env.path=rows.jsonl env.reward=./fails.py:score", 3, "fails.py, line 2"),
    "unreachable hub": ("train grpo model.path=nobody/nothing", 3, "nobody/nothing is neither a local folder nor"),
    "unwritable output": (f"{QUICK} --out /proc/rlpost", 3, "cannot write to /proc/rlpost"),
    "output that is a file": (f"{QUICK} --out rows.jsonl", 2, "rows.jsonl is a file: a run needs a folder"),
}


@pytest.fixture(autouse=True)
def placed(here: Path) -> None:
    """What the mistakes above point at."""
    (here / "folder").mkdir()
    (here / "runs" / "taken" / "checkpoints").mkdir(parents=True)
    for job in ("a", "b"):
        (here / "runs" / "lrs" / job / "checkpoints").mkdir(parents=True)
    (here / "runs" / "lrs" / "sweep.json").write_text('{"jobs": [{"name": "a"}, {"name": "b"}]}')
    (here / "my.yaml").write_text("command: train grpo\nsteps: 3\n")
    (here / "pickled").mkdir()
    (here / "pickled" / "config.json").write_text("{}")
    (here / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    rows = [json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(20)]
    (here / "rows.jsonl").write_text("\n".join(rows))
    (here / "labels.jsonl").write_text('{"prompt": "What is 1 + 1?", "label": "sum"}\n')
    (here / "empty.jsonl").write_text("")
    (here / "line7.jsonl").write_text("\n".join([*rows[:6], '{"prompt": "What', *rows[7:]]))
    (here / "no-answer.jsonl").write_text("\n".join([rows[0], '{"prompt": "What is 2 + 1?"}', *rows[2:]]))
    (here / "utf16.jsonl").write_text("\n".join(rows), encoding="utf-16")
    (here / "plain16.jsonl").write_text("\n".join(rows), encoding="utf-16-le")
    (here / "latin1.csv").write_text("prompt,answer\n1 + 1?,2\nCaf\xe9 1?,2\n", encoding="latin-1")
    (here / "unmarked.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2"}\n')
    (here / "rows.xlsx").write_bytes(b"\x80\x04N.")
    (here / "two").mkdir()
    for name in ("train.jsonl", "train.csv"):
        (here / "two" / name).write_text("")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1 + 1?"], "answer": ["2"]}), here / "rows.parquet")
    (here / "level.py").write_text("def score(completions, level):\n    return [1.0 for _ in completions]\n")
    (here / "fine.py").write_text("def score(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    (here / "few.py").write_text("def score(completions, **kwargs):\n    return []\n")
    (here / "fails.py").write_text("def score(completions, **kwargs):\n    return [c.nope for c in completions]\n")
    (here / "broken.py").write_text("def score(completions, **kwargs):\n    return [1.0\n")
    (here / "raises.py").write_text("import no_such_package\n\ndef score(completions, **kwargs):\n    return []\n")


RUN_ALL = """
import contextlib, io, json, sys
from rlpost.cli.main import run
seen = []
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(line.split())
    heavy = sorted({"torch", "transformers", "tensordict", "datasets", "vllm"} & set(sys.modules))
    seen.append([code, out.getvalue(), err.getvalue(), heavy])
print(json.dumps(seen))
"""


def one_line(err: str) -> str:
    """The message, which has to be the last thing said and on a line of its own."""
    assert "Traceback" not in err
    *before, message = err.splitlines()
    assert message.startswith("error: ")
    assert not any(line.startswith("error: ") for line in before)
    return message


def test_what_the_command_shows_is_said_before_anything_heavy(says: Says) -> None:
    lines = [(line.strip(), code) for code, text in VISIBLE.items() for line in text.strip().splitlines()]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps([line for line, _ in lines]),
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, list[str]] = {}  # by the verb
    for (line, wanted), (code, out, err, heavy) in zip(lines, json.loads(done.stdout), strict=True):
        assert (code, out, err.count("\n"), heavy) == (wanted, "", 1, []), line
        verb = line.split()[0]
        answers.setdefault(verb if verb in VERBS else "info", []).append(f"$ rlpost {line}\n{one_line(err)}\n")
    for verb, texts in answers.items():
        says(verb, "".join(texts))


@pytest.mark.parametrize("mistake", FOUND_LATER)
def test_what_data_and_machine_show_is_one_line_too(mistake: str, rlpost: CommandLine) -> None:
    line, code, message = FOUND_LATER[mistake]
    rlpost(line, code)
    assert message in one_line(rlpost.err)


def test_a_second_process_on_a_run_folder_is_refused(here: Path, rlpost: CommandLine) -> None:
    folder = here / "runs" / "busy"
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rlpost(f"{QUICK} --name busy", 2)
    assert "runs/busy" in one_line(rlpost.err)


def test_vllm_asked_for_but_absent_names_the_extra(rlpost: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: False)
    rlpost("train grpo model=tiny policy=vllm", 3)
    assert "'rlpost[vllm" in one_line(rlpost.err)


def test_no_home_folder_names_what_to_set(rlpost: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    rlpost(QUICK, 3)
    assert "set HOME" in one_line(rlpost.err)


@pytest.fixture
def small_disk(here: Path, request: pytest.FixtureRequest) -> list[str]:
    """The beginning of a command whose `small/` is a disk of the size that the test says."""
    (here / "small").mkdir()
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f'mount -t tmpfs -o {request.param} tmpfs {here}/small && exec "$@"'
    begin = [*prefix, mount, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*begin, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    return begin


@pytest.mark.parametrize(
    ("small_disk", "reason"),
    [
        ("size=120k", "1.09 MB"),  # what a checkpoint takes, told before anything is loaded
        ("nr_inodes=14", os.strerror(errno.ENOSPC)),  # room for the bytes of a checkpoint, not for its number of files
    ],
    indirect=["small_disk"],
)
def test_a_full_disk_is_named(small_disk: list[str], here: Path, reason: str) -> None:
    line = [sys.executable, "-m", "rlpost", *QUICK.split(), "--out", str(here / "small" / "r")]
    done = subprocess.run([*small_disk, *line], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert reason in one_line(done.stderr)
    assert "free" in one_line(done.stderr)


def test_a_hub_that_does_not_answer_is_given_up_within_seconds(
    rlpost: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    started = time.monotonic()
    rlpost("train grpo env=gsm8k model=tiny policy=scripted", 3)
    assert "env.path=openai/gsm8k (train)" in one_line(rlpost.err)
    assert time.monotonic() - started < 60
