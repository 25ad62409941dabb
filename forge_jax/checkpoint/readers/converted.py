"""The reader of converted folders, which store a model's leaves as it holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.checkpoint import orbax
from forge_jax.checkpoint.converted import FILE, WEIGHTS, Record
from forge_jax.checkpoint.matrix import StoredMatrix
from forge_jax.checkpoint.readers.floats import float_shards
from forge_jax.checkpoint.readers.leaf import Shard
from forge_jax.checkpoint.readers.quantized import quantized_format, quantized_shards
from forge_jax.errors import CheckpointError
from forge_jax.host.files import short_repr
from forge_jax.models.decoder import Model
from forge_jax.models.registry import build_model
from forge_jax.models.weight_map import Tensor
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.ggml_formats import GGMLFormat
from forge_jax.weights.partition import Partition, axis_of, matrix_of, partition_of
from forge_jax.weights.quantized import QuantizedFormat
from forge_jax.weights.stored import StoredTensor
from forge_jax.weights.tensors import Matrix
from forge_kernels.blocks import one_level
from forge_kernels.linear import native_int4, unpack_int4
from forge_kernels.linear.files import PlainInFiles


@dataclass(frozen=True, eq=False)
class ConvertedReader:
    """The leaves of a converted folder.

    Attributes:
      model: the model to load.
      stored: the arrays by leaf name.
      held: the model in the folder: `model`, or the same for one device, which is then split.
    """

    model: Model
    stored: Mapping[str, StoredTensor]
    held: Model

    @classmethod
    def open(cls, model: Model, folder: Path, record: Record) -> ConvertedReader:
        """Check the record and the headers of all arrays.

        Raises:
          CheckpointError: they do not fit the model; the message lists the first five faults.
        """
        held = _held_model(model, folder, record)
        expected = dict(zip(held.names, held.leaves, strict=True))
        leaves = {
            name: (_described(record.leaves.get(name)), _described(expected.get(name)))
            for name in sorted(expected.keys() | record.leaves.keys())
        }
        faults = [
            f"leaf {short_repr(name)} is {found}, not {wanted}"
            for name, (found, wanted) in leaves.items()
            if found != wanted
        ]
        if faults:
            more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
            raise CheckpointError(
                f"{folder / FILE} does not match its config.json: " + "; ".join(faults[:5]) + more
            )
        stored = {
            name: jax.ShapeDtypeStruct(stored_shape(held, name), leaf.dtype)
            for name, leaf in expected.items()
            if model.stage is None or model.stage.owns(name)
        }
        return cls(model, orbax.open_arrays(folder / WEIGHTS, stored), held)

    @property
    def names(self) -> list[str]:
        """The leaves of the model, without second levels of scales that it has combined."""
        return [name for name in self.stored if name in self.model.names]

    def in_files(self, name: str) -> PlainInFiles | None:
        """Return a leaf's position in its file if C++ can read it, else None."""
        leaf = self.model.leaf(name)
        if leaf.dtype == jnp.int4 or self._second_level(name):  # stored in another form
            return None
        stored = StoredMatrix((Tensor(name, self.stored[name].shape),), self.stored)
        stretches = stored.stretches(np.dtype(leaf.dtype))
        return None if stretches is None else PlainInFiles(leaf.shape, leaf.dtype, stretches)

    def read(self, name: str, experts: range | None = None) -> np.ndarray:
        """Return a leaf, or all shards of it, or some experts of it."""
        second = self._second_level(name)
        by_group = None if second is None else self._some(second, experts)
        return self._in_form(name, self._some(name, experts), by_group)

    def _some(self, name: str, experts: range | None) -> np.ndarray:
        stored = self.stored[name]
        if experts is not None:
            of_expert = math.prod(stored.shape[1:]) * stored.dtype.itemsize
            offset = stored.offset + experts.start * of_expert
            stored = replace(stored, shape=(len(experts), *stored.shape[1:]), offset=offset)
        return _read(name, stored)

    def _second_level(self, name: str) -> str | None:
        """Return the leaf to combine a leaf of scales or minima with, if the model does."""
        prefix, _, part = name.rpartition(".")
        second = f"{prefix}.group_{part}"
        return second if second in self.stored and second not in self.model.names else None

    def _in_form(
        self, name: str, array: np.ndarray, by_group: np.ndarray | None = None
    ) -> np.ndarray:
        """Return a stored array in the type of the model's leaf: 4-bit values have two."""
        if by_group is not None:
            return one_level(array, by_group)
        if self.model.leaf(name).dtype != jnp.int4:
            return array
        format, shape = self.model.pieces[name]
        assert isinstance(format, QuantizedFormat | GGMLFormat)
        group = format.quantization(shape).group
        values = unpack_int4(array.reshape(-1, array.shape[-1]), group)
        return native_int4(values.reshape(*array.shape[:-1], -1))

    def shards(self, indices: Sequence[int]) -> Iterator[Shard]:
        """Yield the parts of all leaves that belong to the devices `indices`."""
        if self.held.shards == self.model.shards:
            for name in self.names:
                yield from self._stored_shards(name, indices)
            return
        for name in self.stored:
            partition = partition_of(matrix_of(name), self.model.spec, self.model.shards)
            if partition is None or not partition.by_expert:
                yield from self._split(name, partition, indices)
                continue
            for index in indices:
                yield from self._split(name, None, (index,), partition.experts(index))

    def _split(
        self,
        name: str,
        partition: Partition | None,
        indices: Sequence[int],
        experts: range | None = None,
    ) -> Iterator[Shard]:
        """Yield parts of a leaf of a folder for one device, or of some experts of it."""
        quantized = self.model.in_format(QuantizedFormat)
        if name in quantized:
            # A variable for the matrices would keep them alive while the next ones are read.
            yield from quantized_shards(
                self.model, name, self._matrices(name, experts), partition, indices
            )
        elif matrix_of(name) not in quantized:
            yield from float_shards(self.model, name, self.read(name, experts), partition, indices)

    def _stored_shards(self, name: str, indices: Sequence[int]) -> Iterator[Shard]:
        """Yield parts from a folder for the same number of devices, each read separately."""
        leaf, stored = self.held.leaf(name), self.stored[name]
        if len(stored.shape) == leaf.ndim:  # every device has all of it
            whole = self.read(name)
            yield from (Shard(name, index, whole) for index in indices)
            return
        second = self._second_level(name)
        for index in indices:
            by_group = None if second is None else self._part(second, index)
            yield Shard(name, index, self._in_form(name, self._part(name, index), by_group))

    def _part(self, name: str, index: int) -> np.ndarray:
        """Return the array of one device from a folder for several."""
        leaf, stored = self.held.leaf(name), self.stored[name]
        offset = stored.offset + index * leaf.size * leaf.dtype.itemsize
        return _read(name, replace(stored, shape=leaf.shape, offset=offset))

    def _matrices(self, name: str, experts: range | None) -> list[Matrix]:
        """Return a leaf's matrices, or those of `experts`, as they were in their checkpoint."""
        prefix, format = name.removesuffix("weight"), quantized_format(self.held, name)
        count = self.held.pieces[name].shape.experts
        arrays = {
            part: self.read(f"{prefix}{part}", experts)
            for part in ("weight", "scale", "zero", "order", "input_scale")
            if f"{prefix}{part}" in self.stored
        }
        if count is None:
            return [_matrix(format, arrays)]
        places = range(count if experts is None else len(experts))
        each = ({part: array[i] for part, array in arrays.items()} for i in places)
        return [_matrix(format, own) for own in each]


def _matrix(format: QuantizedFormat, arrays: Mapping[str, np.ndarray]) -> Matrix:
    values, scale = arrays["weight"], arrays["scale"]
    if format.scheme.values in ("int4", "mxfp4"):
        values = unpack_int4(values, 2 * values.shape[1] // scale.shape[1])
    input_scale = arrays["input_scale"][0] if "input_scale" in arrays else None
    return Matrix(values, scale, arrays.get("zero"), arrays.get("order"), input_scale)


def _held_model(model: Model, folder: Path, record: Record) -> Model:
    """Return the model that the folder holds.

    Raises:
      CheckpointError: it cannot be split for the devices of `model`.
    """
    record.check_shards(model.shards, expert_parallel=model.spec.expert_parallel)
    if record.shards == model.shards:
        native = any(leaf.dtype == jnp.int4 for leaf in model.leaves)
        return _stored_model(model, record, model.shards) if native else model.whole or model
    if model.in_format(GGMLFormat):
        raise CheckpointError(
            f"--tensor-parallel {model.shards}: {folder} has matrices in blocks for one device: "
            f"convert the original model again with --tensor-parallel {model.shards}"
        )
    return _stored_model(model, record, 1)


def _stored_model(model: Model, record: Record, shards: int) -> Model:
    """Return the model with its leaves as plain XLA stores them in files."""
    formats = WeightFormats(rounded=record.rounded)
    return build_model(model.spec, str(model.dtype), formats, shards)


def stored_shape(model: Model, name: str) -> tuple[int, ...]:
    """Return the shape of a leaf's array in a converted folder, with an axis of shards if split."""
    shape = model.leaf(name).shape
    return shape if axis_of(name, model.spec, model.shards) is None else (model.shards, *shape)


def _read(name: str, stored: StoredTensor) -> np.ndarray:
    return StoredMatrix((Tensor(name, stored.shape),), {name: stored}).read(
        stored.shape, stored.dtype
    )


def _described(leaf: jax.ShapeDtypeStruct | None) -> str:
    return "missing" if leaf is None else f"{leaf.dtype.name}{list(leaf.shape)}"
