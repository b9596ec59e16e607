"""The layers of the house, read from the imports themselves, those inside functions included."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from figures import LATE_DOORS, is_within

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rlpost"

GROUND = ["errors", "files", "text", "record", "imports", "user_file", "output"]  # import each other at most
LAYERS = [
    ["settings", *GROUND],
    ["catalog"],
    ["config", "remote"],
    ["rewards", "data", "distributed", "estimate"],
    ["model"],
    ["envs", "policies", "objectives", "models"],
    ["weight_sync", "tracking", "screen"],
    ["runs"],
    ["collectors", "tools"],
    ["evaluation"],
    ["torchrl", "chat", "report", "export", "starters", "sandbox", "testing"],
    ["train"],
    ["doctor"],
    ["cli"],
    ["__main__"],
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}

# package -> the files that may import it, as glob patterns under rlpost/
DOORS = {
    "vllm": ["policies/vllm*.py", "weight_sync/vllm.py", "tools/parsers.py"],
    "ray": ["remote/cluster.py"],
    "datasets": ["data/datasets.py"],
    "peft": ["model/lora.py"],
    "bitsandbytes": ["model/optim.py"],
    "hydra": ["config/*.py"],
    "omegaconf": ["config/*.py"],
    "typer": ["cli/*.py"],
    "pyarrow": ["runs/rollout*.py", "evaluation/saved.py", "data/rows.py"],
    "plotext": ["cli/compare.py"],
    "matplotlib": ["report/curves.py"],
    "tensorboard": ["tracking/trackers.py"],
    "wandb": ["tracking/trackers.py"],
    "trackio": ["tracking/trackers.py"],
    "mlflow": ["tracking/trackers.py"],
    "math_verify": ["rewards/math_answers.py"],
    "reasoning_gym": ["rewards/reasoning_tasks.py"],
    "gymnasium": ["envs/text_game.py", "torchrl/frames.py", "envs/mlgym.py"],
    "mlgym": ["envs/mlgym.py"],
    "textarena": ["envs/textarena.py"],
    "if_verifiable": ["rewards/ifeval.py"],
    "nltk": ["rewards/ifeval.py", "envs/textarena.py"],
    "langdetect": ["rewards/ifeval.py"],
    "mcp": ["tools/mcp*.py"],
    "websockets": ["envs/openenv_sessions.py"],
    "playwright": ["tools/browser*.py"],
    "gguf": ["export/gguf.py"],
    "torchrl": [],
    "trl": [],
}

OPENED_LATE = DOORS.keys() - {"hydra", "omegaconf", "typer", "pyarrow", "gguf"}
HEAVY = ["torch", "tensordict", "transformers", "numpy"]

# room, or file -> what it never imports; a dotted name means that module and all below it
NEVER = {
    "settings": HEAVY,
    "errors": HEAVY,
    "catalog": HEAVY,
    "tools/sandbox": HEAVY,
    "text": HEAVY,
    "runs/reader.py": [*HEAVY, "rich", "pyarrow"],
    "runs/kept.py": [*HEAVY, "rich", "pyarrow"],
    "runs/removal.py": [*HEAVY, "rich", "pyarrow"],
    "record": [*HEAVY, "rich", "pyarrow"],
    "config": HEAVY,
    "remote/process.py": HEAVY,
    "estimate": HEAVY,
    "rewards": ["torch", "tensordict", "tokenizers", "transformers"],
    "objectives": ["torch.optim", "torch.distributed", "transformers"],
    "envs": ["torch.optim", "rlpost.policies"],
    "policies": ["torch.optim", "rlpost.rewards", "rlpost.envs"],
    "collectors": ["rlpost.objectives", "rlpost.model.load", "rlpost.model.locate", "rlpost.models", "transformers"],
    "runs/folder.py": ["rlpost.objectives"],
    "runs/checkpoint.py": ["rlpost.objectives", "transformers"],
    "tracking": ["rlpost.objectives", "transformers"],
}

FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if "_builtin" not in path.parts)


@cache
def imports(file: Path, *, top_level_only: bool = False) -> list[str]:
    """Full names of what a file of rlpost imports; `from a import b` counts as `a.b`, whatever b is."""
    tree, found = ast.parse((PACKAGE / file).read_text()), []
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import: name rlpost in full"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def room_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def rooms_imported(file: Path) -> set[str]:
    """Rooms of rlpost that a file imports, the late doors aside; `rlpost.__version__` belongs to none."""
    late = LATE_DOORS.get(str(file), ())
    parts = [name.split(".") for name in imports(file) if not any(is_within(name, door) for door in late)]
    return {p[1] for p in parts if p[0] == "rlpost" and len(p) > 1 and p[1] != "__version__"}


def test_every_file_belongs_to_a_layer() -> None:
    assert {room_of(file) for file in FILES} - set(LAYER) - {"__init__"} == set()


def test_no_room_is_named_that_is_not_there() -> None:
    there = {room_of(file) for file in FILES} | {str(file) for file in FILES} | {str(file.parent) for file in FILES}
    named = {*LAYER, *NEVER, *LATE_DOORS} - there
    doors = {door for doors in DOORS.values() for door in doors if not any(file.match(door) for file in FILES)}
    assert (named, doors) == (set(), set())


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_point_down_and_sideways_only_inside_a_folder(file: Path) -> None:
    room = room_of(file)
    if room == "__init__":
        assert rooms_imported(file) == {"imports", "config"}
    if file.name == "__init__.py":
        return  # lazy names, if any: public import paths do not move when rooms do
    for other in rooms_imported(file):
        if other == room or other in GROUND:
            continue
        beside = len(file.parts) == 1 and (PACKAGE / f"{other}.py").is_file()  # both lie in rlpost/ itself
        allowed = LAYER[other] < LAYER[room] or (beside and LAYER[other] == LAYER[room])
        assert allowed, f"{file} of layer {LAYER[room]} imports {other} of layer {LAYER[other]}"


def test_the_shelf_is_reached_through_late_doors_and_public_names_alone() -> None:
    shelf = {"tools", "torchrl"}
    for file in FILES:
        if file.name != "__init__.py" and str(file) != "sandbox.py" and room_of(file) not in shelf:
            assert not rooms_imported(file) & shelf, file


def test_an_environment_and_a_policy_are_one_class_each() -> None:
    named: dict[bool, set[str]] = {True: set(), False: set()}  # whether in torchrl
    for file in FILES:
        if room_of(file) in ("envs", "policies", "torchrl"):
            nodes = ast.parse((PACKAGE / file).read_text()).body
            named[room_of(file) == "torchrl"] |= {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    assert named[True] & named[False] == set()


def test_a_late_door_is_there_and_is_late() -> None:
    for file, modules in LATE_DOORS.items():
        for module in modules:
            assert any(is_within(name, module) for name in imports(Path(file)))
            assert not any(is_within(name, module) for name in imports(Path(file), top_level_only=True))
            assert PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py").is_file()


def test_the_ground_stands_on_nothing_else() -> None:
    for room in GROUND:
        assert rooms_imported(Path(f"{room}.py")) <= {"errors", "files", "text"} - {room}, room


@pytest.mark.parametrize("package", DOORS)
def test_a_heavy_dependency_has_one_door(package: str) -> None:
    importing = [file for file in FILES if any(is_within(name, package) for name in imports(file))]
    assert [file for file in importing if not any(file.match(door) for door in DOORS[package])] == []


@pytest.mark.parametrize("room", NEVER)
def test_a_room_stays_clear_of_what_is_not_its_business(room: str) -> None:
    for file in FILES:
        if room in (room_of(file), str(file), str(file.parent)):
            wrong = [name for name in imports(file) for never in NEVER[room] if is_within(name, never)]
            assert wrong == [], f"{file} imports {wrong}"


def test_settings_need_nothing_but_the_standard_library() -> None:
    for file in FILES:
        if room_of(file) in ("settings", "catalog", "errors", "text") or str(file.parent) == "tools/sandbox":
            foreign = {n.split(".")[0] for n in imports(file, top_level_only=True)}
            foreign -= {*sys.stdlib_module_names, "rlpost"}
            assert foreign == set(), f"{file} imports {foreign}"


def test_the_sandbox_stands_on_the_ground() -> None:
    for file in FILES:
        if str(file.parent) == "tools/sandbox":
            assert rooms_imported(file) <= {"tools", "remote", *GROUND}, file
            assert all(is_within(n, "rlpost.tools.sandbox") for n in imports(file) if n.startswith("rlpost.tools")), (
                file
            )


def test_the_command_line_imports_torch_nowhere_at_the_top() -> None:
    light = ["cli", "config", "settings", "catalog", "estimate.machine", "remote", "__version__", *GROUND]
    light += ["runs.kept", "runs.reader", "runs.removal", "runs.reproduction", "report.curves"]
    for file in FILES:
        if room_of(file) == "cli":
            tops = {name for name in imports(file, top_level_only=True) if name.startswith("rlpost.")}
            assert {n for n in tops if not any(is_within(n, f"rlpost.{room}") for room in light)} == set(), file


def test_torch_and_engines_stay_out_of_a_composed_command() -> None:
    program = (
        "import sys\n"
        "import rlpost.cli.main\n"
        "from rlpost.config.compose import compose\n"
        "from rlpost.catalog import TRAIN_GRPO\n"
        "compose(TRAIN_GRPO, ['model=tiny'])\n"
        "heavy = {'torch', 'tensordict', 'transformers', 'vllm', 'datasets', 'pyarrow', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_these_doors_open_only_when_they_are_used() -> None:
    """Importing every room leaves these packages alone, so everything else works where they are not installed."""
    for file in FILES:
        tops = set(imports(file, top_level_only=True))
        assert [n for n in tops for heavy in OPENED_LATE if is_within(n, heavy)] == [], file
