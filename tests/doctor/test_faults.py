"""`rlpost doctor` on trainings that each have one thing wrong, and on some that have nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpost.cli.main import run
from tests.envs.own_rows import write_rows
from tests.says import Says

pytestmark = pytest.mark.thorough

TINY = ["model=tiny", "policy=transformers"]
SUMS = ["env.digits=1", "env.max_completion_tokens=8"]
ROWS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(2, 7) for b in range(3, 7)]
CHATS = [
    {"messages": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]}
    for r in ROWS
]
Make = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """What is wrong: `words` of the training, which `make` writes files for; how it is named, and the exit code."""

    words: list[str]
    named: str
    code: int = 3
    make: Make = lambda _: None
    verb: str = "grpo"


def rows(content: list[Any], name: str = "rows.jsonl") -> Make:
    return lambda folder: write_rows(folder, content, name)


def text(content: str) -> Make:
    return lambda folder: (folder / "rows.jsonl").write_text(content)


def both(one: Make, other: Make) -> Make:
    return lambda folder: (one(folder), other(folder))


def reward(body: str) -> Make:
    code = f"import time\ndef score(completions, **kept):\n    {body}\n"
    return both(rows(ROWS), lambda folder: (folder / "mine.py").write_text(code))


def edited(change: Make) -> Make:
    """A copy of the tiny model that is changed."""

    def make(folder: Path) -> None:
        from rlpost.model.locate import locate_model

        shutil.copytree(locate_model("builtin:tiny"), folder / "model")
        change(folder / "model")

    return make


def written(body: str) -> Make:
    return lambda folder: (folder / "chat_template.jinja").write_text(body)


def template(body: str) -> Make:
    return edited(written(body))


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Make:
    def edit(folder: Path) -> None:
        [file] = folder.glob("*.safetensors")
        held = load_file(file)
        change(held)
        save_file(held, file, {"format": "pt"})

    return edited(edit)


def json_values(name: str, **values: Any) -> Make:
    def edit(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))

    return edit


def config(**values: Any) -> Make:
    return edited(json_values("config.json", **values))


def nan(held: dict[str, torch.Tensor]) -> None:
    next(iter(held.values()))[0] = float("nan")


DATASET = [*TINY, "env=dataset", "env.path=rows.jsonl", "env.max_completion_tokens=8", "env.reward=number"]
SFT = ["model=tiny", "env=dataset", "env.path=rows.jsonl"]
MINE = [*DATASET[:-1], "env.reward=mine.py:score"]
OWN = ["policy=transformers", "model=./model", *SUMS]
LONG_SUMS = [*TINY, "env.digits=9"]
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NO_USER = TURN.replace("m.content", "m.content if m.role != 'user'") + PROMPT
BOS = json_values("tokenizer_config.json", bos_token="<|im_start|>")
TWO_BEGINNINGS = "{{ bos_token }}{{ bos_token }}" + TURN + PROMPT
LONG = {"question": "word " * 5000, "answer": "1"}

FAULTS = {
    # rows
    "an empty file": Case(DATASET, "holds no rows", make=text("")),
    "a torn line": Case(DATASET, "rows.jsonl, row 2", make=text(json.dumps(ROWS[0]) + '\n{"question": "What')),
    "a prompt that is too long": Case(DATASET, "more tokens than", make=rows([*ROWS, LONG])),
    "all rows alike": Case([*DATASET, "eval.enabled=false"], "all 20 rows ask the same", make=rows([ROWS[1]] * 20)),
    "no row to hold out": Case(DATASET, "leaves none for test", make=rows([ROWS[1]] * 20)),
    "a column that nothing reads": Case(DATASET, "mood (20 rows)", 0, rows([row | {"mood": "calm"} for row in ROWS])),
    "rows twice": Case(DATASET, "8 of 16 rows ask what another one asks", 0, rows([*ROWS[:10]] * 2)),
    "held-out rows trained on": Case(
        [*DATASET, "env.test_path=test.jsonl"], "4 of 4 held-out", 0, both(rows(ROWS), rows(ROWS[:4], "test.jsonl"))
    ),
    "fewer rows than a step takes": Case(
        [*DATASET, "eval.enabled=false", "env.held_out=0"], "takes some of them twice a step", 0, rows(ROWS[:5])
    ),
    # rewards
    "a constant": Case(MINE, "does not tell them apart", make=reward("return [1.0] * len(completions)")),
    "one that raises": Case(MINE, "KeyError", make=reward("raise KeyError('answers')")),
    "one that hangs": Case([*MINE, "env.reward_timeout_seconds=1"], "mine.py:score", make=reward("time.sleep(60)")),
    "NaN": Case(MINE, "nan", make=reward("return [float('nan')] * len(completions)")),
    "paid by length": Case(MINE, "reward mine.py:score", make=reward("return [float(len(c)) for c in completions]")),
    "paid for silence": Case(
        MINE, "empty: earns 1", make=reward("return [float(c in ('', a)) for c, a in zip(completions, kept['answer'])]")
    ),
    # the chat template
    "no template": Case(OWN, "has no chat template", 2, edited(lambda f: (f / "chat_template.jinja").unlink())),
    "no end of a turn": Case(OWN, "no special token", make=template(TURN.replace("<|im_end|>", "") + PROMPT)),
    "no generation prompt": Case(OWN, "but not as its generation prompt", make=template(TURN)),
    "a message left out": Case(
        ["model=./model", *SFT[1:]],
        "of the role user",
        make=both(template(NO_USER), rows(CHATS)),
        verb="sft",
    ),
    "a text begun twice": Case(OWN, "with <|im_start|> twice", make=edited(both(written(TWO_BEGINNINGS), BOS))),
    # the model
    "weights that are NaN": Case(OWN, "holds NaN or infinity", make=weights(nan)),
    "a weight that is missing": Case(OWN, "model", make=weights(lambda held: [held.pop(max(held))])),
    "a tokenizer of another model": Case(OWN, "embeddings", make=config(vocab_size=20)),
    "a context that is too short": Case(OWN, "context of 16 tokens", make=config(max_position_embeddings=16)),
    # settings
    "a rate that destroys": Case([*TINY, *SUMS, "optim.lr=0.5"], "unusually high", 0),
    "a warm-up without an end": Case([*TINY, *SUMS, "steps=5", "optim.warmup_steps=1000"], "gets to 1e-07", 0),
    "every answer cut": Case([*LONG_SUMS, "env.max_completion_tokens=1", "seed=3"], "32 of 32 are truncated", 0),
    "no spread": Case([*LONG_SUMS, "env.max_completion_tokens=2"], "rewards differ in none of 8 groups", 0),
    # demonstrations
    "nobody answers": Case(SFT, "row 1", make=rows([{"messages": chat["messages"][:1]} for chat in CHATS]), verb="sft"),
    "rows that are cut": Case([*SFT, "max_tokens=16"], "more than max_tokens=16", make=rows(CHATS), verb="sft"),
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = FAULTS[name]
    case.make(tmp_path)
    code = run(["doctor", case.verb, *case.words])
    said = "".join(capfd.readouterr())
    told = [line for line in said.splitlines() if line.startswith(("error", "warning", "  "))]
    assert any(case.named in line for line in told), said
    assert code == case.code, said


@pytest.mark.parametrize("verb", ["grpo", "sft"])
def test_a_good_training_has_no_error_and_nothing_is_kept(
    verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = TINY if verb == "grpo" else TINY[:1]
    assert run(["doctor", verb, *words, *SUMS, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["training"] == verb
    warned = [finding["about"] for finding in told["findings"] if finding["level"] == "warning"]
    assert told["error"] == 0
    assert warned == ["eval", "completions"][: told["warning"]]  # few are held out; a random model seldom ends a turn
    about = [finding["about"] for finding in told["findings"]]
    common = ["rate", "template", "memory", "disk", "precision", "eval", "learning", "time"]
    own = ["rows", "gold", "completions", "groups", "sampler", "push"] if verb == "grpo" else ["tokens"]
    assert sorted(about) == sorted([*common, *own])
    assert all(finding["fix"] for finding in told["findings"] if finding["level"] == "warning")
    assert not list(tmp_path.iterdir())


def test_another_training_is_refused(capfd: pytest.CaptureFixture[str], says: Says) -> None:
    assert run(["doctor", "expert-iteration"]) == 2
    says("doctor", capfd.readouterr().err)
