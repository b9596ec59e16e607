"""What can be appended to an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpost.lazy import lazy_names

if TYPE_CHECKING:
    from rlpost.envs.transforms.base import Transform as Transform
    from rlpost.envs.transforms.dataloading import DataLoadingPrimer as DataLoadingPrimer
    from rlpost.envs.transforms.policy_version import PolicyVersion as PolicyVersion
    from rlpost.tools.browser import BrowserTransform as BrowserTransform
    from rlpost.tools.mcp import MCPToolTransform as MCPToolTransform
    from rlpost.tools.python import PythonInterpreter as PythonInterpreter
    from rlpost.torchrl.log_prob import KLRewardTransform as KLRewardTransform
    from rlpost.torchrl.log_prob import RetrieveLogProb as RetrieveLogProb
    from rlpost.torchrl.template import TemplateTransform as TemplateTransform
    from rlpost.torchrl.tensors import as_nested_tensor as as_nested_tensor
    from rlpost.torchrl.tensors import as_padded_tensor as as_padded_tensor
    from rlpost.torchrl.tokenizer import Tokenizer as Tokenizer

__getattr__, __dir__ = lazy_names(__name__, __file__)
