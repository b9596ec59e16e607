"""Frames at every size: whole, true, and indifferent to what the model says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from rlpost.screen.picture import frame as drawn
from rlpost.screen.state import STOPPING, Shown, State
from tests.says import Says

REPLIED = "30 + 50 = 80 and 4 + 7 = 11.\nSo 34 + 57 = 91."
SAMPLE = Shown(3, "What is 34 + 57?", REPLIED, 1.1, {"answer": 1.0, "format": 0.1}, "stop")
FIGURES = {
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "accuracy/lenient": 0.25,
    "completion/tokens_mean": 15.2,
    "completion/truncated": 0.03,
    "sampler/logprob_gap": 0.0154,
    "entropy": 1.23,
    "grad_norm": 2.79,
    "groups/zero_std": 0.125,
    "ratio/clip_fraction": 0.001,
    "tokens/generated": 744.0,
    "time/rollout": 4.0,
    "time/train": 6.0,
    "time/step": 10.0,
    "lr": 1.5e-5,
    "policy/version": 3.0,
    "memory/peak_gb": 1.234,
}
EVALUATION = {
    "eval/prompts": 50.0,
    "eval/accuracy_lenient": 0.031,
    "eval/accuracy_lenient_low": 0.02,
    "eval/accuracy_lenient_high": 0.05,
}
SIZES = [(80, 24), (200, 50), (40, 12), (120, 30), (57, 60), (300, 10), (20, 5), (10, 3), (3, 2), (1, 1)]


@pytest.fixture
def state() -> State:
    """A run in its fourth step of eight."""
    time = [0.0]
    made = State(now=lambda: time[0], title="my-run", about="packaged:smollm2 · arithmetic · vllm", total=8)
    made.begin_phase("evaluating")
    time[0] = 10
    made.begin(0, 8, [(0, EVALUATION)])
    for step in (1, 2, 3):
        made.begin_step()
        made.begin_phase("sampling", "64 completions")
        time[0] += 4
        made.begin_phase("training", done=64, total=64)
        time[0] += 6
        made.end_step(step, {**FIGURES, "reward/mean": step / 4}, [replace(SAMPLE, step=step)])
    made.begin_step()
    made.begin_phase("sampling", "64 completions")
    time[0] += 2
    return made


def frame(state: State, width: int, height: int) -> list[str]:
    return [line.plain.rstrip() for line in drawn(state, width, height)]


def test_the_picture_at_80_by_24(state: State, says: Says) -> None:
    state.notes.append("out of memory: going on with tokens_per_microbatch=1024")
    says("train", "\n".join(frame(state, 80, 24)))


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("begun", [False, True])
def test_every_size_has_a_frame_that_fits(state: State, width: int, height: int, begun: bool) -> None:
    lines = drawn(state if begun else State(), width, height)
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= max(1, width - 1)
    if height >= 5:
        assert len(lines) == height


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[2J\x1b]0;owned\x07\x9b31m\r",
        "[bold red]hi[/] [/foo] [link=file:///]x[/link] :smile:",
        "日本語" * 999,
        "x" * 100_000,
        "e" + "\u0301" * 9999,
        "\u202eright to left\u2066",
        "👩\u200d👩\u200d👧🇩🇪❤️" * 99,
        "\n" * 9999 + "end",
        "\t" * 99,
    ],
)
@pytest.mark.parametrize(("width", "height"), SIZES[:4])
def test_hostile_text_leaves_the_frame_intact(state: State, text: str, width: int, height: int) -> None:
    calm = frame(state, width, height)
    state.samples = [replace(SAMPLE, prompt=text, completion=text, reward_parts={text[:200]: 1.0})]
    lines = drawn(state, width, height)
    assert len(lines) == height
    assert max(line.cell_len for line in lines) < width
    assert [line.plain for line in lines if not line.plain.isprintable()] == []
    assert [line.plain.rstrip() for line in lines[:3]] == calm[:3]
    assert sum(line.plain.startswith(" step 3  reward") for line in lines) == 1


def test_markup_is_shown_and_does_nothing(state: State) -> None:
    markup = "[bold red]hi[/] [/foo]"
    state.samples = [replace(SAMPLE, completion=markup, prompt="[b]?")]
    [shown] = [line for line in drawn(state, 80, 24) if "hi" in line.plain]
    assert shown.plain.rstrip() == f" │ {markup}"
    assert {str(span.style) for span in shown.spans} <= {"dim"}


def test_stopping_is_said_in_the_picture(state: State) -> None:
    state.stopping = STOPPING
    lines = frame(state, 80, 24)
    assert lines[-1] == f" {STOPPING}"
    assert "left" not in lines[1]


def test_before_the_first_step_the_picture_says_what_is_done(says: Says) -> None:
    state = State(now=lambda: 0.0, total=60, plan=["model   tiny", "precision float32", "work    " + "prompts " * 10])
    state.begin_phase("evaluating", done=256, total=500)
    says("train", "\n".join(frame(state, 80, 24)))


def test_from_six_steps_on_there_are_curves_with_their_range(state: State, says: Says) -> None:
    for step in (4, 5):
        state.end_step(step, FIGURES)
    assert "┤" not in "".join(frame(state, 80, 24))
    state.end_step(6, FIGURES)
    says("train", "\n".join(frame(state, 80, 24)))


def test_a_tall_picture_explains_its_words(state: State, says: Says) -> None:
    says("train", "\n".join(frame(state, 120, 40)))  # without the word lag, which is not shown
    state.samples = [replace(SAMPLE, completion="x" * 9999, rank=rank) for rank in ("", "best", "worst", "", "")]
    for height, ranks in [(24, 1), (50, 3), (70, 5)]:
        assert sum(line.startswith(" step 3") for line in frame(state, 120, height)) == ranks


TASK, QUESTION, ANSWER = "You answer questions about stories.", "Who met the badger?", "It was the fox."
PROMPT = f"{TASK}\n" + "A fox met a badger. " * 200 + f"\n\n{QUESTION}"
REPLY = "Let me think. " * 200 + ANSWER
ALARMS = ("nothing was learned in 5 steps: " + "why " * 60 + "rlpost runs rollouts", "few held-out prompts " * 5)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (160, 50), (200, 60)])
@pytest.mark.parametrize("alarms", [(), ALARMS[:1], ALARMS])
def test_a_long_prompt_and_completion_have_their_ends_and_several_lines(
    state: State, width: int, height: int, alarms: tuple[str, ...]
) -> None:
    state.samples = [replace(SAMPLE, prompt=PROMPT, completion=REPLY)]
    state.notes.extend(alarms)
    lines = frame(state, width, height)
    at = lines.index(next(line for line in lines if line.startswith(" step 3")))
    prompt, reply = ([line for line in lines[at:] if line.startswith(edge)] for edge in ("   ", " │ "))
    assert (prompt[0], prompt[-1]) == (f"   {TASK}", f"   {QUESTION}")
    assert reply[-1].endswith(ANSWER)
    assert len(prompt) >= 3
    assert len(reply) >= 4
    for alarm in alarms[-1:]:
        assert lines[-2].split()[-1] == alarm.split()[-1]


def test_one_prompt_of_several_completions_is_shown_once(state: State) -> None:
    state.samples = [SAMPLE, replace(SAMPLE, rank="best"), replace(SAMPLE, rank="worst", prompt="What is 1 + 1?")]
    lines = frame(state, 80, 40)
    assert [line for line in lines if line.startswith("   What is")] == ["   What is 34 + 57?", "   What is 1 + 1?"]


@pytest.mark.parametrize("alarms", [(), ALARMS])
def test_no_row_is_free_while_a_text_is_cut(state: State, alarms: tuple[str, ...]) -> None:
    state.samples = [replace(SAMPLE, prompt=PROMPT.replace("\n\n", "\n"), completion=REPLY)]
    state.notes.extend(alarms)
    for height in (12, 20, 24, 30, 39, 40, 63):
        lines = frame(state, 80, height)
        is_free = [not line for line in lines]
        assert "…" in "".join(lines)
        assert (True, True) not in pairwise(is_free)  # an empty line only between two parts
        assert height >= 40 or not any(is_free)


def test_a_note_that_fills_the_picture_keeps_its_end(state: State) -> None:
    state.notes.append(ALARMS[0].replace("why " * 60, "why " * 200))
    lines = frame(state, 80, 24)
    assert sum(line.startswith(f" {ALARMS[0][:20]}") for line in lines) == 1
    assert lines[-2].endswith(ALARMS[0][-20:])


def test_the_first_and_the_latest_evaluation_are_shown(state: State) -> None:
    state.end_step(4, {**FIGURES, **EVALUATION, "eval/accuracy_lenient": 0.04})
    lines = [line for line in frame(state, 80, 24) if line.startswith(" held-out ")]
    assert [line.rpartition(":")[0] for line in lines] == [
        " held-out before training, 50 prompts",
        " held-out after step 4, 50 prompts",
    ]
    assert ["3.1%" in lines[0], "4.0%" in lines[1]] == [True, True]


def test_a_reward_that_failed_is_no_number(state: State) -> None:
    state.samples = [replace(SAMPLE, reward=None, reward_parts={})]
    assert any("reward failed" in line for line in frame(state, 80, 24))
