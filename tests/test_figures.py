"""How large the package is, and how much of it a training passes through, do not grow unnoticed."""

from __future__ import annotations

import figures
import pytest

pytestmark = pytest.mark.thorough

MORE = 1.1  # beyond so many times what is written here, a figure is lowered again or written anew, with the reason
BESIDE = {"data.datasets", "data.rows", "data.demonstrations", "envs.tool_calls"}  # read row files, run tools
HELD = {
    "files": 262,  # what a plain training does not read lies in files of its own, loaded when it is named
    "files above 900 lines": 0,
    "code lines": 40_000,  # with Ray clusters, doctor, other tools' words, five kinds of other people's environments
    "import share": 10.1,  # lines went from bodies more than from imports
    "errors": 19.0,
    "floors": 13,
    "circles": 0,
    "file circles": 0,
    "take the run": 14,  # loops, the list of watchers, and what builds a watcher
    "take settings": 56,  # a watcher takes the run; else the resolving, the facts and the assembling
    "ask settings": 85,
    "hooks": 4,  # facts, measure, state, restore
    "late doors": 4,
    "processes": 10,  # the proxy of the browser is one, the child of verifiers another, whose path players pass on
    "road modules": 107,
    "road code lines": 14_360,  # a module brings all losses, estimators and settings
    "road functions": 620,  # the tokenizer is compared with its file, and the end of a turn found by rendering
    "road functions from learn on": 250,
}


def test_rooms_floors_and_circles_are_read_from_all_imports() -> None:
    files = {
        "errors.py": "",
        "data/rows.py": "from rlpost.errors import E",
        "data/__init__.py": "from rlpost.cli.main import main",
        "envs/chat.py": "from rlpost.data.rows import R\nimport rlpost.envs.base",
        "cli/main.py": "def f():\n    from rlpost.envs import chat",
    }
    graph = figures.rooms(files)
    assert graph == {"errors": set(), "data": {"errors"}, "envs": {"data"}, "cli": {"envs"}}
    assert figures.floors_and_circles(graph) == (4, [])
    assert figures.floors_and_circles(graph | {"data": {"errors", "envs"}}) == (3, [["data", "envs"]])


def test_who_takes_the_run_is_seen_by_annotations_whatever_the_parameters_name() -> None:
    files = {
        "train/run.py": "class Run:\n    def stop(self, reason: str): ...",
        "runs/folder.py": "class RunFolder: ...",
        "train/watchers.py": (
            "from rlpost.train.run import Run\n"
            "class Screen:\n    def __init__(self, it: Run[A, B]) -> None:\n        self.it, self.seen = it, 0\n"
            "    def on_step(self, step: Step) -> None: ...\n"
            "def told(screen: Screen | None) -> None: ...\n"
            "def counted(run: int) -> None: ...\n"
        ),
        "cli/runs.py": "def show(run: Run) -> None: ...",  # an annotation of its own
    }
    assert sorted(figures.take_the_run(files)) == ["train/watchers.py __init__", "train/watchers.py told"]


def test_who_takes_the_settings_of_a_command_is_seen_by_annotations() -> None:
    files = {
        "settings/a.py": (
            "class LossSettings(Settings):\n    lr: float = 0.0\n"
            "class TrainSettings(Settings):\n    loss: LossSettings\n"
            "class GRPOSettings(TrainSettings):\n    steps: int\n"
        ),
        "train/b.py": (
            "Trained = GRPOSettings | None\n"
            "S = TypeVar('S', bound=Trained)\n"
            "class Run(Generic[S]):\n    def __init__(self, it: S) -> None:\n        self.it = it\n"
            "def whole(given: 'GRPOSettings') -> None: ...\n"
            "def held(run: Run[Any]) -> None: ...\n"
            "def typed(kind: type[GRPOSettings], make: Callable[[GRPOSettings], int]) -> None: ...\n"
            "def part(settings: LossSettings) -> None: ...\n"
            "def anything(settings: Any) -> None: ...\n"
        ),
        "train/c.py": "from rlpost.train.b import S\ndef bound(it: S) -> None: ...\n",
        "train/d.py": "S = TypeVar('S')\ndef another(it: S) -> None: ...\n",
    }
    found = ["train/b.py __init__", "train/b.py whole", "train/b.py held", "train/b.py anything", "train/c.py bound"]
    assert sorted(figures.take_settings(files)) == sorted(found)


def test_what_asks_for_the_class_of_settings_is_seen() -> None:
    files = {
        "settings/a.py": (
            "class LossSettings(Settings):\n    reads: ClassVar[bool] = False\n    lr: float = 0.0\n"
            "    @property\n    def big(self) -> bool:\n        return self.reads\n"
        ),
        "train/b.py": (
            "def f(loss):\n"
            "    if isinstance(loss, LossSettings) or type(loss) is LossSettings:\n        return loss.big\n"
            "    match loss:\n        case LossSettings(lr=1.0):\n            return isinstance(loss, str)\n"
            "class Other:\n    def g(self):\n        return self.reads or self.loss.lr\n"
        ),
    }
    found = ["settings/a.py self.reads", "train/b.py isinstance(loss, LossSettings)"]
    found += ["train/b.py type(loss) is LossSettings", "train/b.py loss.big", "train/b.py LossSettings(lr=1.0)"]
    assert sorted(figures.ask_settings(files)) == sorted(found)


def test_the_hooks_are_the_methods_of_the_parts() -> None:
    source = "class Parts:\n    @property\n    def policy(self): ...\n    @abstractmethod\n    def measure(self): ...\n"
    assert figures.hooks(source) == ["measure"]


def test_the_package_and_what_a_training_passes_through_have_not_grown() -> None:
    road, loaded = figures.passed_through()
    assert {module for doors in figures.LATE_DOORS.values() for module in doors} & set(loaded) == set()
    assert {f"rlpost.{module}" for module in BESIDE} & set(loaded) == set()
    measured = figures.size() | road
    grown = {name: measured[name] for name, held in HELD.items() if measured[name] > MORE * held}
    assert grown == {}
