"""Draw settings' comments, docstrings, messages and passages of docs by a fixed seed, to read them aloud."""

from __future__ import annotations

import ast
import random
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEED = 2026


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else SEED
    sources = {file: file.read_text() for file in sorted((ROOT / "rlpost").rglob("*.py"))}
    trees = [ast.parse(text) for text in sources.values()]
    comments = [
        line.strip()
        for file, text in sources.items()
        if file.parent.name == "settings"
        for line in re.findall(r"^    \w+: .*  # .*$", text, re.MULTILINE)
    ]
    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
    docstrings = [
        text
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, defined)
        if (text := ast.get_docstring(node))
    ]
    messages = [
        ast.unparse(node.exc.args[0])
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
        if isinstance(node.exc.args[0], ast.JoinedStr | ast.Constant | ast.BinOp)
        and " " in ast.unparse(node.exc.args[0])
    ]
    passages = [
        part
        for page in sorted((ROOT / "docs").glob("*.md"))
        for part in re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).split("\n\n")
        if len(part) > 120
    ]
    for title, texts, count in (
        ("settings' comments", comments, 40),
        ("docstrings", docstrings, 40),
        ("messages", messages, 40),
        ("passages", passages, 10),
    ):
        print(f"\n## {title}\n")
        for text in random.Random(seed).sample(texts, count):
            print("-", re.sub(r"\s*\n\s*", " / ", text))


if __name__ == "__main__":
    main()
