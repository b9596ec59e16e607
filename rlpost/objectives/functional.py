"""The public door to every loss, divergence, weight and advantage: pure functions, tensors in, tensors out."""

from __future__ import annotations

from rlpost.objectives.advantage import advantages as advantages
from rlpost.objectives.advantage import soft_overlong_penalty as soft_overlong_penalty
from rlpost.objectives.advantage import token_advantages as token_advantages
from rlpost.objectives.aggregation import AGGREGATIONS as AGGREGATIONS
from rlpost.objectives.aggregation import KL_ESTIMATORS as KL_ESTIMATORS
from rlpost.objectives.aggregation import SAMPLER_CORRECTIONS as SAMPLER_CORRECTIONS
from rlpost.objectives.aggregation import aggregate as aggregate
from rlpost.objectives.aggregation import default_normaliser as default_normaliser
from rlpost.objectives.aggregation import k1 as k1
from rlpost.objectives.aggregation import k2 as k2
from rlpost.objectives.aggregation import k3 as k3
from rlpost.objectives.aggregation import k3_k2grad as k3_k2grad
from rlpost.objectives.aggregation import kl_divergence as kl_divergence
from rlpost.objectives.aggregation import masked_mean as masked_mean
from rlpost.objectives.aggregation import sampler_weights as sampler_weights
from rlpost.objectives.aggregation import sequence_kl_divergence as sequence_kl_divergence
from rlpost.objectives.aggregation import token_weights as token_weights
from rlpost.objectives.policy_loss import VARIANTS as VARIANTS
from rlpost.objectives.policy_loss import PolicyTerms as PolicyTerms
from rlpost.objectives.policy_loss import effective_sample_size as effective_sample_size
from rlpost.objectives.policy_loss import policy_loss as policy_loss
from rlpost.objectives.policy_loss import policy_metrics as policy_metrics
from rlpost.objectives.policy_loss import policy_terms as policy_terms
from rlpost.objectives.supervised import minor_sft_loss as minor_sft_loss
from rlpost.objectives.supervised import minor_sft_terms as minor_sft_terms
from rlpost.objectives.supervised import sft_loss as sft_loss
from rlpost.objectives.supervised import sft_terms as sft_terms
from rlpost.objectives.variants import Surrogate as Surrogate
from rlpost.objectives.variants import Tokens as Tokens
