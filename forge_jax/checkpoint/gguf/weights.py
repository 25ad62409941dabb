"""A tensor of a GGUF file with Hugging Face's name and layout, converted when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from forge_jax.checkpoint.gguf.reader import GGUFTensor
from forge_kernels.blocks import BlockValues, joined

CHUNK_ELEMENTS = 2**21  # decoded at once by one thread


@dataclass(frozen=True, eq=False)
class GGUFWeight:
    """A tensor as Hugging Face has it, converted when it is read.

    Attributes:
      name: Hugging Face's name.
      stored: the tensor in the file.
      num_heads: the number of heads whose rows are stored in pairs; 0: no pairs.
      stacked_heads: the number of heads if the file stacks queries, keys and values, [3, H, D].
        Hugging Face has them by head, [H, 3, D]; 0: the same order.
      offset: the number to subtract from the values.
      order: the row in the file of each row, which may be only some of them; None: see `num_heads`.
      other: a tensor of the same shape whose rows alternate with those of `stored`; None: no rows.
    """

    name: str
    stored: GGUFTensor
    num_heads: int = 0
    stacked_heads: int = 0
    offset: float = 0.0
    order: np.ndarray | None = None
    other: GGUFTensor | None = None

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *columns = self.stored.shape
        if self.order is not None:
            return (len(self.order), *columns)
        return (rows if self.other is None else 2 * rows, *columns)

    @cached_property
    def rows(self) -> np.ndarray | None:
        """The row in the file of each row of Hugging Face's; None if they are the same."""
        if self.order is not None:
            return self.order
        if self.stacked_heads:
            stacked = np.arange(self.shape[0]).reshape(3, self.stacked_heads, -1)
            return stacked.swapaxes(0, 1).reshape(-1)
        if not self.num_heads:
            return None
        pairs = np.arange(self.shape[0]).reshape(self.num_heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    def read_blocks(self, rows: np.ndarray) -> BlockValues:
        """Return the numbers and scales of some rows, i64[n], in Hugging Face's order.

        The values are the file's: a block never spans two rows, and nothing is rounded.
        """
        return self.stored.format.unpacked(self._blocks_of(rows))

    def _blocks_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the blocks of some rows, i64[n], in Hugging Face's order."""
        if self.other is None:
            return self.stored.blocks()[rows if self.rows is None else self.rows[rows]]
        pairs = [tensor.blocks()[rows // 2] for tensor in (self.stored, self.other)]
        return np.where((rows % 2 == 0)[:, None, None], *pairs)

    def read_rows(self, out: np.ndarray, first: int) -> None:
        """Decode some rows into `out`, cast to its type, one chunk at a time to save memory."""
        if len(self.shape) < 2:
            values = self.stored.read()
            values = values if self.rows is None else values[self.rows]
            values = values[first : first + len(out)]
            np.copyto(out, values - self.offset if self.offset else values, casting="unsafe")
            return
        assert not self.offset and len(self.shape) == 2, self.name
        blocks, format = self.stored.blocks(), self.stored.format
        step = max(1, CHUNK_ELEMENTS // self.shape[1])
        for begin in range(0, len(out), step):
            part = out[begin : begin + step]
            place = slice(first + begin, first + begin + len(part))
            if self.rows is None and self.other is None:
                chunk = blocks[place]
            else:
                chunk = self._blocks_of(np.arange(place.start, place.stop))
            with np.errstate(all="ignore"):  # values that are not finite are detected later
                np.copyto(part, format.values(chunk), casting="unsafe")


def read_blocks(weights: Sequence[GGUFWeight], rows: np.ndarray) -> BlockValues:
    """Return rows of matrices that are stacked vertically and whose types have the same blocks."""
    if len(weights) == 1:
        return weights[0].read_blocks(rows)
    ends = np.cumsum([weight.shape[0] for weight in weights])
    source = np.searchsorted(ends, rows, side="right")
    starts = ends - [weight.shape[0] for weight in weights]
    found = [
        weights[number].read_blocks(rows[source == number] - starts[number])
        for number in np.unique(source)
    ]
    back = np.argsort(np.argsort(source, kind="stable"), kind="stable")
    return joined(found).each(lambda array: array[back])
