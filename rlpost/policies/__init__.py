"""What samples: one engine a file, one interface."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlpost.policies.base import Policy, Request
    from rlpost.policies.scripted import ScriptedPolicy
    from rlpost.policies.transformers import TransformersWrapper
    from rlpost.policies.vllm import vLLMWrapper

__all__ = ["Policy", "Request", "ScriptedPolicy", "TransformersWrapper", "vLLMWrapper"]

_MODULES = {
    "Policy": "base",
    "Request": "base",
    "ScriptedPolicy": "scripted",
    "TransformersWrapper": "transformers",
    "vLLMWrapper": "vllm",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
