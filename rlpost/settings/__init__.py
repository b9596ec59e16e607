"""Typed dataclasses of everything a command can say; free of torch, so composing takes a blink."""

from rlpost.settings.commands import CheckpointSettings as CheckpointSettings
from rlpost.settings.commands import EvalDuringTrainingSettings as EvalDuringTrainingSettings
from rlpost.settings.commands import EvalSettings as EvalSettings
from rlpost.settings.commands import GRPOSettings as GRPOSettings
from rlpost.settings.env import ArithmeticSettings as ArithmeticSettings
from rlpost.settings.env import DatasetSettings as DatasetSettings
from rlpost.settings.env import EnvSettings as EnvSettings
from rlpost.settings.env import GSM8KSettings as GSM8KSettings
from rlpost.settings.env import Operation as Operation
from rlpost.settings.learning import AdvantageSettings as AdvantageSettings
from rlpost.settings.learning import LossSettings as LossSettings
from rlpost.settings.learning import OptimSettings as OptimSettings
from rlpost.settings.learning import Schedule as Schedule
from rlpost.settings.model import Autocast as Autocast
from rlpost.settings.model import DType as DType
from rlpost.settings.model import ModelSettings as ModelSettings
from rlpost.settings.policy import AutoPolicySettings as AutoPolicySettings
from rlpost.settings.policy import Engine as Engine
from rlpost.settings.policy import PolicySettings as PolicySettings
from rlpost.settings.policy import SamplingSettings as SamplingSettings
from rlpost.settings.policy import ScriptedSettings as ScriptedSettings
from rlpost.settings.policy import TransformersSettings as TransformersSettings
from rlpost.settings.policy import VLLMSettings as VLLMSettings
