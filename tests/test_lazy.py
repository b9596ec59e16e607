"""Public names that a package imports when they are first asked for."""

from importlib import import_module
from pathlib import Path

import pytest

import rlpost

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
        assert name in (found.__name__.rpartition(".")[2], "WeightUpdaterBase"), found
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        _ = module.no_such_name
