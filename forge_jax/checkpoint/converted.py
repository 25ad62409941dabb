"""The record of a converted model folder: what its weights are, and what they can be served as.

`forge_jax.json` stands beside `config.json` and the tokenizer, and `weights/` is a checkpoint of
orbax (`orbax.py`): the leaves as the model holds them, fused, cast and packed. The record is
written last, so a folder that has none is not a converted one. Nothing here knows models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import jax
import ml_dtypes
import numpy as np

import forge_jax
from forge_jax.config import Rounding
from forge_jax.errors import CheckpointError
from forge_jax.host.files import read_json, short_repr
from forge_jax.weights.tensors import Values
from forge_kernels.linear.packed import FORMATS, LAYOUT, Format

FILE = "forge_jax.json"
WEIGHTS = "weights"
FORMAT, VERSION = "forge-jax-weights", 1
MAX_LEAVES = 200_000
MAX_SHARDS = 1024
# Of weights and activations, and of packed leaves.
_TYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{name: np.dtype(name) for name in ("float16", "float32")},
    **{name: np.dtype(name) for name in ("int8", "uint8", "uint16", "int32")},
}
_AGAIN = "convert the original model again"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What `forge_jax.json` says."""

    folder: Path
    dtype: str  # of weights and activations
    quantization: Rounding
    formats: Mapping[str, Format | None]  # the fields of `WeightFormats`; empty: plain matrices
    leaves: Mapping[str, jax.ShapeDtypeStruct]  # as in `Model.names` and `Model.leaves`
    shards: int = 1  # that share the model; `leaves` are those of one

    @property
    def packed(self) -> bool:
        """Whether the matrices are in the layout of the CPU kernels."""
        return bool(self.formats)

    @property
    def rounded(self) -> Values | None:
        """What the layers are rounded to, if not for the CPU kernels."""
        if self.quantization == "none" or (self.packed and self.quantization != "fp8"):
            return None
        return self.quantization

    def check_options(self, *, dtype: str, quantization: str = "none") -> None:
        """Whether the weights are what the options ask for; `auto` and `none` take what there is.

        Raises:
          CheckpointError: they are not, and are not changed any more.
        """
        if dtype not in ("auto", self.dtype):
            raise CheckpointError(
                f"--dtype {dtype}: {self.folder} was converted to {self.dtype}: leave it out, or "
                f"{_AGAIN} with it"
            )
        if quantization not in ("none", self.quantization):
            what = "without any" if self.quantization == "none" else f"with {self.quantization}"
            raise CheckpointError(
                f"--quantization {quantization}: {self.folder} was converted {what}: leave it out, "
                f"or {_AGAIN} with it"
            )

    def check_shards(self, shards: int) -> None:
        """Whether so many devices can share the weights: those of one can be cut, if not packed.

        Raises:
          CheckpointError: they cannot.
        """
        if self.shards == shards or (self.shards == 1 and not self.packed):
            return
        what = f"{self.folder} was converted for {self.shards} devices"
        if self.shards == 1:
            what = f"{self.folder} was converted for the CPU kernels of one device"
        raise CheckpointError(
            f"--tensor-parallel {shards}: {what}: use --tensor-parallel {self.shards}, or {_AGAIN} "
            f"with --tensor-parallel {shards}"
        )


def read_record(folder: Path) -> Record | None:
    """The record of a converted folder; None of any other folder or file.

    Raises:
      CheckpointError: it is broken, or of a version or packing that this forge-jax does not know.
    """
    if folder.is_file():
        return None
    file = folder / FILE
    try:
        values = read_json(file, max_depth=4)
    except FileNotFoundError:
        return None
    if values.get("format") != FORMAT:
        raise CheckpointError(
            f"{file}: format must be {FORMAT}, not {short_repr(values.get('format'))}"
        )
    version = values.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{file}: version {short_repr(version)} is not known here, only {VERSION}: {_AGAIN}"
        )
    dtype, quantization = values.get("dtype"), values.get("quantization")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise CheckpointError(f"{file}: dtype must be a type of floats, not {short_repr(dtype)}")
    if quantization not in get_args(Rounding):
        raise CheckpointError(
            f"{file}: quantization must be one of {', '.join(get_args(Rounding))}, not "
            f"{short_repr(quantization)}"
        )
    shards = values.get("shards", 1)
    if type(shards) is not int or not 1 <= shards <= MAX_SHARDS:
        raise CheckpointError(
            f"{file}: shards must be from 1 to {MAX_SHARDS}, not {short_repr(shards)}: {_AGAIN}"
        )
    return Record(
        folder=folder,
        dtype=dtype,
        quantization=cast(Rounding, quantization),
        formats=_read_formats(file, values.get("packing")),
        leaves=_read_leaves(file, values.get("leaves")),
        shards=shards,
    )


def write_record(record: Record) -> None:
    """Makes `record.folder` a converted one."""
    packing = {"layout": LAYOUT, **record.formats} if record.packed else None
    values = {
        "format": FORMAT,
        "version": VERSION,
        "forge_jax": forge_jax.__version__,
        "dtype": record.dtype,
        "quantization": record.quantization,
        "packing": packing,
        "shards": record.shards,
        "leaves": {
            name: {"shape": leaf.shape, "dtype": leaf.dtype.name}
            for name, leaf in record.leaves.items()
        },
    }
    (record.folder / FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _read_formats(file: Path, packing: Any) -> dict[str, Format | None]:
    if packing is None:
        return {}
    if not isinstance(packing, dict):
        raise CheckpointError(
            f"{file}: packing must be an object or null, not {short_repr(packing)}"
        )
    layout = packing.get("layout")
    if layout != LAYOUT:
        raise CheckpointError(
            f"{file}: its matrices are packed as {short_repr(layout)}, and the CPU kernels of this "
            f"forge-jax take {LAYOUT}: {_AGAIN}"
        )
    formats = {name: packing.get(name) for name in ("layers", "head", "embedding")}
    for name, format in formats.items():
        if format is not None and format not in FORMATS:
            raise CheckpointError(
                f"{file}: packing.{name} must be null or one of {', '.join(FORMATS)}, not "
                f"{short_repr(format)}"
            )
    return formats


def _read_leaves(file: Path, leaves: Any) -> dict[str, jax.ShapeDtypeStruct]:
    if not isinstance(leaves, dict) or not 0 < len(leaves) <= MAX_LEAVES:
        raise CheckpointError(f"{file}: leaves must be an object of 1 to {MAX_LEAVES} entries")
    found = {}
    for name, leaf in leaves.items():
        match leaf:
            case {"shape": [*shape], "dtype": str(dtype)} if dtype in _TYPES and all(
                type(size) is int and 0 <= size < 2**40 for size in shape
            ):
                found[name] = jax.ShapeDtypeStruct(tuple(shape), _TYPES[dtype])
            case _:
                raise CheckpointError(f"{file}: leaves: {short_repr(name)} is {short_repr(leaf)}")
    return found
