"""The scheduler's units of work: a request, and its sequences (one per sample)."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from forge_jax.config import Pooling
from forge_jax.errors import ContextLengthError, RequestError
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.lifecycle import RUNNING, TRANSITIONS, WAITING, Status

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenIds(tuple[int, ...]):
    """Token IDs as plain ints with their bounds, so that range checks cost nothing.

    Attributes:
      low: the smallest id; 0 if empty.
      high: the largest id; -1 if empty.
    """

    low: int
    high: int

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        """Return an immutable copy of any integers, including NumPy's.

        Raises:
          RequestError: if an element is not an integer.
        """
        if isinstance(ids, TokenIds):
            return ids
        try:
            found = cls(map(operator.index, ids))
        except TypeError as error:
            raise RequestError("the prompt's token IDs must be integers", param="prompt") from error
        found.low, found.high = min(found, default=0), max(found, default=-1)
        return found


@dataclass(frozen=True, kw_only=True)
class LoraRef:
    """The adapter of a request, tied to one load of it. Reloads under the same name differ."""

    name: str
    place: int  # index in the device's arrays, from 1
    identity: str  # unique among all adapters the engine has ever had


@dataclass(frozen=True, kw_only=True)
class Request:
    """A client's request after tokenization. Prompt ids have been checked to be in range."""

    request_id: str
    prompt_token_ids: Seq[int]
    params: SamplingParams
    arrival_s: float = 0.0
    priority: int = 0  # lower is served first
    cache_salt: str = ""  # only requests with the same salt share prefix-cache blocks
    seed: int | None = None  # 64 bits; None: `params.seed`, or drawn by the scheduler

    # For a request that continues after a restart: each unfinished sample's tokens, by index.
    outputs: Mapping[int, Seq[int]] | None = None
    # Returns the prompt's pooled hidden states instead of an output; max_tokens is then 0.
    pooling: Pooling | None = None
    lora: LoraRef | None = None  # None: the base model


def cache_name(request: Request) -> str:
    """Return the namespace of a request's cached blocks and of learned draft tokens.

    It consists of the salt, the adapter and the steering, which change keys and values. A salt
    cannot collide with an adapter or steering: a salt that starts with a zero character gets
    another one in front.
    """
    name, adapter = request.cache_salt, request.lora
    if adapter is not None:
        name = f"\0lora {adapter.identity}\0{name}"
    elif name.startswith("\0"):
        name = f"\0{name}"
    steering = request.params.steered_by
    if not steering:
        return name
    parts = [(each.name, float(each.scale).hex(), each.layers) for each in steering]
    return f"\0steering {parts}\0{name}"


def output_room(request: Request, context: int, kv_tokens: int) -> int:
    """Return the maximum number of output tokens per sequence.

    Args:
      context: maximum tokens of a sequence, including output.
      kv_tokens: capacity of the KV cache in tokens, shared by all sequences.

    Raises:
      ContextLengthError: if the request can never fit the context or the KV cache.
      RequestError: if the prompt is empty.
    """
    prompt_len, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
    if not prompt_len:
        raise RequestError("the prompt is empty", param="prompt")
    if prompt_len + (max_tokens != 0) > context:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens; the context holds {context}, output included",
            param="prompt",
        )
    if prompt_len > kv_tokens:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens; the KV cache holds {kv_tokens}",
            param="prompt",
        )
    # The last output token is never computed, so it needs a position but no KV.
    room = min(context, kv_tokens + 1) - prompt_len
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}; together they "
            f"must be at most {prompt_len + room}",
            param="max_tokens",
        )
    return max_tokens


def first_returned(request: Request, index: int, num_output: int) -> int | None:
    """Return the first position of a sample whose activations are returned; None for no position.

    The activations of the prompt come with the first output token of sample 0. The activations at
    the position before an output token, from which it was sampled, come with that token.
    """
    returned = request.params.return_activations
    if returned is None:
        return None
    if returned.tokens == "all" and index == 0 and not num_output:
        return 0
    if request.params.max_tokens == 0:
        return None
    return len(request.prompt_token_ids) + num_output - 1


def sequence_seed(request_seed: int, index: int) -> int:
    """Return the 64-bit noise seed of sample `index`, which is independent of the others."""
    text = f"{request_seed % 2**64}:{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request, as the host tracks it.

    `tokens` are the tokens that the host has read: prompt, then output. `num_pending` more have
    been sampled by dispatched steps that the host has not read; their values are on the device.
    `num_computed` counts the tokens whose KV a dispatched step has written. Drafts count once
    accepted. `lifecycle.py` lists the statuses, and the method for each transition.

    A sequence that is requeued keeps its tokens and loses its slot and blocks. `epoch` counts the
    requeues, so that a late result is not applied to the blocks that the sequence holds now.
    """

    request: Request
    index: int
    seed: int
    # Tokens that end the output. Empty with ignore_eos and no stop_token_ids.
    stop_ids: frozenset[int]
    max_tokens: int  # resolved: never exceeds the context length
    tokens: list[int]
    max_blocks: int = 0
    leads: bool = True  # first of its request: the others may wait for its prompt
    scores_prompt: bool = False  # sequence 0 gets prompt logprobs
    order: int = 0  # arrival order, larger is newer
    queued_s: float = 0.0
    status: Status = Status.QUEUED  # changed only by the methods below
    slot: int | None = None
    blocks: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    num_pending: int = 0
    takes_drafts: bool = True
    num_drafted: int = 0  # verified drafts
    num_accepted: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    queue_s: float = 0.0  # from arrival to first admission
    told: bool = False  # True once `num_cached` and `queue_s` have been reported

    num_scored: int = 0  # prompt tokens whose logprobs have been read
    # Positions before this one need no activations: they have been read, or are not requested.
    # None: the request returns no activations.
    num_returned: int | None = None
    # Leading blocks that are in the prefix cache, or need not be registered.
    num_registered: int = 0
    num_preemptions: int = 0
    epoch: int = 0
    num_loads: int = 0  # loads from host memory that it has waited for
    load_began_s: float = 0.0  # when it began to wait for the latest
    num_cached_before: int | None = None  # tokens that the device had before its loads
    resume_after: int = -1  # a preempted sequence may run again after this step has been read
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    block_hashes: list[bytes] = field(default_factory=list[bytes])  # chained hashes of full blocks
    # Constant from here on, and read for every row of every step.
    key: tuple[str, int] = field(init=False)
    salt: str = field(init=False)
    # The next token's constraints depend on the last token, so the host must read it first.
    needs_host_token: bool = field(init=False)
    prompt_len: int = field(init=False)
    max_len: int = field(init=False)  # prompt and output
    pooling: Pooling | None = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.request.request_id, self.index)
        self.salt = cache_name(self.request)
        self.needs_host_token = self.request.params.needs_host_token
        self.pooling = self.request.pooling
        self.prompt_len = len(self.request.prompt_token_ids)
        self.max_len = self.prompt_len + self.max_tokens

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_output(self) -> int:
        """Output tokens that the host has read."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, including those that the host has not read."""
        return len(self.tokens) + self.num_pending

    @property
    def running(self) -> bool:
        """True if it holds a slot."""
        return self.status in RUNNING

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def scoring(self) -> bool:
        """True while prompt logprobs are missing: scoring rows must come first."""
        return self.scores_prompt and self.num_scored < self.prompt_len - 1

    # ---- lifecycle events -----------------------------------------------------------------------

    def follow(self) -> None:
        """Wait for another sample to compute the prompt."""
        self._become(Status.FOLLOWING)

    def hold(self) -> None:
        """Wait until admissions are no longer restricted to other sequences."""
        self._become(Status.HELD)

    def load(self) -> None:
        """Wait until blocks of its prefix have been copied from host memory."""
        self._become(Status.LOADING)

    def release(self) -> None:
        """Wait for a slot and blocks only, from now on."""
        assert self.status in WAITING and self.status is not Status.QUEUED, self.status
        self._become(Status.QUEUED)

    def admit(self, slot: int, blocks: list[int], *, num_shared: int, num_computed: int) -> None:
        """Take a slot and blocks. The first `num_shared` come from the prefix cache."""
        assert self.status is Status.QUEUED, self.status
        self._become(Status.PREFILLING)
        self.slot = slot
        self.blocks = blocks
        self.num_registered = num_shared
        self.num_computed = num_computed

    def prefill(self, num_tokens: int) -> bool:
        """Count a chunk as scheduled. Return True if its last row samples the next token."""
        assert self.status is Status.PREFILLING, self.status
        self.num_computed += num_tokens
        samples = self.num_computed == len(self.tokens) and self.max_tokens > 0
        self.num_pending += samples
        num_tokens = self.num_tokens
        if num_tokens < self.max_len:
            if num_tokens == self.num_computed + 1:
                self._become(Status.DECODING)
        elif self.num_computed >= self.prompt_len:
            self._become(Status.DRAINING)
        return samples

    def verify(self) -> None:
        """Count a row with drafts as scheduled. It yields at least one token."""
        self._become(Status.VERIFYING)
        self.num_computed += 1
        self.num_pending += 1

    def settle(self, num_accepted: int) -> None:
        """Count accepted drafts as computed, after the step that verified them."""
        assert self.status is Status.VERIFYING, self.status
        self._become(Status.DECODING)
        self.num_computed += num_accepted

    def requeue(self) -> None:
        """Release the slot and blocks, and wait for new ones."""
        assert self.slot is not None, self.status
        self._become(Status.QUEUED)
        self._let_go()

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        if self.slot is not None:
            self._let_go()
        self._become(Status.FINISHED)
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _let_go(self) -> None:
        self.slot = None
        self.blocks = []
        self.num_computed = 0
        self.num_registered = 0
        self.epoch += 1

    def _become(self, status: Status) -> None:
        assert status in TRANSITIONS[self.status], f"{self.key}: {self.status} to {status}"
        self.status = status


def decode(seqs: list[Sequence]) -> None:
    """Count the next token of each sequence as computed, and the one after as sampled.

    One function handles all sequences, because this runs for each of them in nearly every step.
    """
    decoding, draining = Status.DECODING, Status.DRAINING
    for seq in seqs:
        assert seq.status is decoding, seq.status
        seq.num_pending += 1
        seq.num_computed = num_computed = seq.num_computed + 1
        if num_computed + 1 >= seq.max_len:
            seq.status = draining
