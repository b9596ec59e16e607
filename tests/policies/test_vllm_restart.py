"""An engine that fails is started again with the present weights, and asked again for all that it was asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.errors import PolicyError
from rlpost.policies.base import Request
from rlpost.policies.vllm import vLLMWrapper
from rlpost.settings import DType, SamplingSettings, VLLMSettings
from tests.processes import children, kill_engines_since
from tests.trainings import train_in, untimed


class Failing(vLLMWrapper):
    """Fails as often as it is told to; no engine is started."""

    failures = 0
    starts = 0
    asked = 0

    def start(self) -> None:
        self.starts += 1
        self._engine = object()  # type: ignore[assignment]

    def _generate(self, requests: Any, sampling: Any) -> Any:
        self.asked += 1
        if self.failures:
            self.failures -= 1
            self._engine = None
            raise PolicyError("no engine")
        return [len(requests)]


def policy(tiny_folder: Path, tiny_tokenizer: Any, failures: int, restarts: int = 2) -> Failing:
    made = Failing(tiny_folder, tiny_tokenizer, settings=VLLMSettings(max_restarts=restarts))
    made.failures = failures
    made.start()
    made.version = 7
    return made


ASKED = [Request([1, 2], 3, 0), Request([1], 3, 1)]


def test_it_is_started_again_with_the_present_weights(
    tiny_folder: Path, tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failing = policy(tiny_folder, tiny_tokenizer, failures=2)
    brought: list[int] = []
    failing.reload = lambda: brought.append(failing.starts)
    assert failing.generate(ASKED, SamplingSettings()) == [2]
    assert (failing.starts, failing.asked, brought, failing.version) == (3, 3, [2, 3], 7)
    assert "(2 of 2)" in caplog.text


def test_it_is_not_started_again_too_often_or_without_weights(tiny_folder: Path, tiny_tokenizer: Any) -> None:
    failing = policy(tiny_folder, tiny_tokenizer, failures=3)
    failing.reload = lambda: None
    with pytest.raises(PolicyError, match="no engine"):
        failing.generate(ASKED, SamplingSettings())
    for made in (policy(tiny_folder, tiny_tokenizer, failures=1), policy(tiny_folder, tiny_tokenizer, 1, restarts=0)):
        made.reload = None if made.settings.max_restarts else lambda: None
        with pytest.raises(PolicyError, match="no engine"):
            made.generate(ASKED, SamplingSettings())
        assert made.starts == 1


@pytest.mark.slow
@pytest.mark.vllm
def test_a_training_whose_engine_is_killed_is_the_same_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(completions, **kept):\n    return [len(c) % 3.0 for c in completions]\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "Say {n}."}}\n' for n in range(8)))
    env = ["env=dataset", f"env.path={tmp_path}/rows.jsonl", f"env.reward={tmp_path}/mine.py:score", "env.held_out=0"]
    words = ["model=tiny", "policy=vllm", "policy.engine=own_process", *env, "env.max_completion_tokens=8"]
    words += ["policy.dtype=float32", "model.autocast=none", "prompts_per_step=2", "group_size=4", "steps=4"]
    words += ["eval.enabled=false", "optim.lr=1e-3"]
    assert train_in(TRAIN_GRPO, tmp_path / "whole", words) == 0
    generate, before, killed = vLLMWrapper.generate, children(), False

    def disturbed(self: vLLMWrapper, requests: Any, sampling: Any) -> Any:
        nonlocal killed
        if self.version == 2 and not killed:
            kill_engines_since(before)
            killed = True
        return generate(self, requests, sampling)

    monkeypatch.setattr(vLLMWrapper, "generate", disturbed)
    assert train_in(TRAIN_GRPO, tmp_path / "broken", words) == 0
    assert killed
    assert "(1 of 2)" in (tmp_path / "broken/log.txt").read_text()
    assert untimed(tmp_path / "broken") == untimed(tmp_path / "whole")


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda: int("No available memory\nTry it"), "ValueError: .*No available memory"),
        (lambda: pydantic.TypeAdapter(int).validate_python("many"), "ValidationError: Input .*integer"),
    ],
)
def test_an_engine_without_memory_names_what_to_lower(
    work: Callable[[], object], reason: str, tiny_folder: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpost.policies.vllm.require_vllm", lambda: None)
    monkeypatch.setattr("rlpost.policies.vllm.start_engine", lambda *arguments: work())
    starting = vLLMWrapper(tiny_folder, tiny_tokenizer, settings=VLLMSettings(dtype=DType.float32))
    with pytest.raises(PolicyError, match=rf"\({reason}.*\).*policy\.kv_cache_gb"):
        starting.start()
