"""Sampling: noise by (seed, position), logit processors, filters without a sort, and logprobs.

For rejection sampling of drafts, `propose` draws them and `sample` verifies them.
"""

from forge_kernels.sampling.api import (
    allow,
    apply_penalties,
    filter_threshold,
    processed_logits,
    sample,
    suppress,
    token_logprobs,
)
from forge_kernels.sampling.noise import gumbel
from forge_kernels.sampling.proposal import Proposal, propose
from forge_kernels.sampling.rejection import Drafts, certain

__all__ = [
    "Drafts",
    "Proposal",
    "allow",
    "apply_penalties",
    "certain",
    "filter_threshold",
    "gumbel",
    "processed_logits",
    "propose",
    "sample",
    "suppress",
    "token_logprobs",
]
