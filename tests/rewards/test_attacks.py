"""Attacks on rewards: each weakness is found by the check that looks for it, and a sound reward has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlpost.rewards import attacks
from rlpost.rewards.attacks import Attack, Case, Check, Verdict, attack_reward, sample_attack, sample_cases
from rlpost.rewards.functions import WorkerReward, load_reward

FILE = """
import asyncio, random, re, time

def exact(completions, answer, **columns):
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer)]

async def awaited(completions, answer, **columns):
    await asyncio.sleep(0.001)
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer)]

def of_messages(completions, answer):
    return [float(said[0]["content"].strip() == str(wanted)) for said, wanted in zip(completions, answer)]

def of_numbers(completions, answer):
    numbers = [re.fullmatch(r"\\s*([0-9]{1,9})\\s*", text) for text in completions]
    return [0.0 if found is None else 1.0 / (1 + abs(int(found[1]) - wanted)) for found, wanted in zip(numbers, answer)]

def within(completions, answer):
    return [float(wanted in text) for text, wanted in zip(completions, answer)]

def flat(completions):
    return [0.5 for _ in completions]

def echoed(completions, prompts, answer):
    return [float(text.strip() in (wanted, prompt)) for text, prompt, wanted in zip(completions, prompts, answer)]

def unless_empty(completions, answer):
    return [1.0 if not text.strip() else float(text.strip() == wanted) for text, wanted in zip(completions, answer)]

def counted(completions, answer):
    return [float(text.split().count(wanted)) for text, wanted in zip(completions, answer)]

def strict(completions, answer):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]

def digits(completions, answer):
    return [float(text.strip().isdigit() and int(text) == int(wanted)) for text, wanted in zip(completions, answer)]

def surrogates(completions, answer):
    return [float(text.encode().strip() == wanted.encode()) for text, wanted in zip(completions, answer)]

def noisy(completions, answer):
    return [(text.strip() == wanted) + 0.1 * random.random() for text, wanted in zip(completions, answer)]

def ranked(completions, answer):
    return [(text.strip() == wanted) + 0.01 * place for place, (text, wanted) in enumerate(zip(completions, answer))]

def hashed(completions, answer):
    return [10 * (text.strip() == wanted) + hash(text) % 1000 / 1000 for text, wanted in zip(completions, answer)]

def single(completions, answer):
    return [float(completions[0].strip() == answer[0])] if len(completions) == 1 else None

def first(completions, answer):
    return [float(completions[0].strip() == answer[0])]

def slow(completions, answer):
    time.sleep(1.1)
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer)]

def fails(completions, answer):
    return [1 / 0]
"""


def attack_on(folder: Path, function: str, seconds: float = 5.0) -> Attack:
    file = folder / "attacked.py"
    file.write_text(FILE)
    reward = load_reward(f"{file}:{function}")
    assert isinstance(reward, WorkerReward)
    return sample_attack(reward, seconds=seconds)


@pytest.mark.parametrize("function", ["exact", "awaited"])
def test_a_sound_reward_has_no_fault(tmp_path: Path, function: str) -> None:
    checks = {check.name: check for check in attack_reward(attack_on(tmp_path, function))}
    assert [check for check in checks.values() if check.verdict is not Verdict.ok] == []
    assert len(checks) == 14
    assert checks["gold"].reason == "earns 1 on average, a wrong reply 0"
    assert checks["values"].reason == "from 0 to 1, 2 different"


@pytest.mark.parametrize(("function", "wrong"), [("of_messages", 0.0), ("of_numbers", 0.5)])
def test_sums_are_given_in_the_form_that_is_wanted(tmp_path: Path, function: str, wrong: float) -> None:
    attack = attack_on(tmp_path, function)
    assert attack.gold == [1.0] * 6
    assert attacks.gold(attack).reason == f"earns 1 on average, a wrong reply {wrong:g}"  # one off: 1 / (1 + 1)


@pytest.mark.parametrize(
    ("function", "attacked", "verdict", "reason"),
    [
        ("within", attacks.everything, Verdict.fault, "earns 1, as much as the gold reply (12 + 30)"),
        ("within", attacks.hidden_in_thinking, Verdict.fault, "earns 1, as much as the gold reply (12 + 30)"),
        ("flat", attacks.gold, Verdict.fault, "earns 0.5 on average, a wrong reply 0.5"),
        ("flat", attacks.values, Verdict.fault, "every reply earns 0.5: there is nothing to learn"),
        ("echoed", attacks.prompt_echo, Verdict.fault, "earns 1, as much as the gold reply (12 + 30)"),
        ("unless_empty", attacks.empty, Verdict.fault, "earns 1, as much as the gold reply (12 + 30)"),
        ("counted", attacks.repeated, Verdict.fault, "earns 50, more than said once: 1"),
        ("strict", attacks.another_form, Verdict.weak, "earns 0, the gold reply as it is written 1"),
        ("digits", attacks.very_long, Verdict.fault, "Exceeds the limit (4300 digits)"),
        ("surrogates", attacks.control_characters, Verdict.fault, "surrogates not allowed"),
        ("noisy", attacks.determinism, Verdict.fault, "called again, it earns 1."),
        ("ranked", attacks.determinism, Verdict.fault, "in another order, it earns "),
        ("hashed", attacks.determinism, Verdict.fault, "in a fresh process (PYTHONHASHSEED=1) it earns "),
        ("single", attacks.returns, Verdict.fault, "returned None: it must return a list of 6 numbers"),
        ("slow", attacks.latency, Verdict.weak, "p50 1."),
    ],
)
def test_a_weakness_is_found(
    tmp_path: Path, function: str, attacked: Callable[[Attack], Check], verdict: Verdict, reason: str
) -> None:
    attack = attack_on(tmp_path, function, 3.0)
    assert attack.score_gold() is None
    check = attacked(attack)
    attack.reward.close()
    assert check.verdict is verdict
    assert reason in check.reason


def test_a_reward_that_cannot_score_gold_is_attacked_no_further(tmp_path: Path) -> None:
    [check] = attack_reward(attack_on(tmp_path, "fails"))
    assert (check.name, check.verdict, check.reply) == ("gold", Verdict.fault, "42")
    assert check.reason.endswith("ZeroDivisionError: division by zero")


def test_a_reward_that_scores_the_first_row_alone_is_attacked_no_further(tmp_path: Path) -> None:
    [check] = attack_reward(attack_on(tmp_path, "first"))
    assert (check.name, check.verdict) == ("gold", Verdict.fault)
    assert check.reason.endswith("returned 1 values: it must return a list of 6 numbers, one a completion")


def test_the_sums_are_right() -> None:
    forms: list[list[Case]] = list(sample_cases())
    assert [(type(cases[0].prompt), type(cases[0].columns["answer"])) for cases in forms] == [
        (str, str),
        (str, int),
        (list, str),
        (list, int),
    ]
    for case in (case for cases in forms for case in cases):
        a, b = case.where.split(" + ")
        assert case.gold == str(int(a) + int(b)) == str(case.columns["answer"])
        assert case.gold not in case.corrupted
        assert case.prompt_text == f"What is {a} + {b}?"
