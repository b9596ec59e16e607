"""Collectors as Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.extras import require


def actor_class(cls: type, remote_config: Mapping[str, Any]) -> Any:
    """`cls` as a Ray actor class, with what `ray.remote` takes. Raises MissingExtraError without ray."""
    require("ray", "ray", f"{cls.__name__}.as_remote")
    import ray

    remote: Any = ray.remote  # type: ignore[attr-defined]
    return remote(**remote_config)(cls) if remote_config else remote(cls)
