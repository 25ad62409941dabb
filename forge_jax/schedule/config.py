"""The limits and switches of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from forge_jax.config import Batching, Policy


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # per step
    max_rows: int  # tokens that get logits, per step
    max_model_len: int
    prefill_chunk_size: int | None = None  # maximum tokens of one prompt per step
    chunked_prefill: bool = True  # False: cut only prompts that no step can hold
    batching: Batching = "continuous"  # static: admit only when no sequence runs
    policy: Policy = "fcfs"
    pools_apart: bool = False  # requests with `pooling` have separate steps and cached blocks
    eos_token_ids: frozenset[int] = frozenset()
    aging_s: float = 5.0  # after this wait, a sequence is admitted first, regardless of its prefix

    def __post_init__(self) -> None:
        limits = (self.max_num_seqs, self.max_num_batched_tokens, self.max_rows)
        assert min(limits) > 0 and self.max_model_len > 0
        assert self.prefill_chunk_size is None or self.prefill_chunk_size > 0
        assert self.prefill_chunk_size is None or self.chunked_prefill
