"""Events of the prefix cache, from which a router tracks the blocks that an engine holds.

The structs encode to the MessagePack arrays of vLLM's KV events.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

import msgspec

# vLLM's names of the device's memory, which routers expect on CPUs too, and of the host's.
type Medium = Literal["GPU", "CPU"]
MEDIUM: Medium = "GPU"


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Consecutive blocks of one sequence have entered the prefix cache, or host memory.

    An event of host memory (medium "CPU") has one block, without parent and tokens, as in vLLM. The
    block's event with medium "GPU" had them.

    Attributes:
      parent_block_hash: hash of the block before the first; None if the first starts the sequence.
      token_ids: the tokens of all blocks, in order.
      block_size: tokens per block.
      lora_id: always None, because vLLM has deprecated it.
      lora_name: the adapter's name; None for the base model.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Blocks have been evicted from the device, or dropped from host memory."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The prefix cache is empty."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def public_hash(block_hash: bytes) -> int:
    """Return the last 64 bits of a block's hash, as vLLM publishes hashes by default."""
    return int.from_bytes(block_hash[-8:], "big")


class CacheEvents:
    """The events of a block pool that have not been taken, in order."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def stored(
        self,
        hashes: Seq[bytes],
        parent: bytes | None,
        tokens: list[int],
        block_size: int,
        lora_name: str | None,
    ) -> None:
        """Record consecutive blocks, whose tokens are `tokens`."""
        self._events.append(
            BlockStored(
                block_hashes=[public_hash(each) for each in hashes],
                parent_block_hash=None if parent is None else public_hash(parent),
                token_ids=tokens,
                block_size=block_size,
                lora_name=lora_name,
            )
        )

    def copied(self, block_hash: bytes, block_size: int) -> None:
        """Record a block that is in host memory from now on."""
        self._events.append(
            BlockStored(
                block_hashes=[public_hash(block_hash)],
                parent_block_hash=None,
                token_ids=[],
                block_size=block_size,
                medium="CPU",
            )
        )

    def removed(self, block_hash: bytes, medium: Medium = MEDIUM) -> None:
        """Record an eviction. Consecutive evictions are one event."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(public_hash(block_hash))
        else:
            self._events.append(BlockRemoved([public_hash(block_hash)], medium))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
