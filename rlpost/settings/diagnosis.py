"""What is done about symptoms that a run's own figures show."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlpost.settings.checks import Settings


class OnAlarm(Enum):
    """What a training does at the first sight of a symptom."""

    warn = "warn"
    checkpoint = "checkpoint"  # a warning, and a checkpoint of the step
    stop = "stop"  # with a checkpoint, and exit 4
    off = "off"


@dataclass
class DiagnosisSettings(Settings, group="diagnosis"):
    """Dead reward, length hacking, collapse and others, looked for after each step; `rlpost runs diagnose` as well."""

    on_alarm: OnAlarm = OnAlarm.warn  # what is done at the first sight of a symptom
