"""How large the package is, how it hangs together, and how much of it a training passes through.

`scripts/check` prints these figures, and tests/test_figures.py holds them:

    files           of rlpost/, and those of them above 900 lines
    code lines      lines without blank lines, comments and docstrings, of the package and on average of a file
    import share    code lines that are imports, of all code lines, in percent; those inside functions count
    errors          `raise` statements, and calls of functions that do nothing but raise, for 1,000 code lines
    floors          rooms (folders and modules of rlpost/) on the longest way down along imports; a circle is one floor
    circles         sets of rooms that reach each other along imports; imports inside functions and late doors count
    file circles    the same of files
    take the run    functions with a parameter annotated as the run, its folder, or a class that holds one of them
    take settings   functions with a parameter annotated as the settings of a command, as a class that holds them, or
                    called `settings` with no class said
    ask settings    what decides by the class of settings: `isinstance`, `type() is` and `match` on a settings class,
                    and reads of the bool class variables and properties of settings
    hooks           methods that the parts of a training have, as the run calls them: see `Parts` in train/parts.py
    late doors      imports of LATE_DOORS: inside a function, to what a plain training does not load
    test code lines of tests/, helpers included, and tests: its test functions
    tests of words  test functions that assert wording: a text of at least three words stands in an `assert`, or as the
                    `match` of an expected error; wording belongs in tests/snapshots
    patching tests  test functions with a parameter `monkeypatch`
    processes       files that start a process or speak to one: they import a module of PROCESS
    road modules    modules of rlpost that are loaded at the first backward of `rlpost train grpo model=tiny`
    road code lines of those modules
    road functions  of rlpost entered until then, and how many of them from `learn` on in the main thread:
                    what the screen's thread enters depends on how fast the machine is

Takes about 10 s: the same training is started twice, the first time to fill the caches.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

PACKAGE = Path(__file__).parents[1] / "rlpost"
WORDS = [
    "model=tiny",
    "model.autocast=none",
    "policy=transformers",
    "prompts_per_step=2",
    "group_size=2",
    "steps=1",
    "env.max_completion_tokens=6",
    "eval.enabled=false",
]
WORD, BESIDE = re.compile("[A-Za-z]{2,}"), re.compile("[a-z]{2,} [a-z]{2,}")
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """Lines of `source` that are neither blank nor part of a comment or docstring."""
    documented: set[int] = set()
    for node in nodes_of(parsed(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    used = {line for t in tokens if t.type not in LAYOUT for line in range(t.start[0], t.end[0] + 1)}
    return len(used - documented)


# file -> what it imports inside a function alone: beside the road of a training, and opened when it is asked for.
# Lazy public names of a package's __init__.py are no late doors.
LATE_DOORS = {
    "data/history.py": ["rlpost.data.chat_templates"],
    "data/template_choice.py": ["rlpost.data.chat_templates"],
    "model/logprobs.py": ["rlpost.model.family_probe"],
    "train/assemble.py": ["rlpost.train.assemble_players"],
}

PROCESS = {
    "subprocess",
    "multiprocessing",
    "socket",
    "ray",
    "rlpost.remote.child",
}  # who imports one speaks to a process


@functools.cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(source)


@functools.cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """All nodes of the syntax tree of a file."""
    return list(ast.walk(tree))


def sources() -> dict[str, str]:
    """File under rlpost/ -> its text."""
    return {str(file.relative_to(PACKAGE)): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}


def import_lines(source: str) -> int:
    """Code lines of `source` that import, those inside functions included."""
    nodes = [node for node in nodes_of(parsed(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return len({line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)})


def only_raises(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether every call of `function` ends in an error: it ends in `raise` and never returns."""
    inside = list(ast.walk(function))
    gives = any(isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in inside)
    return isinstance(function.body[-1], ast.Raise) and not gives


def errors(files: dict[str, str]) -> int:
    """`raise` statements, and calls of functions at the top of a module that only raise."""
    trees = [parsed(text) for text in files.values()]
    top = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    raising = {function.name for function in top if only_raises(function)}
    nodes = [node for tree in trees for node in nodes_of(tree)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in raising]
    return sum(isinstance(node, ast.Raise) for node in nodes) + len(calls)


def imports(source: str) -> Iterator[str]:
    """Full names of what a source imports, wherever in it; `from a import b` counts as `a.b`, whatever b is."""
    for node in nodes_of(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, package: str) -> bool:
    """Whether a full name is `package` or lies below it."""
    return name == package or name.startswith(package + ".")


def rooms(files: dict[str, str]) -> dict[str, set[str]]:
    """Room -> the rooms that it imports; what an __init__.py imports, lazy public names for the most part, is left out.

    A room is a folder of rlpost/, or a module that lies in rlpost/ itself.
    """
    found = {file.split("/")[0].removesuffix(".py"): set[str]() for file in files if file != "__init__.py"}
    for file, text in files.items():
        room = file.split("/")[0].removesuffix(".py")
        if file.rpartition("/")[2] != "__init__.py":
            parts = [name.split(".") for name in imports(text)]
            found[room] |= {p[1] for p in parts if p[0] == "rlpost" and len(p) > 1 and p[1] in found} - {room}
    return found


def file_imports(files: dict[str, str]) -> dict[str, set[str]]:
    """File -> the files that it imports; what an __init__.py imports is left out, as in `rooms`."""
    found = {f"rlpost.{file.removesuffix('.py').replace('/', '.')}": file for file in files if "__init__" not in file}
    graph: dict[str, set[str]] = {}
    for file in found.values():
        names = [name for each in imports(files[file]) for name in (each, each.rpartition(".")[0])]
        graph[file] = {found[name] for name in names if name in found} - {file}
    return graph


THE_RUN = ("train/run.py", "Run"), ("runs/folder.py", "RunFolder")  # a training, and its folder


def take_the_run(files: dict[str, str]) -> list[str]:
    """The functions with a parameter annotated as one of `THE_RUN`, or as a class that holds one: file and name."""
    trees = {file: parsed(text) for file, text in files.items()}
    names = {name for _, name in THE_RUN}
    known = {file for file, name in THE_RUN} | {
        file for file, text in files.items() if any(each.rpartition(".")[2] in names for each in imports(text))
    }
    while True:
        before = len(names)
        for file in known:
            classes = [node for node in nodes_of(trees[file]) if isinstance(node, ast.ClassDef)]
            names |= {node.name for node in classes if _holds(node, names)}
        if len(names) == before:
            break
    functions = [
        (file, node)
        for file in sorted(known)
        for node in nodes_of(trees[file])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [f"{file} {node.name}" for file, node in functions if _parameters(node, names)]


def take_settings(files: dict[str, str]) -> list[str]:
    """The functions that get the settings of a whole command, by annotated type: file and name.

    Such are the settings classes that hold others, type variables for them, classes with a field of theirs, and a
    parameter called `settings` whose annotation says no class.
    """
    trees = {file: parsed(text) for file, text in files.items()}
    settings = settings_classes(files)
    groups = {node.name for node in settings}
    names: set[str] = set()
    while True:
        before = len(names)
        names |= {n.name for n in settings if _has_field(n, groups) or any(_mentions(b, names) for b in n.bases)}
        variables = {file: _variables_for(names, tree) for file, tree in trees.items()}
        for file, tree in trees.items():
            classes = [node for node in nodes_of(tree) if isinstance(node, ast.ClassDef) and node.name not in groups]
            names |= {node.name for node in classes if _holds(node, names | _imported(variables, tree, file))}
        if len(names) == before:
            break
    return [
        f"{file} {node.name}"
        for file, tree in trees.items()
        for known in [names | _imported(variables, tree, file)]
        for node in nodes_of(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (_parameters(node, known) or _takes_any_settings(node))
    ]


def _variables_for(names: set[str], tree: ast.Module) -> set[str]:
    """The type variables and other names of types in a file that stand for one of `names`."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call | ast.BinOp):
            is_type = isinstance(node.value, ast.BinOp) or ast.unparse(node.value).startswith("TypeVar(")
            found |= {ast.unparse(node.targets[0])} if is_type and _mentions(node.value, names | found) else set()
    return found


def _imported(variables: dict[str, set[str]], tree: ast.Module, file: str) -> set[str]:
    """The `variables` of a file, and those that it imports from another."""
    found = set(variables[file])
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            there = node.module.removeprefix("rlpost.").replace(".", "/") + ".py"
            found |= {alias.name for alias in node.names} & variables.get(there, set())
    return found


def ask_settings(files: dict[str, str]) -> list[str]:
    """The places that decide by the class of settings: file and source of each."""
    settings = settings_classes(files)
    names, flags = {node.name for node in settings}, {flag for node in settings for flag in _flags_of(node)}
    found = []
    for file, text in files.items():
        for node in nodes_of(parsed(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                asks = node.func.id in ("isinstance", "issubclass") and _mentions(node.args[1], names)
            elif isinstance(node, ast.Compare):
                asks = ast.unparse(node.left).startswith("type(") and any(_mentions(c, names) for c in node.comparators)
            elif isinstance(node, ast.MatchClass):
                asks = _mentions(node.cls, names)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                is_own = not file.startswith("settings/") and ast.unparse(node.value) == "self"  # of another class
                asks = node.attr in flags and not is_own
            else:
                asks = False
            if asks:
                found.append(f"{file} {ast.unparse(node)}")
    return found


def settings_classes(files: dict[str, str]) -> list[ast.ClassDef]:
    """The classes of rlpost/settings/ whose names end in Settings."""
    nodes = [node for file, text in files.items() if file.startswith("settings/") for node in nodes_of(parsed(text))]
    return [node for node in nodes if isinstance(node, ast.ClassDef) and node.name.endswith("Settings")]


def _flags_of(node: ast.ClassDef) -> set[str]:
    """The bool class variables and properties of a settings class."""
    found = set()
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and ast.unparse(part.annotation) == "ClassVar[bool]":
            found.add(ast.unparse(part.target))
        elif isinstance(part, ast.FunctionDef) and part.decorator_list and part.returns is not None:
            is_property = ast.unparse(part.decorator_list[0]) == "property"
            found |= {part.name} if is_property and ast.unparse(part.returns) == "bool" else set()
    return found


def _takes_any_settings(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether `function` has a parameter called `settings` whose annotation says no class."""
    given = [each for each in _all_parameters(function) if each.arg == "settings"]
    return any(each.annotation is None or ast.unparse(each.annotation) in ("Any", "object") for each in given)


def _has_field(node: ast.ClassDef, names: set[str]) -> bool:
    """Whether a class has a field annotated with one of `names`, or a field `settings` of any type."""
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    any_settings = {"Any", "S"}  # S: a type variable
    return any(
        _mentions(part.annotation, names)
        or (ast.unparse(part.target) == "settings" and ast.unparse(part.annotation) in any_settings)
        for part in fields
    )


def _all_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, names: set[str]) -> set[str]:
    """The parameters of `function` whose annotations mention one of `names`."""
    return {
        each.arg
        for each in _all_parameters(function)
        if each.annotation is not None and _mentions(each.annotation, names)
    }


def _mentions(node: ast.AST, names: set[str]) -> bool:
    """Whether an annotation names one of `names` as the type of a value: not within `type[...]` or `Callable[...]`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return False
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in (
        "type",
        "Callable",
        "ClassVar",
        "Literal",
        "Annotated",
    ):
        first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
        return ast.unparse(node.value) == "Annotated" and _mentions(first, names)
    return any(_mentions(child, names) for child in ast.iter_child_nodes(node))


def _holds(node: ast.ClassDef, names: set[str]) -> bool:
    """Whether a class has a field annotated with one of `names`, or keeps a parameter of that type."""
    if _has_field(node, names):
        return True
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            given = _parameters(part, names)
            values = [n.value for n in ast.walk(part) if isinstance(n, ast.Assign)]
            kept = [each for value in values for each in (value.elts if isinstance(value, ast.Tuple) else [value])]
            if any(isinstance(each, ast.Name) and each.id in given for each in kept):
                return True
    return False


def hooks(source: str) -> list[str]:
    """The abstract methods of the class `Parts` in a source."""
    [parts] = [node for node in parsed(source).body if isinstance(node, ast.ClassDef) and node.name == "Parts"]
    methods = [node for node in parts.body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in methods if "abstractmethod" in map(ast.unparse, node.decorator_list)]


def floors_and_circles(graph: dict[str, set[str]]) -> tuple[int, list[list[str]]]:
    """How many floors `graph` has from top to ground, and its circles: sets of rooms that reach each other."""

    @cache
    def reached(room: str) -> frozenset[str]:
        seen, waiting = set[str](), [room]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return frozenset(seen)

    circle = {room: frozenset(o for o in reached(room) if room in reached(o)) | {room} for room in graph}

    @cache
    def height(rooms: frozenset[str]) -> int:
        below = {circle[other] for room in rooms for other in graph[room]} - {rooms}
        return 1 + max(map(height, below), default=0)

    circles = sorted(sorted(rooms) for rooms in set(circle.values()) if len(rooms) > 1)
    return max(map(height, circle.values())), circles


def size() -> dict[str, float]:
    """Files and code lines of the package, and how its rooms hang together."""
    files = sources()
    lines = sum(map(code_lines, files.values()))
    floors, circles = floors_and_circles(rooms(files))
    return {
        "files": len(files),
        "files above 900 lines": sum(len(text.splitlines()) > 900 for text in files.values()),
        "code lines": lines,
        "code lines a file": round(lines / len(files), 1),
        "import share": round(100 * sum(map(import_lines, files.values())) / lines, 1),
        "errors": round(1000 * errors(files) / lines, 1),
        "floors": floors,
        "circles": len(circles),
        "file circles": len(floors_and_circles(file_imports(files))[1]),
        "take the run": len(take_the_run(files)),
        "take settings": len(take_settings(files)),
        "ask settings": len(ask_settings(files)),
        "hooks": len(hooks(files["train/parts.py"])),
        "late doors": sum(map(len, LATE_DOORS.values())),
        "processes": sum(any(is_within(n, p) for n in imports(text) for p in PROCESS) for text in files.values()),
    }


def tests() -> dict[str, float]:
    """Code lines of the tests, and how many of their functions hold the wording or replace parts of the program."""
    files = [file.read_text() for file in sorted((PACKAGE.parent / "tests").rglob("*.py"))]
    functions = [node for text in files for node in nodes_of(parsed(text)) if isinstance(node, ast.FunctionDef)]
    functions = [function for function in functions if function.name.startswith("test_")]
    return {
        "test code lines": sum(map(code_lines, files)),
        "tests": len(functions),
        "tests of words": sum(map(asserts_wording, functions)),
        "patching tests": sum(any(each.arg == "monkeypatch" for each in test.args.args) for test in functions),
    }


def asserts_wording(test: ast.FunctionDef) -> bool:
    """Whether a test compares with a text of at least three words."""
    asserted = [node.test for node in ast.walk(test) if isinstance(node, ast.Assert)]
    asserted += [node.value for node in ast.walk(test) if isinstance(node, ast.keyword) and node.arg == "match"]
    constants = [node for each in asserted for node in ast.walk(each) if isinstance(node, ast.Constant)]
    texts = [node.value for node in constants if isinstance(node.value, str)]
    return any(len(WORD.findall(text)) >= 3 and BESIDE.search(text) for text in texts)


def passed_through() -> tuple[dict[str, int], list[str]]:
    """What a training has loaded and entered at its first backward: the figures, and the modules by name."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--train", folder]
        environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if ended.returncode:
            raise SystemExit(f"figures: the training failed:\n{ended.stdout}{ended.stderr}")
        seen = json.loads((Path(folder) / "measured.json").read_text())
        return seen["figures"], seen["modules"]


class Entered:
    """A profiler that notes the functions of rlpost as they are entered."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str, int], bool] = {}  # whether entered from `learn` on
        self.learning = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Called by Python, on every call and return."""
        code = frame.f_code
        is_function = code.co_flags & 1 and not code.co_name.startswith("<")  # CO_OPTIMIZED: no class or module body
        if event != "call" or not is_function or not code.co_filename.startswith(str(PACKAGE)):
            return
        if code.co_name == "learn" and code.co_filename.endswith("grpo.py"):
            self.learning = True
        name = (code.co_filename, code.co_qualname, code.co_firstlineno)
        from_learn = self.learning and threading.current_thread() is threading.main_thread()
        self.functions[name] = self.functions.get(name, False) or from_learn


def train_twice(folder: Path) -> None:
    """Train in a child that fills the caches, then here; what was seen here is in measured.json."""
    import torch  # noqa: F401  once for both
    import transformers  # noqa: F401

    if (child := os.fork()) == 0:
        train(folder / "warm")
    os.waitpid(child, 0)
    train(folder / "measured")


def train(folder: Path) -> NoReturn:
    """Train until the first backward, write what was seen to `folder`.json, and leave."""
    import torch

    from rlpost.catalog import TRAIN_GRPO
    from rlpost.config.compose import compose
    from rlpost.envs.arithmetic import ArithmeticEnv
    from rlpost.settings.commands import RunRequest

    entered, backward, score = Entered(), torch.Tensor.backward, ArithmeticEnv.score

    def every_other(self: ArithmeticEnv, conversation: Any) -> Any:
        """A random model is never right; without differing rewards there is no gradient."""
        return replace(score(self, conversation), reward=float(conversation.sample))

    def at_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if sys._getframe(1).f_code.co_name != "accumulate_gradient":  # the family's probe has one too
            backward(self, *args, **kwargs)
            return
        sys.setprofile(None)
        threading.setprofile(None)
        loaded = [m for name, m in sys.modules.items() if name.split(".")[0] == "rlpost" and m.__file__]
        figures = {
            "road modules": len(loaded),
            "road code lines": sum(code_lines(Path(m.__file__ or "").read_text()) for m in loaded),
            "road functions": len(entered.functions),
            "road functions from learn on": sum(entered.functions.values()),
        }
        seen = {"figures": figures, "modules": sorted(m.__name__ for m in loaded)}
        folder.with_suffix(".json").write_text(json.dumps(seen))
        os._exit(0)

    ArithmeticEnv.score = every_other  # type: ignore[method-assign]
    torch.Tensor.backward = at_backward  # type: ignore[method-assign, assignment]
    composed = compose(TRAIN_GRPO, WORDS)
    sys.setprofile(entered)
    threading.setprofile(entered)
    TRAIN_GRPO.train(composed.settings, RunRequest(folder, None, composed.overrides, ["rlpost"], composed.yaml, True))
    raise SystemExit("no backward was called")


def main() -> None:
    """Print the figures."""
    if sys.argv[1:2] == ["--train"]:
        train_twice(Path(sys.argv[2]))
    figures, _ = passed_through()
    for name, value in (size() | tests() | figures).items():
        print(f"{value:>8,}  {name}")


if __name__ == "__main__":
    main()
