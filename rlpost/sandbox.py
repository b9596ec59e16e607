"""The public door to `rlpost.tools.sandbox`, which runs code that a model wrote."""

from typing import TYPE_CHECKING

from rlpost.imports import lazy_names

if TYPE_CHECKING:
    from rlpost.tools.sandbox.process import Answer as Answer
    from rlpost.tools.sandbox.process import Execution as Execution
    from rlpost.tools.sandbox.process import KilledBy as KilledBy
    from rlpost.tools.sandbox.process import Limits as Limits
    from rlpost.tools.sandbox.sandbox import Sandbox as Sandbox
    from rlpost.tools.sandbox.sandbox import SandboxMode as SandboxMode
    from rlpost.tools.sandbox.sandbox import Session as Session

__getattr__, __dir__ = lazy_names(__name__, __file__)
