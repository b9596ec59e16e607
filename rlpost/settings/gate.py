"""The gate between sampler and trainer: whether what samples is what learns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlpost.settings.checks import Settings, limited


class GateAlarm(Enum):
    """What is done where sampler and trainer no longer agree."""

    stop = "stop"
    correct = "correct"  # go on, with loss.sampler_correction=tis_token where none was on
    warn = "warn"


@dataclass
class GateSettings(Settings, group="gate"):
    """A fixed probe is scored by sampler and trainer; the bounds are learned from the run's own start."""

    enabled: bool = True  # whether sampler and trainer are compared at all
    every: int = limited(
        20, at_least=0
    )  # steps between two probes, and two looks at all weights; 0: at the start alone
    on_alarm: GateAlarm = GateAlarm.stop  # what is done where they no longer agree
