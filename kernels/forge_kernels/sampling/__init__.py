"""Sampling: noise by (seed, position), logit processors, filters without a sort, logprobs."""

from forge_kernels.sampling.api import (
    allow,
    apply_penalties,
    filter_threshold,
    sample,
    suppress,
    token_logprobs,
)
from forge_kernels.sampling.noise import gumbel

__all__ = [
    "allow",
    "apply_penalties",
    "filter_threshold",
    "gumbel",
    "sample",
    "suppress",
    "token_logprobs",
]
