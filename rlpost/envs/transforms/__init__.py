"""What can be appended to an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpost.lazy import lazy_names

if TYPE_CHECKING:
    from rlpost.envs.transforms.base import Transform as Transform
    from rlpost.envs.transforms.dataloading import DataLoadingPrimer as DataLoadingPrimer
    from rlpost.envs.transforms.log_prob import KLRewardTransform as KLRewardTransform
    from rlpost.envs.transforms.log_prob import RetrieveLogProb as RetrieveLogProb
    from rlpost.envs.transforms.policy_version import PolicyVersion as PolicyVersion
    from rlpost.envs.transforms.template import TemplateTransform as TemplateTransform
    from rlpost.envs.transforms.tensors import as_nested_tensor as as_nested_tensor
    from rlpost.envs.transforms.tensors import as_padded_tensor as as_padded_tensor
    from rlpost.envs.transforms.tokenizer import Tokenizer as Tokenizer
    from rlpost.tools.browser import BrowserTransform as BrowserTransform
    from rlpost.tools.mcp import MCPToolTransform as MCPToolTransform
    from rlpost.tools.python import PythonInterpreter as PythonInterpreter

__getattr__, __dir__ = lazy_names(__name__, __file__)
