"""What a plan says of the machine: what is fetched, and whether memory and disk suffice, by estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def needs_lines(settings: Any, folder: Path) -> list[str]:
    """The lines of `--dry-run` about the hub, memory and disk."""
    from rlpost.estimate.hub import fetches

    lines = [fetch.line() for fetch in fetches(settings)]
    needs = _needs(settings, folder)
    if needs is None:
        return [*lines, f"memory  known once the configuration of {settings.model.path} is here"]
    reason = needs.impossible()
    return [*lines, *needs.lines(), *([f"fits    no: {reason}"] if reason else [])]


def needs_dict(settings: Any, folder: Path) -> dict[str, Any]:
    """The same for `--dry-run --json`."""
    from rlpost.estimate.hub import fetches

    needs = _needs(settings, folder)
    found = [
        {"id": fetch.id, "bytes": fetch.bytes, "cached": str(fetch.cached) if fetch.cached else None}
        for fetch in fetches(settings)
    ]
    return {"fetches": found, "estimate": needs.as_dict() if needs is not None else None}


def _needs(settings: Any, folder: Path) -> Any:
    from rlpost.estimate.hub import shape_of_model
    from rlpost.estimate.machine import gpu_memory
    from rlpost.estimate.report import needs_of

    shape = shape_of_model(settings.model.path, settings.model.revision)
    asks_for_gpu = settings.model.device == "auto" or settings.model.device.startswith("cuda")
    return needs_of(settings, shape, folder, gpu_memory() if asks_for_gpu else None)
