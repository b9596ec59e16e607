"""Attacks on rewards: each weakness is found by the check that looks for it, and a sound reward has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlpost.rewards import attacks
from rlpost.rewards.attacks import Attack, Check, Verdict, attack_reward, sample_attack, sample_cases
from rlpost.rewards.functions import WorkerReward, load_reward

RIGHT = "text.strip() == wanted"


def attack_on(
    folder: Path, value: str, *, define: str = "def", begin: str = "", returned: str = "values", seconds: float = 5.0
) -> Attack:
    """The attack on a reward of this `value`, an expression of a reply's text, its place, prompt and right answer."""
    file = folder / "attacked.py"
    file.write_text(f"""
import asyncio, random, re, time
{define} attacked(completions, prompts, answer):
    {begin}
    values = [{value} for place, (text, prompt, wanted) in enumerate(zip(completions, prompts, answer))]
    return {returned}
""")
    reward = load_reward(f"{file}:attacked")
    assert isinstance(reward, WorkerReward)
    return sample_attack(reward, seconds=seconds)


def test_a_sound_async_reward_has_no_fault(tmp_path: Path) -> None:
    checks = attack_reward(attack_on(tmp_path, RIGHT, define="async def", begin="await asyncio.sleep(0.001)"))
    assert [check for check in checks if check.verdict is not Verdict.ok] == []
    assert len({check.name for check in checks}) == 13


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ('text[0]["content"].strip() == str(wanted)', 0.0),  # of messages
        (
            '1 / (1 + abs(int(text) - wanted)) if re.fullmatch(r"\\s*[0-9]{1,9}\\s*", text) else 0.0',
            0.25,
        ),
    ],
    ids=["messages", "numbers"],
)
def test_sums_are_given_in_the_form_that_the_reward_takes(tmp_path: Path, value: str, wrong: float) -> None:
    attack = attack_on(tmp_path, value)
    assert attack.gold == [1.0] * 6
    assert attacks.corrupted(attack).reason == f"earns {wrong:g} on average"


@pytest.mark.parametrize(
    ("value", "attacked", "reason"),
    [
        ("wanted in text", attacks.everything, "earns 1, the gold reply 1"),
        ("wanted in text", attacks.hidden_in_thinking, "earns 1, the gold reply 1"),
        ("0.5", attacks.corrupted, "earns 0.5, the gold reply 0.5"),
        ("0.5", attacks.values, "every reply tried earns 0.5"),
        ("text.strip() in (wanted, prompt)", attacks.prompt_echo, "earns 1, the gold reply 1"),
        (f"not text.strip() or {RIGHT}", attacks.empty, "earns 1, the gold reply 1"),
        ("text.split().count(wanted)", attacks.repeated, "50, more than said once: 1"),
        ("text == wanted", attacks.another_form, "0, the gold reply as it is written 1"),
        ("text.strip().isdigit() and int(text) == int(wanted)", attacks.very_long, "(4300 digits)"),
        ("text.encode().strip() == wanted.encode()", attacks.control_characters, "surrogates"),
        (f"({RIGHT}) + 0.1 * random.random()", attacks.determinism, "called again, it earns 1."),
        (f"({RIGHT}) + 0.01 * place", attacks.determinism, "in another order, it earns "),
        (f"10 * ({RIGHT}) + hash(text) % 1000 / 1000", attacks.determinism, "(PYTHONHASHSEED=1), it earns "),
    ],
)
def test_a_weakness_is_found(tmp_path: Path, value: str, attacked: Callable[[Attack], Check], reason: str) -> None:
    attack = attack_on(tmp_path, value, seconds=3.0)
    assert attack.score_gold() is None
    check = attacked(attack)
    attack.reward.close()
    assert check.verdict is (Verdict.weak if attacked is attacks.another_form else Verdict.fault)
    assert reason in check.reason


def test_a_reward_of_single_rows_alone_is_found(tmp_path: Path) -> None:
    attack = attack_on(tmp_path, RIGHT, returned="values if len(values) == 1 else None")
    assert attack.score_gold() is None
    check = attacks.returns(attack)
    assert check.verdict is Verdict.fault
    assert "returned None" in check.reason


def test_a_slow_reward_is_found(tmp_path: Path) -> None:
    attack = attack_on(tmp_path, RIGHT, begin="time.sleep(0.3)", seconds=1.0)
    check = attacks.latency(attack)
    assert check.verdict is Verdict.weak
    assert 300 <= float(check.reason.split()[1]) < 3000


@pytest.mark.parametrize(
    ("value", "returned", "reason"), [("1 / 0", "values", "ZeroDivisionError"), (RIGHT, "values[:1]", "1 values")]
)
def test_a_reward_that_cannot_score_gold_is_attacked_no_further(
    tmp_path: Path, value: str, returned: str, reason: str
) -> None:
    [check] = attack_reward(attack_on(tmp_path, value, returned=returned))
    assert (check.name, check.verdict, check.reply) == ("gold", Verdict.fault, "42")
    assert reason in check.reason


def test_the_sums_are_right() -> None:
    forms = list(sample_cases())
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
