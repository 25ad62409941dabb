"""Matrices of floats that are rounded to 8 or 4 bits as they are read, multiplied by plain XLA.

`--quantization` uses this if the CPU kernels cannot. Activations are not rounded. FP8 is E4M3
(Micikevicius et al. 2022, arXiv:2209.05433).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from forge_jax.errors import UnsupportedModelError
from forge_jax.weights.quantized import ROUTERS, QuantizedFormat, is_matrix
from forge_jax.weights.tensors import MIDDLE, PLAIN, Matrix, Scheme, Values
from forge_kernels.linear.quantized import FP8, FP8_MAX
from forge_kernels.threads import for_each

if TYPE_CHECKING:
    from forge_jax.checkpoint.matrix import StoredMatrix
    from forge_jax.models.weight_map import WeightMap

INT4_GROUPS = (128, 32, 16)  # columns; the first that divides a matrix is used
CHUNK = 2**20  # values per thread and call
NOT_ROUNDED = ("embedding.weight", "head.weight")  # rounding is too coarse for the vocabulary
# Errors in the decays of gated DeltaNet accumulate over the tokens, and the matrix is small.
# Published FP8 checkpoints also have it in floats.
STATE_GATES = ".delta.ba.weight"


def rounded_formats(weights: WeightMap, values: Values) -> dict[str, QuantizedFormat]:
    """Return the leaves to round, which are those of layers except routers and gates, and formats.

    Raises:
      UnsupportedModelError: no group size divides a matrix.
    """
    formats = {}
    for leaf, parts in weights.items():
        excluded = leaf in NOT_ROUNDED or leaf.endswith((*ROUTERS, STATE_GATES))
        if excluded or not is_matrix(leaf, parts):
            continue
        name, inputs = parts[0].name, parts[0].columns
        group = None
        if values == "int4":
            group = next((size for size in INT4_GROUPS if inputs % size == 0), None)
            if group is None:
                raise UnsupportedModelError(
                    f"--quantization int4: {name} has {inputs} columns, which is not a multiple of "
                    f"{INT4_GROUPS[-1]}: use int8 or fp8"
                )
        scheme = Scheme(layout=PLAIN, values=values, block=(1, group))
        formats[leaf] = QuantizedFormat(scheme, rounded=True)
    return formats


def round_matrix(stored: StoredMatrix, scheme: Scheme) -> Matrix:
    """Read a matrix [N, K] in parts, and round each row or group to its own scale.

    The largest absolute value of a group maps to the largest of the type, which is 127, 448, or 7
    for 4 bits. Values of 4 bits range from -7 to 7, so that 0 stays 0.
    """
    rows, inputs = stored.shape
    group = scheme.block[1] or inputs
    scale = np.empty((rows, inputs // group), np.float32)
    kind = {"int8": np.dtype(np.int8), "fp8": FP8, "int4": np.dtype(np.uint8)}[scheme.values]
    values = np.empty((rows, inputs), kind)
    most = {"int8": 127.0, "fp8": FP8_MAX, "int4": 7.0}[scheme.values]
    step = max(1, CHUNK // inputs)

    def round_some(first: int) -> None:
        some = np.empty((min(step, rows - first), inputs), np.float32)
        stored.read_rows(some, first)
        groups = some.reshape(len(some), -1, group)
        top = np.abs(groups).max(axis=2)
        ours = scale[first : first + step]
        np.divide(np.where(top == 0, most, top), np.float32(most), out=ours)
        groups /= ours[..., None]
        if scheme.values == "fp8":
            np.clip(some, -FP8_MAX, FP8_MAX, out=some)
        else:
            np.rint(some, out=some)
        if scheme.values == "int4":
            some += MIDDLE
        values[first : first + step] = some.astype(kind)

    for_each(round_some, range(0, rows, step))
    return Matrix(values, scale, None, None, None)
