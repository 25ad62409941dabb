"""The shard of a quantized matrix that one of several devices holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forge_jax.weights.partition import Partition
from forge_jax.weights.quantized import QuantizedFormat
from forge_jax.weights.tensors import Matrix


def shard_of(
    matrix: Matrix, format: QuantizedFormat, partition: Partition | None, index: int
) -> Matrix:
    """Return the part of device `index`, with the values and scales of the whole matrix.

    Split inputs are split in stored column order. If that is not the order of x, a device has the
    columns of whole groups.
    """
    if partition is None:
        return matrix
    if partition.axis == -2:
        zero = None if matrix.zero is None else partition.shard(matrix.zero, index)
        values, scale = partition.shard(matrix.values, index), partition.shard(matrix.scale, index)
        return replace(matrix, values=values, scale=scale, zero=zero)
    columns, group = matrix.values.shape[1], format.group(partition.size)

    def of_groups(array: np.ndarray) -> np.ndarray:  # [N, G]
        if array.shape[1] == 1:  # one scale per row
            return array
        size = format.scheme.block[1]
        assert size is not None and columns <= array.shape[1] * size
        by_group = np.repeat(array, size // group, axis=1)
        return partition.of_groups(group).shard(by_group, index)

    return replace(
        matrix,
        values=partition.shard(matrix.values, index),
        scale=of_groups(matrix.scale),
        zero=None if matrix.zero is None else of_groups(matrix.zero),
        order=None if matrix.order is None else partition.shard(matrix.order, index),
    )
