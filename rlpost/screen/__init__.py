"""The terminal of a training: a live picture where somebody is looking, plain lines elsewhere."""

from rlpost.screen.screen import Screen
from rlpost.screen.state import clock, evaluation_line, step_line

__all__ = ["Screen", "clock", "evaluation_line", "step_line"]
