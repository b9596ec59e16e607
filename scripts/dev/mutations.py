"""How many faults the tests catch: small faults put into the code by lot, each tried on the tests that run its line.

    python scripts/dev/mutations.py draw FOLDER [--seed 1] [--count 30]
    python scripts/dev/mutations.py trace FOLDER [-- ARGUMENTS OF PYTEST]
    python scripts/dev/mutations.py try FOLDER [--jobs 2] [-- ARGUMENTS OF PYTEST]

`draw` writes FOLDER/faults.json. `trace` runs the suite once in a copy in which each line that is to be changed writes
down the test that it runs in, also in the processes that a test starts. `try` puts one fault after another into a copy
and runs the test files that have run its line, the quickest first, until a test fails; it prints the share that was
caught. A fault is found again by its text, so `trace` and `try` also work after the tests have changed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = {
    "objectives": ["rlpost/objectives/*.py"],
    "masks": [
        "rlpost/data/rendering.py",
        "rlpost/data/encoding.py",
        "rlpost/data/ragged.py",
        "rlpost/model/packing.py",
    ],
    "resume": ["rlpost/runs/checkpoint.py", "rlpost/train/replay.py", "rlpost/train/run.py", "rlpost/data/order.py"],
    "collectors": ["rlpost/collectors/*.py", "rlpost/data/replay_buffer.py"],
    "rewards": ["rlpost/rewards/*.py"],
    "rows": ["rlpost/data/rows.py", "rlpost/data/datasets.py", "rlpost/data/formats.py", "rlpost/envs/dataset.py"],
    "export": ["rlpost/export/*.py", "rlpost/model/conversion.py"],
}
OPERATORS = ("sign", "off by one", "dropped term", "swapped arguments", "skipped call")
SUITE = ["-q", "-p", "no:cacheprovider", "-o", "addopts=-m 'not slow and not gpu and not parity'"]
SECONDS = 3000.0  # for the tests of one fault: one that hangs is caught
TRACE = "RLPOST_TRACE_MUTATIONS"
MARK = (  # a line that writes down the test file in which it runs, also in the processes that a test starts
    f"(e := __import__('os').environ).get('{TRACE}') and __import__('pathlib').Path(e['{TRACE}'], '{{number}} ' + "
    "e.get('PYTEST_CURRENT_TEST', '').partition('::')[0].replace('/', '+')).touch()"
)


@dataclass(frozen=True)
class Fault:
    """One changed expression or statement: its file, the text before and after, which of several equal ones."""

    place: str
    operator: str
    file: str
    function: str
    line: int  # where it stood when it was drawn
    statement: str  # the text of the whole statement
    before: str
    after: str
    nth: int  # of the equal texts in the statement


# Drawing


def candidates(place: str, path: Path) -> Iterator[Fault]:
    """Every fault that the operators can put into the functions of a file."""
    source = path.read_text()
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        statement, function = _statement_of(node, parents), _function_of(node, parents)
        if statement is None or function is None:
            continue
        for operator, after in _changes(node, source):
            before, whole = _text(source, node), _text(source, statement)
            nth = _text(source, statement)[: _offset(source, node) - _offset(source, statement)].count(before)
            file = str(path.relative_to(ROOT))
            line = source.count("\n", 0, _offset(source, node)) + 1
            yield Fault(place, operator, file, function, line, whole, before, after, nth)


def _changes(node: ast.AST, source: str) -> Iterator[tuple[str, str]]:
    """The changed texts of a node, by operator."""
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right) if not _is_text(left) and not _is_text(right):
            sign = "-" if isinstance(op, ast.Add) else "+"
            yield "sign", f"({_text(source, left)} {sign} ({_text(source, right)}))"
            yield "dropped term", _text(source, left)
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield "sign", _text(source, operand)
        case ast.BinOp(left, ast.Mult() | ast.Div(), _):
            yield "dropped term", _text(source, left)
        case ast.BoolOp(_, [first, *rest]):
            yield "dropped term", _text(source, rest[-1])
            yield "dropped term", _text(source, first)
        case ast.Compare(left, [ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE() as op], [right]):
            other = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}[type(op)]
            yield "off by one", f"{_text(source, left)} {other} {_text(source, right)}"
        case ast.Constant(int() as value) if not isinstance(value, bool):
            yield "off by one", str(value + 1)
        case ast.Call(function, [first, second, *rest], keywords) if not any(
            isinstance(each, ast.Starred) for each in node.args
        ):
            swapped = [second, first, *rest]
            named = [f"{each.arg}=" if each.arg else "**" for each in keywords]
            texts = [_text(source, each) for each in swapped]
            texts += [name + _text(source, each.value) for name, each in zip(named, keywords, strict=True)]
            yield "swapped arguments", f"{_text(source, function)}({', '.join(texts)})"
        case ast.Expr(ast.Call()):
            yield "skipped call", "pass"
        case _:
            return


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _statement_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.stmt | None:
    """The statement that runs a node, if a line can stand before it; None for texts, annotations and defaults."""
    while not isinstance(node, ast.stmt):
        if isinstance(node, ast.arguments | ast.JoinedStr | ast.FormattedValue | ast.match_case | ast.ExceptHandler):
            return None
        parent = parents.get(node)
        if parent is None or (isinstance(parent, ast.AnnAssign | ast.arg) and node is parent.annotation):
            return None
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return None if node not in parent.body else parent
        node = parent
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Raise | ast.Assert):
        return None
    parent = parents[node]
    is_elif = isinstance(node, ast.If) and isinstance(parent, ast.If) and node in parent.orelse
    return None if is_elif else node


def _function_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str | None:
    while (parent := parents.get(node)) is not None:
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            return parent.name
        node = parent
    return None


def _offset(source: str, node: ast.AST) -> int:
    lines = source.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1]))  # type: ignore[attr-defined]
    return start + len(lines[node.lineno - 1].encode()[: node.col_offset].decode())  # type: ignore[attr-defined]


def _text(source: str, node: ast.AST) -> str:
    found = ast.get_source_segment(source, node)
    assert found is not None
    return found


def draw(seed: int, count: int) -> list[Fault]:
    """`count` faults: places and operators in turn, then a file and a candidate by lot; no statement twice."""
    lot = random.Random(seed)
    drawn: list[Fault] = []
    places = list(PLACES)
    while len(drawn) < count:
        place, operator = places[len(drawn) % len(places)], OPERATORS[len(drawn) % len(OPERATORS)]
        files = sorted(path for pattern in PLACES[place] for path in ROOT.glob(pattern))
        found = [fault for file in files for fault in candidates(place, file) if fault.operator == operator]
        found = [fault for fault in found if all(fault.statement != other.statement for other in drawn)]
        drawn.append(lot.choice(found))
    return drawn


# Putting faults into a copy


def changed(source: str, fault: Fault, new: str | None = None) -> str:
    """The source with the fault, or with `new` put before its statement. Raises ValueError if it is not there."""
    begin = _find(source, fault)
    if new is not None:
        start = source.rindex("\n", 0, begin) + 1
        if source[start:begin].strip():
            raise ValueError(f"{fault.file}: no line can stand before {fault.statement[:60]!r}")
        return source[:begin] + new + "\n" + source[start:begin] + source[begin:]
    place = begin
    for _ in range(fault.nth + 1):
        place = source.index(fault.before, place if place == begin else place + 1)
    return source[:place] + fault.after + source[place + len(fault.before) :]


def _find(source: str, fault: Fault) -> int:
    """Where the fault's statement begins; of equal ones, the one next to its line."""
    places = [_offset(source, node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    places = [place for place in places if source.startswith(fault.statement, place)]
    if not places:
        raise ValueError(f"{fault.file} has no statement {fault.statement[:60]!r} any more: draw again")
    return min(places, key=lambda place: abs(source.count("\n", 0, place) + 1 - fault.line))


def copied(to: Path) -> Path:
    """A copy of the checkout's files, with its environment."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


def pytest(folder: Path, arguments: Sequence[str], log: Path, seconds: float | None, **more: str) -> int:
    """Run pytest in a copy; its exit status, 124 where it took too long."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **more}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *SUITE, *arguments],
            cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return 124


def trace(folder: Path, faults: Sequence[Fault], arguments: Sequence[str]) -> None:
    """Run the suite once, and write FOLDER/traced.json: the test files that run the line of each fault."""
    copy = copied(folder / "traced")
    for number, fault in enumerate(faults):
        path = copy / fault.file
        path.write_text(changed(path.read_text(), fault, MARK.format(number=number)))
    marks = folder / "marks"
    shutil.rmtree(marks, ignore_errors=True)
    marks.mkdir()
    began = time.monotonic()
    status = pytest(
        copy, ["--durations=0", "--durations-min=0", *(arguments or ["-n", "2", "--dist", "loadfile"])],
        folder / "trace.log", None, **{TRACE: str(marks)},
    )  # fmt: skip
    ran_by: dict[int, list[str]] = {number: [] for number in range(len(faults))}
    for mark in sorted(marks.iterdir()):
        number, _, test = mark.name.partition(" ")
        ran_by[int(number)].append(test.replace("+", "/"))
    seconds = _seconds_of_files((folder / "trace.log").read_text())
    for tests in ran_by.values():
        tests.sort(key=lambda test: seconds.get(test, 0.0))
    (folder / "traced.json").write_text(json.dumps({"ran_by": ran_by, "seconds": seconds}, indent=1))
    print(f"pytest ended with {status} after {time.monotonic() - began:.0f} s")
    for number, fault in enumerate(faults):
        print(f"{number:2} {fault.file}:{fault.line} {fault.operator}: {len(ran_by[number])} test files")


def _seconds_of_files(log: str) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for line in log.splitlines():
        words = line.split()
        if len(words) >= 3 and words[0].endswith("s") and words[1] in ("call", "setup", "teardown"):
            file = words[2].partition("::")[0]
            seconds[file] = seconds.get(file, 0.0) + float(words[0][:-1])
    return seconds


def try_all(folder: Path, faults: Sequence[Fault], jobs: int, arguments: Sequence[str]) -> None:
    """Try each fault; writes FOLDER/tried.json and prints the share that was caught."""
    ran_by = json.loads((folder / "traced.json").read_text())["ran_by"]
    copies = [copied(folder / f"copy{job}") for job in range(jobs)]

    def one(number: int) -> str | None:
        copy, fault = copies.pop(), faults[number]
        path = copy / fault.file
        good = path.read_text()
        path.write_text(changed(good, fault))
        try:
            log = folder / f"try{number}.log"
            tests = [test for test in ran_by[str(number)] if test and (copy / test).exists()]
            if not tests or pytest(copy, ["-x", *tests, *arguments], log, SECONDS) in (0, 5):
                return None
            failed = re.search(r"^(?:FAILED|ERROR) (tests/[^:\n]+)", log.read_text(), re.MULTILINE)
            return failed[1] if failed else "the run did not end well"
        finally:
            path.write_text(good)
            copies.append(copy)

    with ThreadPoolExecutor(jobs) as pool:
        caught: list[str | None] = []
        for number, test in enumerate(pool.map(one, range(len(faults)))):
            caught.append(test)
            fault = faults[number]
            print(f"{number:2} {fault.file}:{fault.line} {fault.operator}: {test or 'NOT CAUGHT'}", flush=True)
            print(f"   {fault.before!r} -> {fault.after!r}", flush=True)
    (folder / "tried.json").write_text(json.dumps(caught, indent=1))
    print(f"{sum(test is not None for test in caught)} of {len(caught)} caught")


def main() -> None:
    """Draw, trace or try."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("draw", "trace", "try"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at once")
    given = sys.argv[1:]
    own, more = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    asked = parser.parse_args(own)
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "faults.json"
    if asked.verb == "draw":
        faults = draw(asked.seed, asked.count)
        kept.write_text(json.dumps([asdict(fault) for fault in faults], indent=1))
        for number, fault in enumerate(faults):
            print(f"{number:2} {fault.file}:{fault.line} {fault.operator}: {fault.before!r} -> {fault.after!r}")
        return
    faults = [Fault(**each) for each in json.loads(kept.read_text())]
    if asked.verb == "trace":
        trace(folder, faults, more)
    else:
        try_all(folder, faults, asked.jobs, more)


if __name__ == "__main__":
    main()
