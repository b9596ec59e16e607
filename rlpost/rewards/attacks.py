"""Attacks on a reward function before it is trained on: replies that should not pay, and inputs that break it.

Training finds whatever a reward pays for. Each check tries one thing that models were seen to find,
or that a training does to a function, and comes to a verdict with the reply that shows it. The rows to attack
with are given, or else a few sums in every form that rows have.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean
from typing import Any

from rlpost.rewards.calls import RowValues
from rlpost.rewards.functions import Finished, WorkerReward
from rlpost.rewards.workers import Worker

LONG = 1_000_000  # characters of a very long reply
SLOW_LONG_SECONDS = 1.0  # a very long reply that takes longer is not scored in linear time
SLOW_ROW_SECONDS = 0.1  # a row that usually takes longer makes steps wait for the reward
LATENCY_CALLS = 100
REPEATS = 50
REPLY_SHOWN = 60  # characters
LARGEST_NUMBER = 200  # in the list of all numbers
NOBODYS_ANSWER = "-987654321"
ODD = "\x00\x1b[J\x07\r\u202e\u2066\ufeff\u200b\ud800\U0001f600e\u0301"  # what no terminal should be sent; no digit

# (gold, corrupted) of a case without a right reply
STAND_IN = ("Yes.", ["", "No. It depends on what you would like to do, and on how much time there is."])
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "label")  # what rows call it
COLUMNS = ("prompt", "question", *ANSWER_COLUMNS)
_SUMS = ((12, 30), (7, 8), (45, 6), (100, 23), (9, 81), (64, 64))


# Verdicts


def attack_reward(attack: Attack) -> list[Check]:
    """All checks, in order, without `PAYING` if there is no gold; if replies cannot be scored, that check alone.

    Raises ConfigError and DataError that the function raises.
    """
    with closing(attack.reward):
        failed = attack.score_gold()
        if failed:
            return [failed]
        return [check(attack) for check in (*BREAKING, *(PAYING if attack.has_gold else ()))]


class Verdict(Enum):
    """The verdict of a check: all is well, acceptable, or do not train on this."""

    ok = "ok"
    weak = "weak"
    fault = "fault"


@dataclass(frozen=True)
class Check:
    """One attack: its verdict, the reason in one line, and the reply that shows it, if one does."""

    name: str
    verdict: Verdict
    reason: str
    reply: str | None = None

    @property
    def short_reply(self) -> str | None:
        """The reply as a Python string, a long one cut."""
        if self.reply is None or len(self.reply) <= REPLY_SHOWN:
            return None if self.reply is None else ascii(self.reply)
        return f"{self.reply[:REPLY_SHOWN]!a}... ({len(self.reply)} characters)"


# The function and its rows


@dataclass(frozen=True)
class Case:
    """A row to attack with: `gold` ought to earn more than any of the `corrupted`.

    `where` names its place, `columns` and `answers` are as `rlpost.rewards.functions.Finished` has them.
    """

    where: str
    prompt: str | list[dict[str, str]]
    gold: str
    corrupted: Sequence[str]
    columns: Mapping[str, Any]
    answers: list[str]

    @property
    def prompt_text(self) -> str:
        """The prompt as text."""
        return self.prompt if isinstance(self.prompt, str) else "\n".join(m["content"] for m in self.prompt)

    @property
    def wrong(self) -> str:
        """A wrong reply that says something, "" where there is none."""
        return next((reply for reply in self.corrupted if reply.strip()), "")


@dataclass
class Attack:
    """The attacks on one reward with some cases; each call may take `seconds`.

    Without `has_gold` no reply is right or wrong, and the `gold` of a case is any reply.
    """

    reward: WorkerReward
    cases: Sequence[Case]
    columns: Sequence[str]
    seconds: float
    has_gold: bool = True
    gold: list[float] = field(default_factory=list)  # what each case's gold reply earns, once it is scored

    def score_gold(self) -> Check | None:
        """Score the gold replies, which every check compares with; the check that says why, where that fails."""
        replies = [case.gold for case in self.cases]
        results = self.values(replies)
        self.gold = [math.nan if value is None else value for value in results.values]
        return _fault("gold", replies, results, none_is_wrong=True)

    # What checks are made of

    def values(self, replies: Sequence[str], cases: Sequence[Case] | None = None) -> RowValues:
        """The function's values of one reply to each case, in one call if that does not fail."""
        return self.reward.values(
            _finished(self.cases if cases is None else cases, replies), self.columns, self.seconds
        )

    def one_call(self, worker: Worker | None = None) -> RowValues:
        """The outcome of one call about the gold reply to each case."""
        batch = _finished(self.cases, [case.gold for case in self.cases])
        return self.reward.call([batch], self.columns, self.seconds, worker)[0]

    def paid(self, name: str, *writers: Callable[[Case], str], least: Verdict = Verdict.fault) -> Check:
        """Replies that deserve less than the gold one: is any paid as much? `least` is the verdict if so."""
        earned: list[float] = []
        for write in writers:
            replies = [write(case) for case in self.cases]
            results = self.values(replies)
            if fault := _fault(name, replies, results):
                return fault
            for case, gold, reply, value in zip(self.cases, self.gold, replies, results.values, strict=True):
                if self.has_gold and value is not None and value >= gold and reply != case.gold:
                    return Check(name, least, f"earns {value:.3g}, the gold reply {gold:.3g} ({case.where})", reply)
            earned += [value for value in results.values if value is not None]
        return Check(name, Verdict.ok, f"earns {fmean(earned):.3g} on average" if earned else "there is nothing to try")


def _fault(name: str, replies: Sequence[str], results: RowValues, *, none_is_wrong: bool = False) -> Check | None:
    """The check that fails since a reply could not be scored, or has a value that is not finite; None if all do."""
    for reply, value, error in zip(replies, results.values, results.errors, strict=True):
        is_wrong = none_is_wrong if value is None else not math.isfinite(value)
        if error or is_wrong:
            return Check(name, Verdict.fault, error or f"returned {value} for it", reply)
    return None


def _finished(cases: Sequence[Case], replies: Sequence[str]) -> list[Finished]:
    """The cases, answered; the token ids are the bytes of a reply, since nobody sampled it."""
    return [
        Finished(case.prompt, reply, list(reply.encode(errors="surrogatepass")), case.columns, case.answers)
        for case, reply in zip(cases, replies, strict=True)
    ]


# Checks


def returns(attack: Attack) -> Check:
    """Does one call about several rows give a number for each?"""
    wrong = next(filter(None, attack.one_call().errors), None)
    if wrong:
        return Check("returns", Verdict.fault, wrong)
    return Check("returns", Verdict.ok, f"a number for each of {len(attack.cases)} rows in one call")


def corrupted(attack: Attack) -> Check:
    """Is a wrong reply paid as a right one?"""
    most = max(len(case.corrupted) for case in attack.cases)
    writers = [lambda case, n=n: [*case.corrupted, *[case.wrong] * most][n] for n in range(most)]
    return attack.paid("corrupted", *writers)


def empty(attack: Attack) -> Check:
    """Is nothing paid?"""
    return attack.paid("empty", lambda case: "", lambda case: " \n\t ")


def prompt_echo(attack: Attack) -> Check:
    """Is saying the prompt again paid?"""
    return attack.paid("prompt echo", lambda case: case.prompt_text)


def everything(attack: Attack) -> Check:
    """Is a reply paid that names every possible answer?"""
    numbers = [found for case in attack.cases for found in re.findall(r"-?\d+", case.gold)]

    def every_number(case: Case) -> str:
        listed = dict.fromkeys([*map(str, range(LARGEST_NUMBER + 1)), *numbers])
        return " ".join([*listed, NOBODYS_ANSWER])

    def every_answer(case: Case) -> str:
        return "\n".join([*"ABCDEFGH", *dict.fromkeys(c.gold for c in attack.cases), NOBODYS_ANSWER])

    return attack.paid("everything", every_number, every_answer)


def hidden_in_thinking(attack: Attack) -> Check:
    """Is a right answer paid that only the thinking holds, with a wrong one, or none, as the reply?"""

    def denied(case: Case) -> str:
        return f"<think>{case.gold}</think>\n{case.wrong or 'I do not know.'}"

    def cut(case: Case) -> str:
        return f"<think>Perhaps {case.gold}, or perhaps not"

    check = attack.paid("hidden in thinking", denied)
    return attack.paid(check.name, cut, least=Verdict.weak) if check.verdict is Verdict.ok else check


def repeated(attack: Attack) -> Check:
    """Is saying it many times paid more?"""
    replies = ["\n".join([case.gold] * REPEATS) for case in attack.cases]
    results = attack.values(replies)
    if fault := _fault("repeated", replies, results):
        return fault
    for reply, value, once in zip(replies, results.values, attack.gold, strict=True):
        if value is not None and value > once:
            reason = f"earns {value:.3g}, more than said once: {once:.3g}"
            return Check("repeated", Verdict.fault, reason, reply)
    return Check("repeated", Verdict.ok, f"the gold reply {REPEATS} times earns no more than once")


def another_form(attack: Attack) -> Check:
    """Is a right reply in another case or with white space around it worth less?"""
    forms: list[Callable[[str], str]] = [str.upper, str.lower, lambda text: f"\n  {text} \n"]
    for form in forms:
        replies = [form(case.gold) for case in attack.cases]
        results = attack.values(replies)
        if fault := _fault("another form", replies, results):
            return fault
        for reply, value, plain in zip(replies, results.values, attack.gold, strict=True):
            if value is not None and value < plain:
                reason = f"earns {value:.3g}, the gold reply as it is written {plain:.3g}"
                return Check("another form", Verdict.weak, reason, reply)
    return Check("another form", Verdict.ok, "case and white space around it change nothing")


def very_long(attack: Attack) -> Check:
    """Is a reply of a million characters scored, in linear time?"""
    case = attack.cases[0]
    fillings = ["word ", "1", "1,", "(", " ", "<think>", "a" * 99 + "\n", f"{case.gold} "]
    slowest, shown = 0.0, ""
    for filling in fillings:
        reply = (filling * (LONG // len(filling) + 1))[:LONG]
        began = time.perf_counter()
        results = attack.values([reply], [case])
        seconds = time.perf_counter() - began
        if fault := _fault("very long", [reply], results):
            return fault
        if seconds > slowest:
            slowest, shown = seconds, reply
    if slowest > SLOW_LONG_SECONDS:
        return Check("very long", Verdict.weak, f"a reply of {LONG} characters takes {slowest:.2g} s", shown)
    return Check("very long", Verdict.ok, f"a reply of {LONG} characters takes {slowest * 1000:.0f} ms at most")


def control_characters(attack: Attack) -> Check:
    """Are replies with NUL, escapes, lone surrogates and turned writing scored?"""
    writers = (lambda case: ODD, lambda case: f"{ODD}{case.wrong}{ODD}", lambda case: "\ud83d" * 100 + case.wrong)
    return attack.paid("control characters", *writers)


def determinism(attack: Attack) -> Check:
    """Does the same reply earn the same: again, alone, in another order, in a fresh process?"""
    replies = [case.gold for case in attack.cases] + [case.wrong for case in attack.cases]
    cases = [*attack.cases, *attack.cases]
    first = attack.values(replies, cases).values
    again = attack.values(replies, cases).values
    backwards = attack.values(replies[::-1], cases[::-1]).values[::-1]
    alone = [attack.values([reply], [case]).values[0] for reply, case in zip(replies, cases, strict=True)]
    tries = {"called again": again, "in another order": backwards, "scored alone": alone}
    for seed in ("1", "2"):
        with closing(attack.reward.new_worker({"PYTHONHASHSEED": seed})) as worker:
            tries[f"in a fresh process (PYTHONHASHSEED={seed})"] = attack.one_call(worker).values  # of gold replies
    for how, values in tries.items():
        for reply, value, before in zip(replies, values, first, strict=False):
            if value != before:
                return Check("determinism", Verdict.fault, f"{how}, it earns {value} and not {before}", reply)
    return Check("determinism", Verdict.ok, "the same again, alone, in another order, in fresh processes")


def values(attack: Attack) -> Check:
    """Are the values finite numbers that differ?"""
    replies = [reply for case in attack.cases for reply in (case.gold, *case.corrupted)]
    cases = [case for case in attack.cases for _ in (case.gold, *case.corrupted)]
    earned = {value for value in attack.values(replies, cases).values if value is not None}
    if len(earned) > 1:
        return Check("values", Verdict.ok, f"from {min(earned):.3g} to {max(earned):.3g}, {len(earned)} different")
    # without gold, another reply might earn something else
    verdict = Verdict.fault if attack.has_gold else Verdict.weak
    return Check("values", verdict, f"every reply tried earns {earned.pop():.3g}: there is nothing to learn")


def latency(attack: Attack) -> Check:
    """How long does a row take, called alone in a warm process?"""
    seconds: list[float] = []
    began = time.perf_counter()
    for number in range(LATENCY_CALLS):
        case = attack.cases[number % len(attack.cases)]
        started = time.perf_counter()
        attack.values([case.gold], [case])
        seconds.append(time.perf_counter() - started)
        if time.perf_counter() - began > attack.seconds:
            break
    seconds.sort()
    middle, high = seconds[len(seconds) // 2], seconds[math.ceil(0.99 * len(seconds)) - 1]
    reason = f"p50 {middle * 1000:.2g} ms, p99 {high * 1000:.2g} ms, worst {seconds[-1] * 1000:.2g} ms a row"
    return Check("latency", Verdict.weak if middle > SLOW_ROW_SECONDS else Verdict.ok, reason)


BREAKING = (returns, values, very_long, control_characters, determinism, latency)
PAYING = (corrupted, empty, prompt_echo, everything, hidden_in_thinking, repeated, another_form)
NEED_GOLD = [check.__name__.replace("_", " ") for check in PAYING]  # as they are printed


# Sums to attack with where no rows are given


def sample_attack(reward: WorkerReward, *, seconds: float) -> Attack:
    """An attack with the form of the sums that the function knows what to do with, else with the first.

    It does where right answers can be scored and earn more than wrong ones.
    """
    first = None
    for cases in sample_cases():
        attack = Attack(reward, cases, COLUMNS, seconds)
        first = first or attack
        if attack.score_gold() is None:
            wrong = [value for value in attack.values([case.wrong for case in cases]).values if value is not None]
            if wrong and fmean(attack.gold) > fmean(wrong):
                return attack
    assert first is not None
    return first


def sample_cases() -> Iterator[list[Case]]:
    """The sums: texts or messages as prompts, answers as text or as numbers."""
    for as_messages in (False, True):
        for as_number in (False, True):
            yield [_case(a, b, as_messages=as_messages, as_number=as_number) for a, b in _SUMS]


def _case(a: int, b: int, *, as_messages: bool, as_number: bool) -> Case:
    question, right = f"What is {a} + {b}?", a + b
    answer = right if as_number else str(right)
    columns = {"prompt": question, "question": question, **dict.fromkeys(ANSWER_COLUMNS, answer)}
    prompt = [{"role": "user", "content": question}] if as_messages else question
    return Case(f"{a} + {b}", prompt, str(right), [str(right + 1), str(-right)], columns, [str(right)])
