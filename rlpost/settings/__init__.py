"""Typed dataclasses of everything a command can say; free of torch, so composing takes a blink.

Every class of the modules here is a name of the package too.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlpost.settings.base import *
    from rlpost.settings.commands import *
    from rlpost.settings.env import *
    from rlpost.settings.foreign import *
    from rlpost.settings.loss import *
    from rlpost.settings.model import *
    from rlpost.settings.policy import *
    from rlpost.settings.training import *
else:
    MODULES = [module.name for module in iter_modules(__path__, f"{__name__}.")]

    def __getattr__(name: str) -> Any:
        for module in MODULES:
            found = getattr(import_module(module), name, None)
            if getattr(found, "__module__", None) == module:
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
