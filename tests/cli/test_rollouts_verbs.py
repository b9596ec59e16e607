"""`rlpost rollouts`: completions to read and to take away."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpost.cli.main import run as rlpost
from rlpost.cli.rollouts import telling_parts
from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.runs.rollout_table import write_rollouts
from tests.run_folders import make_run, rows_worth

# group, sample, completion, reward, length
SAMPLES = [
    (4, 0, "It is 91.", 1.0, 5),
    (4, 1, "No \x1b[2J idea", 0.0, 3),
    (5, 0, "word " * 400, 0.0, 7),
    (5, 1, "", None, 2),
]


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversation: Callable[..., Conversation]) -> Path:
    """runs/a with steps 1 and 2, whose completions are those of `SAMPLES`."""
    monkeypatch.chdir(tmp_path)
    made = [
        conversation(
            group,
            sample,
            query=f"What is {group} + 87?",
            text=text,
            reward=reward,
            valid=reward is not None,
            reward_parts={} if reward is None else {"answer": reward},
            accuracy_lenient=reward,
            response_ids=[7] * length,
        )
        for group, sample, text, reward, length in SAMPLES
    ]
    batch = batch_from_conversations(made)
    folder = make_run(tmp_path / "runs" / "a")
    for step in (1, 2):
        write_rollouts(
            folder / "rollouts" / f"step-{step:06d}.parquet", step, batch, rows_worth(batch, 1.5, -1.5, 0.0, 0.0)
        )
    return folder


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert rlpost(["rollouts", "show", *words.split()]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    return out


def order(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("group ")]


def test_the_last_step_is_a_table_of_groups_with_the_best_and_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown("a", capsys).splitlines()
    assert lines[0] == "a  step 2: 4 completions in 2 groups, reward 0.33 ± 0.58"
    assert [line.split()[:9] for line in lines[2:5]] == [
        ["group", "size", "reward", "spread", "least", "most", "right", "tokens", "cut"],
        ["4", "2", "0.50", "0.71", "0.00", "1.00", "50%", "4", "0"],
        ["5", "2", "0.00", "0.00", "0.00", "0.00", "0%", "4", "0"],
    ]
    assert lines[3].endswith("What is 4 + 87?")
    best = lines.index("best: group 4, sample 0")
    assert lines[best + 1 : best + 7] == [
        "  reward 1 (answer 1)  lenient 1  advantage +1.50",
        "  5 tokens, stop, policy version 0",
        "  prompt",
        "  | <user>What is 4 + 87?",
        "  completion",
        "  | It is 91.",
    ]
    assert lines[lines.index("worst: group 4, sample 1") + 6] == "  | No \\x1b[2J idea"


def test_completions_are_chosen_and_sorted(capsys: pytest.CaptureFixture[str]) -> None:
    named = {f"group {group}, sample {sample}": i for i, (group, sample, *_) in enumerate(SAMPLES)}
    for words, expected in {
        "a --group 5": [2, 3],
        "a --sample 1": [1, 3],
        "a --group 4 --sample 1": [1],
        "a --sort length": [2, 0, 1, 3],
        "a --sort length --reverse": [3, 1, 0, 2],
        "a --sort reward --limit 1": [0],
        "a --worst --limit 2": [1, 2],
        "a --sort advantage --worst": [1, 2, 3, 0],
    }.items():
        assert [named[line] for line in order(shown(words, capsys))] == expected, words
    assert [named[line] for line in order(shown("a --sort reward", capsys))][-1] == 3  # without a reward: last


def test_the_best_of_each_group_come_first_and_a_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for words, samples, remark in (
        ("--sort reward", [0, 2, 1, 3], "the best of each of 2 groups first, then the others"),
        ("--worst", [1, 2, 0, 3], "the worst of each of 2 groups first, then the others"),
    ):
        out = shown(f"a {words} --limit 4", capsys)
        assert out.splitlines()[0] == remark
        assert order(out) == [f"group {group}, sample {sample}" for group, sample, *_ in (SAMPLES[i] for i in samples)]
    assert "groups first" not in shown("a --sort length", capsys) + shown("a --sort reward --group 4", capsys)


def searched(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert rlpost(["rollouts", "search", *shlex.split(words)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    return out.splitlines()


def test_a_search_goes_through_all_steps_newest_first_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = searched("a NO", capsys)
    assert lines[0] == "a  2 found in 2 of 2 steps, the newest first"
    assert [line.split() for line in lines[3:5]] == [
        [str(step), "4", "1", "0.00", "3", "stop", *[r"No", r"\x1b[2J", r"idea"]] for step in (2, 1)
    ]
    assert lines[-1] == f"read the first: rlpost rollouts show {Path('runs/a')} --step 2 --group 4"
    lines = searched("a --reward :0.5 --limit 3", capsys)  # without the failed reward
    assert (lines[0], lines[-1]) == (
        "a  4 found in 2 of 2 steps, the newest first",
        "3 of 4 shown: --limit 4 shows all",
    )
    assert searched("a '5 + 87' --step 1", capsys)[3].endswith("(prompt) <user>What is 5 + 87?")
    assert searched("a camel", capsys) == ["no completion of 2 steps was found"]


def test_a_line_of_a_search_begins_shortly_before_the_text(
    run: Path, conversation: Callable[..., Conversation], capsys: pytest.CaptureFixture[str]
) -> None:
    made = conversation(text="so " * 100 + "hello " + "and " * 100)
    write_rollouts(run / "rollouts" / "step-000003.parquet", 3, batch_from_conversations([made]))
    [line] = searched("a hello --step 3", capsys)[3:4]
    assert line.split("stop")[1].strip().startswith("…so so so so so so so so hello and")


def test_a_search_as_blocks_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    lines = searched("a word --full --limit 1", capsys)
    assert lines[2] == "step 2, group 5, sample 0"
    assert sum(line.count("word") for line in lines) == 400
    result = json.loads("".join(searched("a --reward 1 --json", capsys)))
    assert (result["found"], result["found_by_step"], result["steps_searched"]) == (2, {"2": 1, "1": 1}, 2)
    assert [(row["step"], row["completion"], row["tokens"]) for row in result["completions"]] == [
        (2, "It is 91.", 5),
        (1, "It is 91.", 5),
    ]


def test_long_completions_are_cut_with_a_count_unless_full_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    cut = shown("a --group 5 --sample 0", capsys)
    whole = shown("a --group 5 --sample 0 --full", capsys)
    assert cut.count("word") == 16 * 19  # lines of 96 columns
    assert "  | … 480 more characters\n" in cut
    assert whole.count("word") == 400


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(shown("a --step 1 --json --sort reward --limit 1", capsys))
    assert (result["step"], [g["reward_mean"] for g in result["groups"]]) == (1, [0.5, 0.0])
    [best] = result["completions"]
    assert (best["completion"], best["reward_parts"], best["tokens"]) == ("It is 91.", {"answer": 1.0}, 5)
    assert "token_ids" not in best
    assert len(json.loads(shown("a --json", capsys))["completions"]) == 4


def test_lines_that_all_prompts_share_are_left_out_of_the_table() -> None:
    assert telling_parts(["s\nu\none", "s\nu\ntwo\nmore"]) == ["…one", "…two\nmore"]
    assert telling_parts(["s\nsame", "s\nsame"]) == ["s\nsame", "s\nsame"]
    listed = ["How many things are these? 2 eggs", "How many things are these? 3 eggs"]
    assert telling_parts(listed) == ["…2 eggs", "…3 eggs"]
    assert telling_parts(["1 < 2", "3 < 2"]) == ["1 < 2", "3 < 2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show a --step 9", "no completions of step 9: it has steps 1 to 2"),
        ("show a --group 9", "step 2 has no group 9: it has 4 to 5"),
        ("show a --group 4 --sample 7", "step 2 has no sample 7: it has 0 to 1"),
        ("show aa", "there is no run aa; did you mean a?"),
        ("export a x.xlsx", "x.xlsx has no ending that says its format"),
        ("export a taken.csv", "taken.csv exists already"),
        ("export a x.csv --step 1-2", "--step 1-2: give one step or A:B"),
        ("export a x.csv --step 7:9", "--step 7:9: there are no such steps; it has 1 to 2"),
        ("search a --reward 1:0", "--reward 1:0: give one reward or LO:HI"),
        ("search a --reward much", "--reward much: give one reward or LO:HI"),
        ("search a --step 7:9", "--step 7:9: there are no such steps; it has 1 to 2"),
        ("export empty x.csv", "runs/empty holds no completions yet"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken.csv").write_text("mine")
    make_run(Path("runs/empty"))
    assert rlpost(["rollouts", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert Path("taken.csv").read_text() == "mine"


def test_an_export_says_what_it_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    assert rlpost(["rollouts", "export", "a", "all.jsonl"]) == 0
    assert capsys.readouterr().out == "8 completions of 2 steps in all.jsonl\n"
    rows = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    assert [(row["step"], row["group"], row["sample"]) for row in rows[:2]] == [(1, 4, 0), (1, 4, 1)]
    assert rows[1]["completion"] == "No \x1b[2J idea"
    assert rlpost(["rollouts", "export", "a", "all.csv", "--step", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "all.csv", "completions": 4, "steps": 1}


def test_a_dash_writes_json_lines_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert rlpost(["rollouts", "export", "a", "-", "--step", "2:", "--no-tokens"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [2, 2, 2, 2]
    assert "mask" not in rows[0]


@pytest.mark.parametrize("verb", ["show", "search", "export"])
def test_help_is_short(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rlpost(["rollouts", verb, "--help"]) == 0
    assert 10 < len(capsys.readouterr().out.splitlines()) < 40
