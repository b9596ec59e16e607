"""Transforms that can be appended to an environment."""

from typing import TYPE_CHECKING

from rlpost.imports import lazy_names

if TYPE_CHECKING:
    from rlpost.data.ragged import as_nested_tensor as as_nested_tensor
    from rlpost.data.ragged import as_padded_tensor as as_padded_tensor
    from rlpost.envs.base import Transform as Transform
    from rlpost.envs.transforms.training import DataLoadingPrimer as DataLoadingPrimer
    from rlpost.envs.transforms.training import PolicyVersion as PolicyVersion
    from rlpost.tools.browser import BrowserTransform as BrowserTransform
    from rlpost.tools.mcp import MCPToolTransform as MCPToolTransform
    from rlpost.tools.python import PythonInterpreter as PythonInterpreter
    from rlpost.torchrl.transforms import KLRewardTransform as KLRewardTransform
    from rlpost.torchrl.transforms import RetrieveLogProb as RetrieveLogProb
    from rlpost.torchrl.transforms import TemplateTransform as TemplateTransform
    from rlpost.torchrl.transforms import Tokenizer as Tokenizer

__getattr__, __dir__ = lazy_names(__name__, __file__)
