"""What one of several devices has of a quantised matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forge_jax.weights.partition import Partition
from forge_jax.weights.quantized import QuantizedFormat
from forge_jax.weights.tensors import Matrix


def shard_of(
    matrix: Matrix, format: QuantizedFormat, partition: Partition | None, index: int
) -> Matrix:
    """The part of device `index`; its values and scales are those of the whole matrix.

    Of inputs that are cut the columns count in the order that they are stored in: where that is not
    the order of x, a device has those of whole groups.
    """
    if partition is None:
        return matrix
    if partition.axis == -2:
        zero = None if matrix.zero is None else partition.shard(matrix.zero, index)
        values, scale = partition.shard(matrix.values, index), partition.shard(matrix.scale, index)
        return replace(matrix, values=values, scale=scale, zero=zero)
    [(begin, end)] = partition.parts[index]
    columns, group = matrix.values.shape[1], format.group(partition.size)

    def of_groups(array: np.ndarray) -> np.ndarray:  # [N, G]
        if array.shape[1] == 1:  # of whole rows
            return array
        size = format.scheme.block[1]
        assert size is not None and columns <= array.shape[1] * size
        return np.repeat(array, size // group, axis=1)[:, begin // group : end // group]

    return replace(
        matrix,
        values=partition.shard(matrix.values, index),
        scale=of_groups(matrix.scale),
        zero=None if matrix.zero is None else of_groups(matrix.zero),
        order=None if matrix.order is None else matrix.order[begin:end],
    )
