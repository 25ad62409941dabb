"""The limits and switches of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from forge_jax.config import Batching, Policy


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # of one step
    max_rows: int  # that get logits in one step
    max_model_len: int  # prompt and output
    prefill_chunk_size: int | None = None  # most tokens of one prompt in one step
    chunked_prefill: bool = True  # else only prompts that no step can hold are cut
    batching: Batching = "continuous"  # static: admissions only when nothing runs
    policy: Policy = "fcfs"
    pools_apart: bool = False  # requests with `pooling` get steps and cached blocks of their own
    eos_token_ids: frozenset[int] = frozenset()
    aging_s: float = 5.0  # after which a waiting request goes first, whatever its prefix

    def __post_init__(self) -> None:
        limits = (self.max_num_seqs, self.max_num_batched_tokens, self.max_rows)
        assert min(limits) > 0 and self.max_model_len > 0
        assert self.prefill_chunk_size is None or self.prefill_chunk_size > 0
        assert self.prefill_chunk_size is None or self.chunked_prefill
