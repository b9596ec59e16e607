"""Environments: the prompts of a model, and the scores of its replies."""

from typing import TYPE_CHECKING

from rlpost.imports import lazy_names

if TYPE_CHECKING:
    from tensordict.nn import InteractionType as ExplorationType  # noqa: F401  as TorchRL's users know it

    from rlpost.envs.arithmetic import ArithmeticEnv as ArithmeticEnv
    from rlpost.envs.base import EnvBase as EnvBase
    from rlpost.envs.base import ToolCall as ToolCall
    from rlpost.envs.base import ToolLimits as ToolLimits
    from rlpost.envs.base import ToolResult as ToolResult
    from rlpost.envs.base import ToolTransform as ToolTransform
    from rlpost.envs.chat import ChatEnv as ChatEnv
    from rlpost.envs.chat import DatasetChatEnv as DatasetChatEnv
    from rlpost.envs.countdown import CountdownEnv as CountdownEnv
    from rlpost.envs.gsm8k import GSM8KEnv as GSM8KEnv
    from rlpost.envs.ifeval import IFBenchEnv as IFBenchEnv
    from rlpost.envs.ifeval import IFEvalEnv as IFEvalEnv
    from rlpost.envs.ifeval import IFEvalScoreData as IFEvalScoreData
    from rlpost.envs.ifeval import IfEvalScorer as IfEvalScorer
    from rlpost.envs.math_problems import MathEnv as MathEnv
    from rlpost.envs.mlgym import MLGymWrapper as MLGymWrapper
    from rlpost.envs.mlgym import make_mlgym as make_mlgym
    from rlpost.envs.reasoning import ReasoningGymEnv as ReasoningGymEnv
    from rlpost.envs.text_game import TextGameEnv as TextGameEnv
    from rlpost.envs.transforms import BrowserTransform as BrowserTransform
    from rlpost.envs.transforms import DataLoadingPrimer as DataLoadingPrimer
    from rlpost.envs.transforms import KLRewardTransform as KLRewardTransform
    from rlpost.envs.transforms import MCPToolTransform as MCPToolTransform
    from rlpost.envs.transforms import PolicyVersion as PolicyVersion
    from rlpost.envs.transforms import PythonInterpreter as PythonInterpreter
    from rlpost.envs.transforms import RetrieveLogProb as RetrieveLogProb
    from rlpost.envs.transforms import TemplateTransform as TemplateTransform
    from rlpost.envs.transforms import Tokenizer as Tokenizer
    from rlpost.envs.transforms import Transform as Transform
    from rlpost.envs.transforms import as_nested_tensor as as_nested_tensor
    from rlpost.envs.transforms import as_padded_tensor as as_padded_tensor
    from rlpost.torchrl.chat_envs import EnvFace as EnvFace
    from rlpost.torchrl.envs import GSM8KPrepareQuestion as GSM8KPrepareQuestion
    from rlpost.torchrl.envs import GSM8KRewardParser as GSM8KRewardParser
    from rlpost.torchrl.envs import LLMEnv as LLMEnv
    from rlpost.torchrl.envs import LLMHashingEnv as LLMHashingEnv
    from rlpost.torchrl.envs import make_gsm8k_env as make_gsm8k_env
    from rlpost.torchrl.frames import Bounded as Bounded
    from rlpost.torchrl.frames import Categorical as Categorical
    from rlpost.torchrl.frames import GymEnv as GymEnv
    from rlpost.torchrl.frames import ParallelEnv as ParallelEnv
    from rlpost.torchrl.frames import TensorDictEnv as TensorDictEnv

ELSEWHERE = {  # of TorchRL's names
    "AsyncEnvPool": "ParallelEnv(len(makers), makers) plays several environments, a thread each",
    "set_gym_backend": "gymnasium is the only backend of GymEnv, so leave the line out",
    "EnvCreator": "pass the function that makes the environment itself",
}

__getattr__, __dir__ = lazy_names(__name__, __file__, ELSEWHERE)
