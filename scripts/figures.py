"""How large the package is, and how much of it a training passes through: `scripts/check` prints this.

    code lines      of rlpost/, without blank lines, comments and docstrings
    modules, lines  of rlpost that are loaded at the first backward of `rlpost train grpo model=tiny`
    functions       of rlpost that were entered until then, and how many of those from `learn` on in the main thread:
                    what the screen's thread enters depends on how fast the machine is

Takes about 10 s: the same training is started twice, the first time to fill the caches.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import tokenize
from dataclasses import replace
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
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """Lines of `source` that are neither blank nor part of a comment or docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    used = {line for t in tokens if t.type not in LAYOUT for line in range(t.start[0], t.end[0] + 1)}
    return len(used - documented)


def size() -> dict[str, int]:
    """Files and code lines of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {"files": len(files), "code lines": sum(code_lines(file.read_text()) for file in files)}


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
    from rlpost.settings.run import RunRequest
    from rlpost.train import grpo

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
            "modules": len(loaded),
            "lines": sum(len(Path(m.__file__ or "").read_text().splitlines()) for m in loaded),
            "functions": len(entered.functions),
            "functions from learn on": sum(entered.functions.values()),
        }
        seen = {"figures": figures, "modules": sorted(m.__name__ for m in loaded)}
        folder.with_suffix(".json").write_text(json.dumps(seen))
        os._exit(0)

    ArithmeticEnv.score = every_other  # type: ignore[method-assign]
    torch.Tensor.backward = at_backward  # type: ignore[method-assign, assignment]
    composed = compose(TRAIN_GRPO, WORDS)
    sys.setprofile(entered)
    threading.setprofile(entered)
    grpo.train(composed.settings, RunRequest(folder, None, composed.overrides, ["rlpost"], composed.yaml, True))
    raise SystemExit("no backward was called")


def main() -> None:
    """Print the figures."""
    if sys.argv[1:2] == ["--train"]:
        train_twice(Path(sys.argv[2]))
    figures, _ = passed_through()
    for name, value in (size() | figures).items():
        print(f"{value:>7,}  {name}")


if __name__ == "__main__":
    main()
