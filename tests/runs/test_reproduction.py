"""Two runs beside each other: what they ran on, and their figures."""

from __future__ import annotations

from math import inf

from rlpost.runs.reproduction import compare_steps, what_differs
from tests.says import Says

RECORD = {
    "rlpost": "0.1.0",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "vllm": None},
    "cpu": "Some CPU: avx avx2",
    "threads": 2,
    "code": {"rlpost": "aa", "./score.py": "bb"},
    "data": {"train": "8 rows, content 12"},
    "numbers": {"model.autocast": "none", "policy.dtype": "float32", "why": "measured here: 1"},
}


def test_what_two_runs_ran_on_is_compared_by_name(says: Says) -> None:
    config = {"steps": 3, "model": {"path": "builtin:tiny"}, "optim": {"lr": 1e-5}}
    measured_again = {**RECORD["numbers"], "why": "measured here: 2"}  # type: ignore[dict-item]
    assert what_differs(RECORD, {**RECORD, "numbers": measured_again}, config, config) == []
    now = {
        **RECORD,
        "packages": {"torch": "2.14.0"},
        "cpu": "Some CPU: avx avx512f",
        "code": {"rlpost": "aa", "./score.py": "cc"},
        "data": {"train": "8 rows, content 34"},
        "numbers": {**measured_again, "model.autocast": "bfloat16"},
    }
    found = what_differs(RECORD, now, config, {**config, "optim": {"lr": 2e-5}, "new": 1})
    says("runs", "\n".join(map(str, found)))
    assert {each.kind for each in found} == {"version", "code", "data", "machine", "precision", "setting"}


def test_what_an_older_run_did_not_record_is_not_compared() -> None:
    assert what_differs({"packages": {"torch": "2.13.0"}}, RECORD, {}, {"steps": 3}) == []


def test_figures_but_time_and_memory_are_compared_bit_for_bit() -> None:
    was = [
        {"step": 0, "eval/reward": 0.5},
        {"step": 1, "loss/policy": 0.1, "ess": None, "time/step": 1.0, "memory/peak_gb": 2.0},
        {"step": 2, "loss/policy": 0.2, "ess": 1.0, "eval/reward": 0.7},
        {"step": 3, "loss/policy": 0.3, "ess": 1.0},
    ]
    same = [dict(row) | {"time/step": 9.0} for row in was]
    equal = compare_steps(was, same, 3)
    assert (equal.steps, equal.first_step, equal.apart) == (3, None, [])
    cut = [row if row["step"] < 2 else {"step": 2, "loss/policy": 0.2, "ess": 1.0} for row in same]
    assert compare_steps(was, cut, 2).first_step is None  # it ended there, and did not evaluate
    other = [dict(row) for row in was]
    other[2]["loss/policy"] = 0.2 + 2**-57
    assert compare_steps(was, other, 3).first_step is None  # the same number
    other[2] |= {"loss/policy": 0.25, "ess": None}
    other[3] |= {"loss/policy": 0.29}
    apart = compare_steps(was, other, 3)
    assert (apart.first_step, [each.name for each in apart.first_figures]) == (2, ["loss/policy", "ess"])
    assert {each.name: (each.step, round(each.size, 9)) for each in apart.apart} == {
        "ess": (2, inf),
        "loss/policy": (2, 0.05),
    }
    assert compare_steps(was, other, 1).first_step is None
