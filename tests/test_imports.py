"""Public names that a package imports when they are first used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import rlpost

ALIASES = [
    "WeightUpdaterBase",
    "SyncDataCollector",
    "aSyncDataCollector",
    "ExplorationType",
]  # as TorchRL's users know them
ROOT = Path(rlpost.__file__).parent.parent
PACKAGES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.glob("rlpost/**/*.py"))
    if "= lazy_names(" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there_and_no_other(package: str) -> None:
    module = import_module(package)
    names = dir(module)
    assert names
    for name in names:
        found = getattr(module, name)
        assert name in (found.__name__.rpartition(".")[2], *ALIASES), found
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_transforms_are_names_of_envs_too() -> None:
    envs, transforms = import_module("rlpost.envs"), import_module("rlpost.envs.transforms")
    assert {"KLRewardTransform", "TemplateTransform", "Tokenizer"} < set(dir(transforms)) < set(dir(envs))
    assert all(getattr(envs, name) is getattr(transforms, name) for name in dir(transforms))


@pytest.mark.parametrize(
    ("package", "name", "instead"),
    [
        ("collectors", "MultiSyncCollector", "a Collector of rlpost.envs.ParallelEnv"),
        ("collectors", "MultiAsyncCollector", "a RayCollector"),
        ("envs", "AsyncEnvPool", "ParallelEnv"),
        ("envs", "set_gym_backend", "leave the line out"),
        ("envs", "EnvCreator", "pass the function"),
    ],
)
def test_a_name_of_torchrls_that_is_not_here_says_what_is(package: str, name: str, instead: str) -> None:
    with pytest.raises(ImportError, match=f"rlpost.{package} has no {name}: .*{instead}"):
        exec(f"from rlpost.{package} import {name}")
    assert name not in dir(import_module(f"rlpost.{package}"))
