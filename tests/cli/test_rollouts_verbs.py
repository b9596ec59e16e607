"""`rlpost runs rollouts`: completions to read and to search."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpost.cli.rollouts import telling_parts
from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.runs.rollout_table import write_rollouts
from tests.command_line import CommandLine
from tests.run_folders import make_run, rows_worth
from tests.says import Says

Shown = Callable[[str], str]

# group, sample, completion, reward, length
SAMPLES = [
    (4, 0, "It is 91.", 1.0, 5),
    (4, 1, "No \x1b[2J idea", 0.0, 3),
    (5, 0, "word " * 400, 0.0, 7),
    (5, 1, "", None, 2),
]


@pytest.fixture(autouse=True)
def run(here: Path, conversation: Callable[..., Conversation]) -> Path:
    """runs/a with steps 1 and 2, whose completions are those of `SAMPLES`."""
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
    folder = make_run(here / "runs" / "a")
    for step in (1, 2):
        write_rollouts(
            folder / "rollouts" / f"step-{step:06d}.parquet", step, batch, rows_worth(batch, 1.5, -1.5, 0.0, 0.0)
        )
    return folder


@pytest.fixture
def shown(rlpost: CommandLine) -> Shown:
    """The output of `rlpost runs rollouts`."""

    def show(words: str) -> str:
        out = rlpost(f"runs rollouts {words}")
        assert "\x1b" not in out
        return out

    return show


def order(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("step 2, ")]


def test_the_last_step_is_a_table_of_groups_with_the_best_and_the_worst(shown: Shown, says: Says) -> None:
    out = shown("a")
    lines = out.splitlines()
    assert [line.split()[:9] for line in lines[2:5]] == [
        ["group", "size", "reward", "spread", "least", "most", "right", "tokens", "cut"],
        ["4", "2", "0.50", "0.71", "0.00", "1.00", "50%", "4", "0"],
        ["5", "2", "0.00", "0.00", "0.00", "0.00", "0%", "4", "0"],
    ]
    for label, (completion, advantage) in {"best": ("It is 91.", "+1.50"), "worst": ("No \\x1b[2J", "-1.50")}.items():
        place = next(i for i, line in enumerate(lines) if line.startswith(f"{label}: group 4"))
        assert f"advantage {advantage}" in lines[place + 1]
        assert lines[place + 6].startswith(f"  | {completion}")
    says("rollouts", out)


def test_completions_are_chosen_and_sorted(shown: Shown) -> None:
    named = {f"step 2, group {group}, sample {sample}": i for i, (group, sample, *_) in enumerate(SAMPLES)}
    for words, expected in {
        "--group 5": [2, 3],
        "--sort length": [2, 0, 1, 3],
        "--sort length --reverse": [3, 1, 0, 2],
        "--sort reward --limit 1": [0],
        "--worst --limit 2": [1, 2],
        "--sort advantage --worst": [1, 2, 3, 0],
        "--sort reward --limit 4": [0, 2, 1, 3],  # the best of each group first; without a reward: last
        "--worst --limit 4": [1, 2, 0, 3],
    }.items():
        assert [named[line] for line in order(shown(f"a {words}"))] == expected, words


def test_a_line_says_that_the_best_of_each_group_come_first(shown: Shown, says: Says) -> None:
    said = [shown(f"a {words} --limit 4").splitlines()[0] for words in ("--sort reward", "--worst")]
    says("rollouts", "\n".join(said))
    assert "of each group" not in shown("a --sort length")
    assert shown("a --group 9").endswith("0 found in step 2\n")


def test_a_search_goes_through_all_steps_newest_first_and_counts(shown: Shown, says: Says) -> None:
    out = shown("a --search NO")
    assert [line.split() for line in out.splitlines()[3:5]] == [
        [str(step), "4", "1", "0.00", "3", "stop", *[r"No", r"\x1b[2J", r"idea"]] for step in (2, 1)
    ]
    says("rollouts", out)
    says("rollouts", shown("a --reward :0.5 --limit 3"))  # without the failed reward
    found = shown("a --search '5 + 87' --step 1").splitlines()[3]
    assert found.endswith(" 5 + 87?")  # in the prompt
    says("rollouts", shown("a --search camel"))


def test_a_line_of_a_search_begins_shortly_before_the_text(
    run: Path, conversation: Callable[..., Conversation], shown: Shown
) -> None:
    made = conversation(text="0 " * 100 + "hello " + "1 " * 100)
    write_rollouts(run / "rollouts" / "step-000003.parquet", 3, batch_from_conversations([made]))
    line = shown("a --search hello --step 3").splitlines()[3]
    assert line.split("stop")[1].strip().startswith("…0 0 0 0 0")
    assert "0 hello 1 1" in line


def test_a_search_as_blocks_and_as_json(shown: Shown) -> None:
    out = shown("a --search word --full --limit 1")
    assert out.splitlines()[2] == "step 2, group 5, sample 0"
    assert out.count("word") == 400
    result = json.loads(shown("a --reward 1 --json"))
    assert (result["found"], result["found_by_step"], result["steps_searched"]) == (2, {"2": 1, "1": 1}, 2)
    assert [(row["step"], row["completion"], row["tokens"]) for row in result["completions"]] == [
        (2, SAMPLES[0][2], 5),
        (1, SAMPLES[0][2], 5),
    ]


def test_long_completions_are_cut_with_a_count_unless_full_is_asked_for(shown: Shown) -> None:
    cut = shown("a --group 5")
    assert cut.count("word") == 16 * 19  # lines of 96 columns
    assert "  | … 480 more " in cut
    assert shown("a --group 5 --full").count("word") == 400


def test_show_as_json(shown: Shown) -> None:
    result = json.loads(shown("a --step 1 --json --sort reward --limit 1"))
    assert (result["step"], [g["reward_mean"] for g in result["groups"]]) == (1, [0.5, 0.0])
    [best] = result["completions"]
    assert (best["completion"], best["reward_parts"], best["tokens"]) == (SAMPLES[0][2], {"answer": 1.0}, 5)
    assert "token_ids" not in best
    assert len(json.loads(shown("a --json"))["completions"]) == 4


def test_lines_that_all_prompts_share_are_left_out_of_the_table() -> None:
    assert telling_parts(["s\nu\none", "s\nu\ntwo\nmore"]) == ["…one", "…two\nmore"]
    assert telling_parts(["s\nsame", "s\nsame"]) == ["s\nsame", "s\nsame"]
    listed = [f"How many things are these? {number} eggs" for number in (2, 3)]
    assert telling_parts(listed) == ["…2 eggs", "…3 eggs"]
    assert telling_parts(["1 < 2", "3 < 2"]) == ["1 < 2", "3 < 2"]


MISTAKES = """
    runs rollouts a --step 9
    runs rollouts a --step 1-2
    runs rollouts a --step 7:9
    runs rollouts aa
    runs rollouts empty
    runs rollouts a --reward 1:0
    runs rollouts a --reward much
"""


def test_mistakes_are_one_line_and_exit_2(rlpost: CommandLine, says: Says) -> None:
    make_run(Path("runs/empty"))
    says("rollouts", rlpost.refusals(MISTAKES))
