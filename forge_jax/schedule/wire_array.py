"""`WireArray`: an array in a message to another process."""

from __future__ import annotations

import ml_dtypes
import msgspec
import numpy as np


class WireArray(msgspec.Struct, array_like=True, frozen=True):
    dtype: str  # such as "float32" or "bfloat16"
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> WireArray:
        return cls(array.dtype.name, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        """Return the array, read-only.

        Raises:
          ValueError: if the size of the data does not match type and shape.
          TypeError: if there is no such type.
        """
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        return np.frombuffer(self.data, dtype).reshape(self.shape)
