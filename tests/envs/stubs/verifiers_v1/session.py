# type: ignore
"""Stands in for verifiers.v1.session."""

from verifiers.v1 import Trace


def hook_boundary(call, allow_trace):
    return next(iter(call.__annotations__.values()), Trace)
