"""`--resume`: which settings a run goes on with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlpost.cli.main import run
from rlpost.config.paths import MANIFEST, SWEEP_FILE

ASKED = ["model=tiny", "policy=scripted", "prompts_per_step=2", "group_size=2", "env.digits=3", "optim.lr=3e-05"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(folder: Path, *, steps: int) -> None:
    """A run as far as `--resume` looks at it before anything is loaded."""
    model = folder / "checkpoints" / f"step-{steps:06d}" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model.parent / MANIFEST).write_text("{}")
    (folder / "overrides.txt").write_text("".join(f"{word}\n" for word in ASKED))


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert run(["train", "grpo", *words, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["train", "grpo", *words, "--dry-run"]) == 2
    return capsys.readouterr().err


def test_a_run_goes_on_with_its_own_settings_under_those_given_now(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/sums"), steps=30)
    for words in (["--name", "sums", "--resume", "auto"], ["--resume", "runs/sums"]):
        plan = planned(capsys, *words, "steps=90", "optim.lr=1e-5")
        assert plan["folder"] == "runs/sums"
        assert plan["choices"]["model"] == "tiny"
        assert (plan["settings"]["env"]["digits"], plan["settings"]["prompts_per_step"]) == (3, 2)
        assert (plan["settings"]["steps"], plan["settings"]["optim"]["lr"]) == (90, 1e-5)
        assert plan["overrides"] == [*ASKED[:-1], "steps=90", "optim.lr=1e-05"]


def test_settings_that_differ_from_those_of_the_run_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/sums"), steps=30)
    again = ["train", "grpo", "--name", "sums", "--resume", "auto", "--dry-run"]
    assert run([*again, "steps=90", "optim.lr=1e-5", "loss=dapo", "env.digits=3"]) == 0
    shown = capsys.readouterr().err
    assert shown == "going on with other settings: steps: 60 -> 90; optim.lr: 3e-05 -> 1e-05; loss: grpo -> dapo\n"
    assert run([*again, "optim.lr=3e-5"]) == 0
    assert not capsys.readouterr().err


def test_without_a_name_the_settings_given_now_say_which_run_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/grpo-arithmetic-tiny-4"), steps=30)
    plan = planned(capsys, "model=tiny", "--resume", "auto")
    assert (plan["folder"], plan["settings"]["env"]["digits"]) == ("runs/grpo-arithmetic-tiny-4", 3)


def test_without_a_name_there_must_be_a_run_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "model=tiny", "--resume", "auto")
    assert "--resume auto: there is no run in runs/grpo-arithmetic-tiny-1; leave --resume out to begin one" in message
    assert planned(capsys, "model=tiny", "--resume", "auto", "--name", "new")["folder"] == "runs/new"


def test_a_fork_takes_the_settings_along(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/sums"), steps=30)
    plan = planned(capsys, "--resume", "runs/sums/checkpoints/step-000030", "--name", "fork")
    assert (plan["folder"], plan["settings"]["env"]["digits"]) == ("runs/fork", 3)


def test_a_checkpoint_that_keeps_the_model_alone_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/sums"), steps=30)
    older = Path("runs/sums/checkpoints/step-000010")
    shutil.copytree("runs/sums/checkpoints/step-000030", older)
    (older / MANIFEST).write_text('{"model/config.json": {"bytes": 2, "sha256": "0"}}')
    assert run(["train", "grpo", "--resume", str(older), "--dry-run"]) == 3
    assert f"{older} keeps the model alone: resume from latest" in capsys.readouterr().err


def without_checkpoint(folder: Path, *, metrics: str = '{"step": 0, "eval/reward": 0.5}\n') -> None:
    make_run(folder, steps=30)
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").write_text(metrics)


def test_a_run_without_a_checkpoint_begins_again_with_its_own_settings(capsys: pytest.CaptureFixture[str]) -> None:
    without_checkpoint(Path("runs/sums"))
    plan = planned(capsys, "--name", "sums", "--resume", "auto", "steps=90")
    assert (plan["settings"]["env"]["digits"], plan["settings"]["steps"]) == (3, 90)
    assert plan["overrides"] == [*ASKED, "steps=90"]
    assert run(["train", "grpo", "--name", "sums", "--resume", "auto", "--dry-run"]) == 0
    assert "beginning again with its own settings: it has no checkpoint yet\n" in capsys.readouterr().out
    message = "the run began with seed=0, not 4; keep it"
    assert message in refused(capsys, "--name", "sums", "--resume", "auto", "seed=4")
    Path("runs/sums/overrides.txt").write_text("")  # a run that was asked nothing keeps the defaults
    assert message in refused(capsys, "--name", "sums", "--resume", "auto", "seed=4")


def test_a_run_that_does_not_say_what_it_was_asked_is_not_begun_again(capsys: pytest.CaptureFixture[str]) -> None:
    without_checkpoint(Path("runs/sums"))
    Path("runs/sums/overrides.txt").unlink()
    assert run(["train", "grpo", "--name", "sums", "--resume", "auto", "--dry-run"]) == 3
    assert "nothing says what the run was asked: give another --name" in capsys.readouterr().err


def test_without_a_checkpoint_only_auto_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    without_checkpoint(Path("runs/sums"))
    assert run(["train", "grpo", "--resume", "runs/sums", "--dry-run"]) == 3
    assert "there is no complete checkpoint; --out runs/sums --resume auto begins the run again" in (
        capsys.readouterr().err
    )
    assert run(["train", "grpo", "--name", "sums", "--resume", "latest", "--dry-run"]) == 3
    assert "--resume auto begins it again, with its own settings" in capsys.readouterr().err


def test_a_job_that_its_sweep_resumes_is_told_everything_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/lrs/lr-1"), steps=30)
    Path("runs/lrs", SWEEP_FILE).write_text("{}")
    assert planned(capsys, "--out", "runs/lrs/lr-1", "--resume", "auto")["settings"]["env"]["digits"] == 2
    assert planned(capsys, "--resume", "runs/lrs/lr-1")["settings"]["env"]["digits"] == 3


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("seed=4", "the run began with seed=0, not 4; keep it"),
        ("group_size=4", "the run began with group_size=2, not 4; keep it"),
        ("model.chat_template=plain", "the run began with model.chat_template=null, not plain; keep it"),
        (
            "model.chat_template_kwargs={enable_thinking:false}",
            "the run began with model.chat_template_kwargs=null, not {enable_thinking:false}; keep it",
        ),
        ("model=smollm2", "the run began with model.path=builtin:tiny, not packaged:smollm2; keep it"),
    ],
)
def test_what_must_stay_is_asked_before_anything_is_loaded(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(Path("runs/sums"), steps=30)
    assert message in refused(capsys, "--name", "sums", "--resume", "auto", word)


def test_another_environment_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/sums"), steps=30)
    Path("runs/sums/overrides.txt").write_text("model=tiny\n")
    for resume in (["--name", "sums", "--resume", "auto"], ["--resume", "runs/sums"]):
        assert "the run began with env=arithmetic, not gsm8k; keep it" in refused(capsys, *resume, "env=gsm8k")


def test_the_plan_says_where_a_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/sums"), steps=30)
    for name, point in (("sums", "going on after step 30"), ("new", "beginning: it has no checkpoint yet")):
        assert run(["train", "grpo", "--name", name, "--resume", "auto", "--dry-run"]) == 0
        assert f"writes  runs/{name}, {point}\n" in capsys.readouterr().out


def test_code_is_given_again_since_a_folder_may_be_anybodys(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/mine"), steps=30)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(40)))
    Path("score.py").write_text("def score(completions, **columns):\n    raise SystemExit('this ran')\n")
    rows = "env=dataset\nenv.path=rows.jsonl\nenv.reward=./score.py:score\n"
    Path("runs/mine/overrides.txt").write_text(rows)
    said = refused(capsys, "--name", "mine", "--resume", "auto")
    assert "add env.reward=./score.py:score\n" in said
    plan = planned(capsys, "--name", "mine", "--resume", "auto", "env.reward=./score.py:score")
    assert plan["settings"]["env"]["path"] == "rows.jsonl"
    assert run(["runs", "show", "mine"]) == 0
    assert "rlpost train grpo --resume runs/mine env.reward=./score.py:score" in capsys.readouterr().out
