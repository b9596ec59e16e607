"""Policies: what samples completions. One interface, one engine per file."""

from typing import TYPE_CHECKING

from rlpost.imports import lazy_names

if TYPE_CHECKING:
    from rlpost.policies.base import CategoricalSequential as CategoricalSequential
    from rlpost.policies.base import Policy as Policy
    from rlpost.policies.base import Request as Request
    from rlpost.policies.scripted import ScriptedPolicy as ScriptedPolicy
    from rlpost.policies.transformers import TransformersWrapper as TransformersWrapper
    from rlpost.policies.vllm import vLLMWrapper as vLLMWrapper
    from rlpost.policies.vllm_devices import LLMOnDevice as LLMOnDevice
    from rlpost.policies.vllm_devices import make_vllm_worker as make_vllm_worker
    from rlpost.policies.vllm_worker import stateless_init_process_group as stateless_init_process_group
    from rlpost.policies.vllm_worker import vLLMWorker as vLLMWorker
    from rlpost.torchrl.policies import Face as Face
    from rlpost.torchrl.policies import MaskedCategorical as MaskedCategorical

__getattr__, __dir__ = lazy_names(__name__, __file__)
