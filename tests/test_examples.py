"""The examples in the docstrings of the classes that a user of the library meets first."""

import doctest
from importlib import import_module

import pytest

SHOWN = [
    "rlpost.collectors:LLMCollector",
    "rlpost.data:History",
    "rlpost.data:ReplayBuffer",
    "rlpost.envs:ChatEnv",
    "rlpost.envs:GSM8KEnv",
    "rlpost.objectives:DistillationLoss",
    "rlpost.objectives:GRPOLoss",
    "rlpost.objectives:MCAdvantage",
    "rlpost.objectives:SFTLoss",
    "rlpost.policies:ScriptedPolicy",
    "rlpost.policies:TransformersWrapper",
]


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_shows_what_happens(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    package, _, cls = name.partition(":")
    shown = getattr(import_module(package), cls)
    [example] = doctest.DocTestFinder(recurse=False).find(shown, cls, globs={})
    assert example.examples, f"{name} has no example"
    result = doctest.DocTestRunner().run(example)
    assert result.failed == 0, capsys.readouterr().out
