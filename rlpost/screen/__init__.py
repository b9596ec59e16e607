"""The terminal of a training: a live picture where somebody is looking, plain lines elsewhere."""

from rlpost.screen.layout import clock, evaluation_line, step_line
from rlpost.screen.screen import Screen

__all__ = ["Screen", "clock", "evaluation_line", "step_line"]
