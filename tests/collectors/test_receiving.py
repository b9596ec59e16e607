"""What a collector can be told by another process: weights to take up, and methods by their path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from talk import make, scripted, talk, told
from tensordict import TensorDict

from rlpost.collectors import Collector, LLMCollector, RayWeightSyncScheme
from rlpost.model.load import load_model
from rlpost.model.weights import save_one_by_one
from rlpost.policies import TransformersWrapper
from rlpost.remote.exchange import exchange_folder
from rlpost.settings import DType, ModelSettings, SamplingSettings
from tests.torchrl.counting import Counting


def frames(**options: Any) -> Collector:
    return Collector(Counting(), torch.nn.Linear(1, 1), frames_per_batch=2, **options)


def weights_of(collector: Collector) -> list[float]:
    policy: Any = collector.policy
    return [policy.module.weight.item(), policy.module.bias.item()]


GIVEN = {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([3.0])}


def module() -> torch.nn.Module:
    made = torch.nn.Linear(1, 1)
    made.load_state_dict(GIVEN)
    return made


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ([module()], {}),
        ([GIVEN], {}),
        ([TensorDict(GIVEN)], {}),
        ([], {"weights": TensorDict(GIVEN)}),
        ([], {"policy": module()}),
    ],
    ids=["module", "dict", "tensordict", "weights", "policy"],
)
def test_weights_are_received_in_any_form(args: list[Any], kwargs: dict[str, Any]) -> None:
    collector = frames(track_policy_version=True)
    collector.receive_weights(*args, **kwargs)
    assert weights_of(collector) == [2.0, 3.0]
    assert collector.policy_version == 1


def test_without_weights_those_of_the_policys_own_model_are_received() -> None:
    given = torch.nn.Linear(1, 1)
    collector = Collector(Counting(), given, frames_per_batch=2)
    given.load_state_dict(GIVEN)
    collector.receive_weights()
    assert weights_of(collector) == [2.0, 3.0]


def test_registering_synchronises_at_once_or_when_weights_are_received() -> None:
    at_once, later = frames(track_policy_version=True), frames(track_policy_version=True)
    with exchange_folder() as folder:
        save_one_by_one(GIVEN.items(), folder)
        for collector in (at_once, later):
            scheme = RayWeightSyncScheme()
            scheme.offer(folder, 8)
            collector.register_scheme_receiver({"policy": scheme}, synchronize_weights=collector is at_once)
        assert (weights_of(at_once), at_once.policy_version, later.policy_version) == ([2.0, 3.0], 8, 0)
        later.receive_weights()
    later.receive_weights()  # nothing new was offered
    assert (weights_of(later), later.policy_version) == ([2.0, 3.0], 8)


def test_a_folder_becomes_the_version_that_the_sender_says() -> None:
    language = make(talk(), dialog_turns_per_batch=2)
    for collector in (frames(track_policy_version=True), language):
        collector.register_scheme_receiver({"policy": RayWeightSyncScheme()})
        with exchange_folder() as folder:
            save_one_by_one(GIVEN.items(), folder)
            collector.cascade_execute("receiver_schemes['policy'].offer", folder, 6)
            collector.receive_weights()
        assert collector.policy_version == 6
    assert language.rollout()["policy_version"].flatten().tolist() == [6, 6]


def test_a_language_model_takes_up_the_weights_of_a_folder(tiny_folder: Path, tiny_tokenizer: Any) -> None:
    own = load_model(tiny_folder, ModelSettings(path=str(tiny_folder), dtype=DType.float32))
    policy = TransformersWrapper(own, tokenizer=tiny_tokenizer, sampling=SamplingSettings())
    collector = LLMCollector(talk(), policy=policy)
    doubled = {name: 2 * value for name, value in own.state_dict().items()}
    with exchange_folder() as folder:
        save_one_by_one(doubled.items(), folder)
        collector.take_up(folder, 4)
    assert collector.policy_version == 4
    assert all(torch.equal(value, doubled[name]) for name, value in own.state_dict().items())


def test_a_method_is_called_by_its_path() -> None:
    collector = frames()
    collector.register_scheme_receiver({"policy": RayWeightSyncScheme(adapter=True)})
    collector.env.lengths = {"a b": [[1], [2, 2]]}  # type: ignore[attr-defined]
    assert collector.cascade_execute("env.set_seed", 4, static_seed=True) == 4
    assert collector.env.first == 4  # type: ignore[attr-defined]
    collector.cascade_execute("receiver_schemes['policy'].receive", collector)
    assert collector.cascade_execute("env.lengths['a b'][-1].count", 2) == 2


@pytest.mark.parametrize(
    "path",
    [
        "",
        "env.__class__",
        "_background",
        "env._lock",
        "env..close",
        ".env",
        "env.close()",
        "env['a]",
        "env[a]",
        "env b",
    ],
)
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(path))):
        frames().cascade_execute(path)


def test_a_worker_that_was_offered_nothing_plays_on_as_before() -> None:
    collector = make(talk(), policy=scripted("a", "b"), dialog_turns_per_batch=2, flatten_data=True)
    collector.register_scheme_receiver({"policy": RayWeightSyncScheme()})
    collector.receive_weights()
    assert told(collector.rollout()) == [("q0", 1), ("q1", 1)]
    assert collector.policy_version == 0
