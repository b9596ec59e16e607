"""Typical mistakes: each is answered with one line that says what, where and what to do, and its exit code."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlpost.cli.main import run

QUICK = "train grpo model=tiny policy=scripted steps=1 eval.enabled=false prompts_per_step=1 group_size=2"
OWN = f"{QUICK} env=dataset"

# what is wrong -> (command line, exit code, what the message says); nothing heavy may be imported for these
VISIBLE: dict[str, tuple[str, int, str]] = {
    "misspelt key": ("train grpo stesp=3", 2, "stesp is not a setting of rlpost train grpo; did you mean steps?"),
    "misspelt group": ("train grpo modle=tiny", 2, "did you mean model?"),
    "misspelt option": ("train grpo model=tinny", 2, "model=tinny is unknown; did you mean tiny?"),
    "misspelt recipe": ("train grpo recipe=arithmetic-smolm2-cpu", 2, "did you mean arithmetic-smollm2-cpu?"),
    "misspelt verb": ("trian grpo", 2, "rlpost has no verb trian; did you mean rlpost train?"),
    "misspelt flag": ("train grpo --resum auto", 2, "has no option --resum; did you mean --resume?"),
    "text for a number": ("train grpo steps=three", 2, "steps=three is of the wrong type: it takes a whole number"),
    "spaces around =": ("train grpo steps = 3", 2, "key=value without spaces, as in steps=20"),
    "key with dashes": ("train grpo --steps=3", 2, "settings are written without dashes; write steps="),
    "list for a value": ("train grpo optim.lr=[1e-5]", 2, "optim.lr=[1e-5] is of the wrong type: it takes a number"),
    "several values": ("train grpo optim.lr=1e-5,2e-5", 2, "optim.lr=1e-5,2e-5 is several values"),
    "missing file": ("train grpo env=gsm8k env.path=nope.jsonl", 3, "env.path=nope.jsonl does not exist"),
    "group size 1": ("train grpo group_size=1", 2, "group_size=1 leaves nothing to compare"),
    "minibatch that does not divide": ("train grpo minibatch_size=7", 2, "minibatch_size=7 does not fit"),
    "negative learning rate": ("train grpo optim.lr=-1", 2, "optim.lr=-1.0 is out of range"),
    "zero steps": ("train grpo steps=0", 2, "steps=0 is out of range: it must be at least 1"),
    "a checkpoint folder that is none": ("train grpo --resume folder", 2, "--resume folder is neither a run folder"),
    "a model folder that is none": ("eval model.path=./folder", 2, "model.path=./folder holds no model"),
    "a pickle for weights": ("train grpo model.path=./pickled", 2, "weights as a pickle (pytorch_model.bin)"),
    "run name taken": ("train grpo --name taken", 2, "runs/taken already holds a run: add --resume auto"),
    "run name with a path": ("train grpo --name ../x", 2, "--name '../x' is not a name of a run"),
    "a run name like an option": ("train grpo --name -x", 2, "--name '-x' is not a name of a run"),
    "missing reward file": (f"{OWN} env.path=rows.jsonl env.reward=./nope.py:score", 2, "nope.py"),
    "reward file that is not a Python": (
        f"{OWN} env.path=rows.jsonl env.reward=./broken.py:score",
        2,
        "broken.py, line 2",
    ),
    "reward file that does not import": (f"{OWN} env.path=rows.jsonl env.reward=./raises.py:score", 2, "raises.py"),
    "no such function": (f"{OWN} env.path=rows.jsonl env.reward=./fine.py:scoer", 2, "did you mean score?"),
    "built-in reward misspelt": (f"{OWN} env.path=rows.jsonl env.reward=numbr", 2, "did you mean number?"),
    "no reward": (f"{OWN} env.path=rows.jsonl", 2, "env.reward"),
    "a device that is none": ("train grpo model.device=gpu", 2, "model.device=gpu is unknown: it is auto, cpu, cuda"),
    "space after a comma": ("train grpo -m optim.lr=1e-5, 3e-5", 2, "write 'optim.lr=1e-5, 3e-5'"),
    "space in a list": (
        "train grpo env.operations=[add, subtract]",
        2,
        "quote a value with spaces; write 'env.operations=[add, subtract]'",
    ),
    "a recipe without its key": ("train grpo my.yaml", 2, "did you mean recipe=my.yaml?"),
    "a recipe without its ending": ("train grpo recipe=my", 2, "recipe=my is unknown; did you mean recipe=my.yaml?"),
    "rows without their key": ("train grpo rows.jsonl", 2, "did you mean env=dataset env.path=rows.jsonl?"),
    "rows for an environment": ("train grpo env=rows.jsonl", 2, "write env=dataset env.path=rows.jsonl"),
    "a plugin for an environment": ("train grpo env=./fine.py", 2, "write plugin=./fine.py env=NAME"),
    "a run without its key": ("eval runs/taken", 2, "did you mean model=runs/taken?"),
    "a run's name for a path": ("eval model.path=taken", 2, "did you mean model=runs/taken?"),
    "a sweep for a model": ("eval model=runs/lrs", 2, "runs/lrs is a sweep of several runs: name one of a, b"),
    "a verb too many": ("eval grpo", 2, "grpo is not a setting: settings are written key=value"),
    "half a key": ("train grpo path=rows.jsonl", 2, "did you mean model.path or lora.path or env.path?"),
    "another tool's key": (
        "train grpo data=rows.jsonl",
        2,
        "data is not a setting of rlpost train grpo; did you mean env=dataset env.path=rows.jsonl?",
    ),
    "removing a setting": ("train grpo ~env", 2, "settings are written without -, + and ~"),
    "two seeds": ("train grpo --seed 1 seed=2", 2, "--seed and seed= both set the seed"),
    "explaining a recipe": ("config explain recipe", 2, "recipe is not a setting but a file of them: rlpost"),
    "nothing near": (f"{OWN} env.path=zzzz.jsonl env.reward=number", 3, "env.path=zzzz.jsonl does not exist\n"),
    "a module for a file": (f"{OWN} env.path=rows.jsonl env.reward=fine:score", 2, "did you mean fine.py?"),
    "two colons": (f"{OWN} env.path=rows.jsonl env.reward=./fine.py::score", 2, "did you mean ./fine.py?"),
    "a file for a name": ("reward new mine.py", 2, "write mine\n"),
    "a sweep for a run": ("runs tail lrs", 2, "lrs is a sweep: name one of runs/lrs/a, runs/lrs/b"),
    "plugin that is missing": ("train grpo plugin=./nope.py", 2, "nope.py"),
    "empty dataset": (f"{OWN} env.path=empty.jsonl env.reward=number", 3, "empty.jsonl holds no rows"),
    "a row without its answer": (f"{OWN} env.path=no-answer.jsonl env.reward=number", 3, "no-answer.jsonl, row 2"),
    "broken JSON in line 7": (f"{OWN} env.path=line7.jsonl env.reward=number", 3, "line7.jsonl, row 7 is not JSON"),
    "a directory for a file": (f"{OWN} env.path=folder env.reward=number", 3, "env.path=folder has no train.jsonl"),
    "wrong column": (f"{OWN} env.path=rows.jsonl env.reward=number env.prompt_column=promt", 3, "did you mean prompt?"),
    "rows in UTF-16": (
        "train grpo env=gsm8k env.path=utf16.jsonl",
        3,
        "utf16.jsonl, row 1 is not UTF-8 (byte 0, likely ",
    ),
    "rows in UTF-16 without its mark": ("train sft env=gsm8k env.path=plain16.jsonl", 3, "likely UTF-16): save the"),
    "rows in Latin-1": (
        f"{OWN} env.path=latin1.csv env.reward=number",
        3,
        "latin1.csv, row 3 is not UTF-8 (byte 3, likely Windows-1252 or Latin-1): save the file as UTF-8\n",
    ),
    "a model for rows": ("train grpo env=gsm8k env.path=pickled", 3, "it is a model, for model=pickled"),
    "a run for rows": ("train sft env=gsm8k env.path=runs/taken", 3, "it is a run, for model=runs/taken"),
    "a spreadsheet for rows": (
        "train grpo env=gsm8k env.path=rows.xlsx",
        3,
        "rows.xlsx is not a .jsonl, .json, .csv, .p",
    ),
    "a spreadsheet that is missing": (
        "train grpo env=gsm8k env.path=nope.xlsx",
        3,
        "env.path=nope.xlsx does not exist",
    ),
    "a script for rows": ("eval model=tiny env=gsm8k env.path=fine.py", 3, "fine.py is not a .jsonl, .json, .csv, .p"),
    "a pickle for rows": (
        "train grpo env=gsm8k env.path=rows.pkl",
        3,
        "rows.pkl is not a .jsonl, .json, .csv, .parquet file",
    ),
    "two files of one split": (
        "train grpo env=gsm8k env.path=two",
        3,
        "has train.jsonl and train.csv, and only one can",
    ),
    "rows of another environment": ("train grpo env=gsm8k env.path=rows.jsonl", 3, "row 1, field 'question': missing"),
    "rows of another environment in an evaluation": (
        "eval model=tiny env=gsm8k env.path=rows.jsonl",
        3,
        "rows.jsonl, row 1, field 'question': missing; the row has prompt, answer (the same in all 20 rows)\n",
    ),
    "rows of another environment in Parquet": (
        "train grpo env=math env.path=rows.parquet",
        3,
        "field 'problem': missing",
    ),
    "an answer without its mark": (
        "train grpo env=gsm8k env.path=unmarked.jsonl",
        3,
        "has no '#### ' followed by a number",
    ),
    "instructions that are none": (
        "train grpo env=ifeval env.path=rows.jsonl",
        3,
        "field 'instruction_id_list': missing",
    ),
    "rows that show nothing": ("train sft env=dataset env.path=labels.jsonl", 3, "field 'completion': missing"),
    "a template's field": (
        f"{OWN} env.path=rows.jsonl env.reward=number env.prompt_template={{pormpt}}",
        3,
        "did you mean prompt?",
    ),
    "a reward's column": (
        f"{OWN} env.path=rows.jsonl env.reward=./level.py:score",
        3,
        "takes level, which is not a column of",
    ),
    "a test file that is missing": (
        f"{OWN} env.path=rows.jsonl env.test_path=nope.csv env.reward=number",
        3,
        "nope.csv",
    ),
    "rows of another environment in a plan": (
        "train grpo env=gsm8k env.path=rows.jsonl --dry-run",
        3,
        "row 1, field 'q",
    ),
}

# these need the environment, the tokenizer or the disk
FOUND_LATER: dict[str, tuple[str, int, str]] = {
    "a GPU that is not there": (
        f"{QUICK} policy=transformers model.device=cuda:7",
        2,
        "model.device=cuda:7 cannot be used here: ",
    ),
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


def place(folder: Path) -> None:
    """What the mistakes above point at."""
    (folder / "folder").mkdir()
    (folder / "runs" / "taken" / "checkpoints").mkdir(parents=True)
    for job in ("a", "b"):
        (folder / "runs" / "lrs" / job / "checkpoints").mkdir(parents=True)
    (folder / "runs" / "lrs" / "sweep.json").write_text('{"jobs": [{"name": "a"}, {"name": "b"}]}')
    (folder / "my.yaml").write_text("command: train grpo\nsteps: 3\n")
    (folder / "pickled").mkdir()
    (folder / "pickled" / "config.json").write_text("{}")
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    rows = [json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "labels.jsonl").write_text('{"prompt": "What is 1 + 1?", "label": "sum"}\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "line7.jsonl").write_text("\n".join([*rows[:6], '{"prompt": "What', *rows[7:]]))
    (folder / "no-answer.jsonl").write_text("\n".join([rows[0], '{"prompt": "What is 2 + 1?"}', *rows[2:]]))
    (folder / "utf16.jsonl").write_text("\n".join(rows), encoding="utf-16")
    (folder / "plain16.jsonl").write_text("\n".join(rows), encoding="utf-16-le")
    (folder / "latin1.csv").write_text("prompt,answer\n1 + 1?,2\nCaf\xe9 1?,2\n", encoding="latin-1")
    (folder / "unmarked.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2"}\n')
    for name in ("rows.xlsx", "rows.pkl"):
        (folder / name).write_bytes(b"\x80\x04N.")
    (folder / "two").mkdir()
    for name in ("train.jsonl", "train.csv"):
        (folder / "two" / name).write_text("")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1 + 1?"], "answer": ["2"]}), folder / "rows.parquet")
    (folder / "level.py").write_text("def score(completions, level):\n    return [1.0 for _ in completions]\n")
    (folder / "fine.py").write_text("def score(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    (folder / "few.py").write_text("def score(completions, **kwargs):\n    return []\n")
    (folder / "fails.py").write_text("def score(completions, **kwargs):\n    return [c.nope for c in completions]\n")
    (folder / "broken.py").write_text("def score(completions, **kwargs):\n    return [1.0\n")
    (folder / "raises.py").write_text("import no_such_package\n\ndef score(completions, **kwargs):\n    return []\n")


RUN_ALL = """
import contextlib, io, json, sys
from rlpost.cli.main import run
seen = {}
for name, line in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(line.split())
    heavy = sorted({"torch", "transformers", "tensordict", "datasets", "vllm"} & set(sys.modules))
    seen[name] = [code, out.getvalue(), err.getvalue(), heavy]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every mistake of VISIBLE led to, all in one process that has imported nothing before."""
    folder = tmp_path_factory.mktemp("mistakes")
    place(folder)
    lines = json.dumps({name: line for name, (line, _, _) in VISIBLE.items()})
    command = [sys.executable, "-c", RUN_ALL]
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, cwd=folder, env=without_gpu, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def one_line(err: str) -> str:
    """The message, which has to be the last thing said and on a line of its own."""
    assert "Traceback" not in err
    *before, message = err.splitlines()
    assert message.startswith("error: ")
    assert not any(line.startswith("error: ") for line in before)
    return message


@pytest.mark.parametrize("mistake", VISIBLE)
def test_what_the_command_shows_is_answered_before_anything_heavy_is_imported(
    mistake: str, seen: dict[str, Any]
) -> None:
    code, out, err, heavy = seen[mistake]
    assert VISIBLE[mistake][2] in f"{one_line(err)}\n"
    assert code == VISIBLE[mistake][1]
    assert (out, err.count("\n"), heavy) == ("", 1, [])


@pytest.mark.parametrize("mistake", FOUND_LATER)
def test_what_data_and_machine_show_is_one_line_too(
    mistake: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, code, message = FOUND_LATER[mistake]
    assert run(line.split()) == code
    assert message in one_line(capsys.readouterr().err)


def test_a_second_process_on_a_run_folder_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = here / "runs" / "busy"
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run([*QUICK.split(), "--out", str(folder)]) == 2
    assert "is in use by another rlpost process" in one_line(capsys.readouterr().err)


def test_vllm_asked_for_but_absent_names_the_extra(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: False)
    assert run(["train", "grpo", "model=tiny", "policy=vllm"]) == 3
    assert "pip install 'rlpost[vllm" in one_line(capsys.readouterr().err)


def test_no_home_folder_names_what_to_set(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    assert run(QUICK.split()) == 3
    assert "set HOME" in one_line(capsys.readouterr().err)


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    """The beginning of a command whose `small/` is a disk of the size that the test says."""
    (tmp_path / "small").mkdir()
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f'mount -t tmpfs -o {request.param} tmpfs {tmp_path}/small && exec "$@"'
    begin = [*prefix, mount, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*begin, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    return begin


@pytest.mark.parametrize(
    ("small_disk", "reason"),
    [
        ("size=120k", "one checkpoint takes 1.09 MB, and 1"),  # told before anything is loaded
        ("nr_inodes=14", "No space left on device"),  # room for a checkpoint, but not for so many files
    ],
    indirect=["small_disk"],
)
def test_a_full_disk_is_named(small_disk: list[str], tmp_path: Path, reason: str) -> None:
    line = [sys.executable, "-m", "rlpost", *QUICK.split(), "--out", str(tmp_path / "small" / "r")]
    done = subprocess.run([*small_disk, *line], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert reason in one_line(done.stderr)
    assert "free some space" in one_line(done.stderr)


def test_a_reader_that_leaves_early_ends_the_command_quietly() -> None:
    command = f"{sys.executable} -m rlpost config show | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # 0 where all of it fitted into the pipe before head left
    assert done.stdout.count("\n") == 1


def test_a_hub_that_does_not_answer_is_given_up_within_seconds(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    started = time.monotonic()
    assert run(["train", "grpo", "env=gsm8k", "model=tiny", "policy=scripted"]) == 3
    assert "env.path=openai/gsm8k (train) is not a file or folder here" in one_line(capsys.readouterr().err)
    assert time.monotonic() - started < 60
