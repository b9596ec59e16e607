"""What can be appended to an environment."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlpost.envs.transforms.base import Transform as Transform
    from rlpost.envs.transforms.dataloading import DataLoadingPrimer as DataLoadingPrimer
    from rlpost.envs.transforms.policy_version import PolicyVersion as PolicyVersion

_HOME = {
    "DataLoadingPrimer": "rlpost.envs.transforms.dataloading",
    "PolicyVersion": "rlpost.envs.transforms.policy_version",
    "Transform": "rlpost.envs.transforms.base",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOME)
