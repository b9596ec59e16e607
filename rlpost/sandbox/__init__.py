"""The one place where code that a model wrote is run, apart from this machine and under limits.

`Sandbox` is the door; everything else here is how it keeps its word. Linux only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpost.lazy import lazy_names

if TYPE_CHECKING:
    from rlpost.sandbox.execution import Execution as Execution
    from rlpost.sandbox.execution import KilledBy as KilledBy
    from rlpost.sandbox.limits import Limits as Limits
    from rlpost.sandbox.sandbox import Sandbox as Sandbox
    from rlpost.sandbox.sandbox import SandboxMode as SandboxMode
    from rlpost.sandbox.sandbox import Session as Session

__getattr__, __dir__ = lazy_names(__name__, __file__)
