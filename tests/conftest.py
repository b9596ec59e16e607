"""What many tests share. Nothing heavy is imported until a test asks for it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlpost.imports import is_installed
from tests.says import Says

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlpost.data.conversation import Conversation
    from tests.command_line import CommandLine

os.environ |= {
    "TOKENIZERS_PARALLELISM": "false",  # its threads and a fork do not go together
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
# vLLM takes 7 s to find out about a class of models, and keeps it there; tests move XDG_CACHE_HOME
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "vllm")))
os.environ.pop("NO_COLOR", None)
os.environ.pop("FORCE_COLOR", None)
# a run leaves SIGHUP ignored where it is, as under nohup, which may have started the suite
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flag that writes the wording anew."""
    parser.addoption("--snapshots", action="store_true", help="write tests/snapshots/ anew")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests of a package that is not installed."""
    for package in ("vllm", "ray"):
        if item.get_closest_marker(package) is not None and not is_installed(package):
            pytest.skip(f"{package} is not installed")


@pytest.fixture
def says(request: pytest.FixtureRequest, tmp_path: Path) -> Says:
    """Compares the wording of a verb with tests/snapshots/VERB.txt: `says("train", text)`, see tests/says.py."""
    test = request.node.nodeid.removeprefix("tests/")
    return Says(test, {str(tmp_path): "<tmp>"}, write=bool(request.config.getoption("--snapshots")))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rlpost(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Runs command lines in this process."""
    from tests.command_line import CommandLine

    return CommandLine(capsys)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap(unfrozen_in_the_end: None) -> None:
    """Collecting what all files of tests have imported takes longer than a training of the tiny model."""
    gc.collect()
    gc.freeze()
    if (training := sys.modules.get("rlpost.train.run")) is not None:
        vars(training)["frozen_heap"] = nullcontext  # which would unfreeze it


@pytest.fixture(scope="session")
def unfrozen_in_the_end() -> Iterator[None]:
    """Else some packages name all of it as leaked."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's cache of converted models is neither read nor written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_folder(cache: None) -> Path:
    """The HF folder of `builtin:tiny`, made once for all tests: nobody may write to it."""
    from rlpost.model.locate import locate_model

    return locate_model("builtin:tiny")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level tokenizer with ChatML turns."""
    from rlpost.model.conversion import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(autouse=True)
def user_files_are_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Undo what a test's user files left in this process: modules, folders to import from, registered names."""
    from rlpost.config.plugins import registered, restore
    from rlpost.settings.base import REWARD_FILES

    before, files, modules, folders = registered(), dict(REWARD_FILES), set(sys.modules), set(sys.path)
    yield
    restore(before)
    REWARD_FILES.clear()
    REWARD_FILES.update(files)
    made_by_tests = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(made_by_tests):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path in folders or not path.startswith(made_by_tests)]


@pytest.fixture(scope="session")
def conversation() -> Callable[..., Conversation]:
    """Makes a finished conversation of one turn: `conversation(group, sample, response_ids=[...], reward=1.0)`."""

    def make(
        group: int = 0,
        sample: int = 0,
        *,
        prompt_ids: Sequence[int] = (5, 6),
        response_ids: Sequence[int] = (7, 8),
        log_probs: Sequence[float] | None = None,
        text: str = "91",
        query: str = "What is 34 + 57?",
        finish_reason: str = "stop",
        version: int | str = 0,
        reward: float | None = 1.0,
        **fields: Any,
    ) -> Conversation:
        from rlpost.data.conversation import Completion, Conversation

        made = Conversation(task={}, messages=[{"role": "user", "content": query}], group_id=group, sample=sample)
        made.prompt_ids, made.prompt_text = list(prompt_ids), f"<user>{query}"
        given = [-0.5] * len(response_ids) if log_probs is None else list(log_probs)
        made.add_completion(Completion(list(response_ids), given, text, finish_reason, version))
        made.reward, made.terminated = reward, True
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    return make


@pytest.fixture(scope="session")
def batch(conversation: Callable[..., Conversation]) -> Callable[..., TensorDict]:
    """Makes the batch of `groups` groups of `size` conversations; each keyword goes to all of them."""

    def make(groups: int = 1, size: int = 2, *, first: int = 0, **fields: Any) -> TensorDict:
        from rlpost.data.batch import batch_from_conversations

        numbers = range(first, first + groups)
        return batch_from_conversations([conversation(g, s, **fields) for g in numbers for s in range(size)])

    return make
