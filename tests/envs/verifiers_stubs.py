"""Packages named verifiers with as much of its two interfaces as the door uses, copied from stubs/ into a folder.

`v1(folder)` has that of 0.4, `v0(folder)` that of 0.3.1; `PYTHONPATH` has to name the folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

STUBS = Path(__file__).with_name("stubs")


def v1(folder: Path) -> Path:
    """Write the package of verifiers 0.4; returns the folder."""
    shutil.copytree(STUBS / "verifiers_v1", folder / "verifiers" / "v1")
    (folder / "verifiers" / "__init__.py").touch()
    return _described(folder, "0.4.0")


def v0(folder: Path) -> Path:
    """Make verifiers 0.3.1, which has both interfaces, of the package of 0.4 in a folder; returns the folder."""
    shutil.rmtree(folder / "verifiers-0.4.0.dist-info")
    shutil.copytree(STUBS / "verifiers_v0", folder / "verifiers", dirs_exist_ok=True)
    return _described(folder, "0.3.1")


def _described(folder: Path, version: str) -> Path:
    about = folder / f"verifiers-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    return folder
