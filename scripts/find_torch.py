"""Tells scripts/setup what to give pip for torch: `find_torch.py cpu|cuda|none` prints pip's words.

vLLM for the CPU wants the build that PyTorch labels `+cpu`. The package index does not have it; PyTorch's
index of CPU wheels does, and so may a folder that pip was told of. What is installed or lies in pip's own
places is taken first, so that an index that cannot be reached costs nothing where it is not needed.
RLPOST_TORCH_INDEX names another index. Where the build cannot be had the message says why, and the exit
code is 3.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from urllib.parse import unquote

TORCH = "2.13.0"
CPU_BUILD = f"{TORCH}+cpu"
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
WHEEL = re.compile(r"\btorch-([^-\s/]+)-(?P<python>cp\d+)-(?P=python)-([\w.]+)\.whl")


def main(engine: str) -> int:
    """Print pip's words for torch, or say on stderr why it cannot be had."""
    named = os.environ.get("RLPOST_TORCH_INDEX", "").rstrip("/")
    if engine == "cuda" or (engine == "none" and shutil.which("nvidia-smi")):
        print(f"torch=={TORCH}", *beside(named))  # the package index's own build is for CUDA
        return 0
    if installed() == CPU_BUILD or CPU_BUILD in versions(pip_finds()):
        print(f"torch=={CPU_BUILD}")
        return 0
    if engine == "none" and (installed() or "").startswith(TORCH):
        print(f"torch=={TORCH}")
        return 0
    index = named or PYTORCH_INDEX
    found = pip_finds("--index-url", index)
    if CPU_BUILD in versions(found):
        print(f"torch=={CPU_BUILD}", *beside(index))
        return 0
    why, instead = explain(found, index, f"{sys.version_info.major}.{sys.version_info.minor}")
    if engine == "none":
        print(f"setup: {why}; taking the package index's torch, which may bring CUDA's libraries", file=sys.stderr)
        print(f"torch=={TORCH}")
        return 0
    print(f"setup: vLLM for the CPU needs torch {CPU_BUILD}, which cannot be had: {why}", file=sys.stderr)
    for line in (*instead, "RLPOST_ENGINE=none installs rlpost without vLLM; it samples with transformers then"):
        print(f"  {line}", file=sys.stderr)
    return 3


def beside(index: str) -> list[str]:
    """pip's words for one more index, which never replaces the package index."""
    return ["--extra-index-url", index] if index else []


def installed() -> str | None:
    """The version of torch in this environment, None without one."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def pip_finds(*words: str) -> str:
    """All that pip says when asked which versions of torch it finds; `words` may name the index."""
    options = ["--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "15", "-vv"]
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", *options, *words]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def versions(found: str) -> list[str]:
    """The versions that pip would install here."""
    line = re.search(r"^Available versions: (.+)$", found, re.MULTILINE)
    return line[1].split(", ") if line else []


def explain(found: str, index: str, python: str) -> tuple[str, list[str]]:
    """Which of index, version, Python and platform is missing, and what works instead."""
    seen = {(unquote(version), cp, tag) for version, cp, tag in WHEEL.findall(unquote(found))}
    pythons: dict[str, set[str]] = {}  # version of Python -> platforms
    for version, cp, tag in seen:
        if version == CPU_BUILD:
            pythons.setdefault(f"3.{cp.removeprefix('cp3')}", set()).add(tag)
    another = [
        "RLPOST_TORCH_INDEX=URL names an index that has it, beside the package index",
        "PIP_FIND_LINKS=FOLDER names a folder with its wheel",
    ]
    if not seen:
        failure = re.search(r"Could not fetch URL \S+: (.+)", found)
        if failure is None or failure[1].startswith("404"):
            return f"{index} holds no torch", another
        return f"{index} cannot be reached ({reason(failure[1])})", another
    if not pythons:
        others = listed({version for version, *_ in seen})
        return f"{index} holds torch {others} and not {CPU_BUILD}", another
    here = platform_here()
    fits = {one for one, tags in pythons.items() if any(tag.endswith(f"_{platform.machine()}") for tag in tags)}
    if not fits:
        tags = listed({tag for tags in pythons.values() for tag in tags})
        return f"{index} holds it for {tags} and not for this platform, {here}", another
    if python in fits:
        tags = listed(pythons[python])
        return f"{index} holds it for {tags}, which this platform, {here}, is not", another
    return (
        f"{index} holds it for Python {listed(fits)} and not for this one, {python}",
        [f"PYTHON=python{max(fits, key=minor)} installs with a Python that it is there for", *another],
    )


def reason(failure: str) -> str:
    """The end of pip's chain of causes."""
    failure = failure.partition(" - skipping")[0]
    errors = re.findall(r"\[Errno -?\d+\] ([^'\")]+)", failure)
    return errors[-1] if errors else "timed out" if "timed out" in failure else failure[:200]


def listed(names: Iterable[str]) -> str:
    """Names in order, versions of Python by their number."""
    return ", ".join(sorted(names, key=lambda name: (minor(name), name)))


def minor(version: str) -> int:
    """12 of 3.12; 0 of what is no version of Python."""
    return int(version.removeprefix("3.")) if re.fullmatch(r"3\.\d+", version) else 0


def platform_here() -> str:
    """What wheels are chosen by: system, machine and, on Linux, its C library."""
    library = " ".join(platform.libc_ver())
    return f"{platform.system()} {platform.machine()}" + (f" with {library}" if library.strip() else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
