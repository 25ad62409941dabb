"""The record of a converted model folder: its weights and the options that they support.

`forge_jax.json` is next to `config.json` and the tokenizer. `weights/` is an Orbax checkpoint
(`orbax.py`) of the leaves as the model holds them: fused, cast and packed. The record is written
last, so a folder without one is not converted. This module does not depend on models.
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
# Types of weights, activations and packed leaves.
_TYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{name: np.dtype(name) for name in ("float16", "float32")},
    **{name: np.dtype(name) for name in ("int8", "uint8", "uint16", "int32")},
}
_AGAIN = "convert the original model again"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The contents of `forge_jax.json`."""

    folder: Path
    dtype: str  # type of weights and activations
    quantization: Rounding
    formats: Mapping[str, Format | None]  # the fields of `WeightFormats`, or {} if not packed
    leaves: Mapping[str, jax.ShapeDtypeStruct]  # as in `Model.names` and `Model.leaves`
    shards: int = 1  # the number of devices; `leaves` are one device's
    expert_parallel: bool = False  # True if a device has some experts whole

    @property
    def packed(self) -> bool:
        """True if the matrices are in the layout of the CPU kernels."""
        return bool(self.formats)

    @property
    def rounded(self) -> Values | None:
        """The type that the layers are rounded to, unless they are packed for the CPU kernels."""
        if self.quantization == "none" or (self.packed and self.quantization != "fp8"):
            return None
        return self.quantization

    def check_options(self, *, dtype: str, quantization: str = "none") -> None:
        """Check that the weights match the options; `auto` and `none` accept any weights.

        Raises:
          CheckpointError: they differ, and converted weights cannot be changed.
        """
        if dtype not in ("auto", self.dtype):
            raise CheckpointError(
                f"--dtype {dtype}: {self.folder} was converted to {self.dtype}: omit the option, "
                f"or {_AGAIN} with it"
            )
        if quantization not in ("none", self.quantization):
            what = "without any" if self.quantization == "none" else f"with {self.quantization}"
            raise CheckpointError(
                f"--quantization {quantization}: {self.folder} was converted {what}: omit the "
                f"option, or {_AGAIN} with it"
            )

    def check_shards(self, shards: int, *, expert_parallel: bool = False) -> None:
        """Check that `shards` devices can share the weights, with or without expert parallelism.

        Weights for one device can be split unless they are packed.

        Raises:
          CheckpointError: they cannot.
        """
        if self.shards == 1 and (shards == 1 or not self.packed):
            return
        if self.shards == shards and self.expert_parallel != expert_parallel:
            has, omit = ("without", "omit") if expert_parallel else ("with", "use")
            raise CheckpointError(
                f"{self.folder} was converted {has} --expert-parallel: {omit} the option, or "
                f"{_AGAIN} {'with' if expert_parallel else 'without'} it"
            )
        if self.shards == shards:
            return
        what = f"{self.folder} was converted for {self.shards} devices"
        if self.shards == 1:
            what = f"{self.folder} was converted for the CPU kernels of one device"
        raise CheckpointError(
            f"--tensor-parallel {shards}: {what}: use --tensor-parallel {self.shards}, or {_AGAIN} "
            f"with --tensor-parallel {shards}"
        )


def read_record(folder: Path) -> Record | None:
    """Return the record of a converted folder, or None for any other folder or file.

    Raises:
      CheckpointError: the record is broken, or its version or packing is not supported.
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
            f"{file}: format must be {FORMAT}, got {short_repr(values.get('format'))}"
        )
    version = values.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{file}: version must be {VERSION}, got {short_repr(version)}: {_AGAIN}"
        )
    dtype, quantization = values.get("dtype"), values.get("quantization")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise CheckpointError(f"{file}: dtype must be a float type, got {short_repr(dtype)}")
    if quantization not in get_args(Rounding):
        raise CheckpointError(
            f"{file}: quantization must be one of {', '.join(get_args(Rounding))}, got "
            f"{short_repr(quantization)}"
        )
    expert_parallel = values.get("expert_parallel", False)
    if type(expert_parallel) is not bool:
        raise CheckpointError(
            f"{file}: expert_parallel must be true or false, got {short_repr(expert_parallel)}: "
            f"{_AGAIN}"
        )
    shards = values.get("shards", 1)
    if type(shards) is not int or not 1 <= shards <= MAX_SHARDS:
        raise CheckpointError(
            f"{file}: shards must be from 1 to {MAX_SHARDS}, got {short_repr(shards)}: {_AGAIN}"
        )
    return Record(
        folder=folder,
        dtype=dtype,
        quantization=cast(Rounding, quantization),
        formats=_read_formats(file, values.get("packing")),
        leaves=_read_leaves(file, values.get("leaves")),
        shards=shards,
        expert_parallel=expert_parallel,
    )


def write_record(record: Record) -> None:
    """Write `forge_jax.json`, which marks `record.folder` as converted."""
    packing = {"layout": LAYOUT, **record.formats} if record.packed else None
    values = {
        "format": FORMAT,
        "version": VERSION,
        "forge_jax": forge_jax.__version__,
        "dtype": record.dtype,
        "quantization": record.quantization,
        "packing": packing,
        "shards": record.shards,
        "expert_parallel": record.expert_parallel,
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
            f"{file}: packing must be an object or null, got {short_repr(packing)}"
        )
    layout = packing.get("layout")
    if layout != LAYOUT:
        raise CheckpointError(
            f"{file}: packing.layout must be {LAYOUT} for the CPU kernels of this forge-jax, got "
            f"{short_repr(layout)}: {_AGAIN}"
        )
    formats = {name: packing.get(name) for name in ("layers", "head", "embedding")}
    for name, format in formats.items():
        if format is not None and format not in FORMATS:
            raise CheckpointError(
                f"{file}: packing.{name} must be null or one of {', '.join(FORMATS)}, got "
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
                raise CheckpointError(
                    f"{file}: leaves: {short_repr(name)} must have a shape and a dtype, got "
                    f"{short_repr(leaf)}"
                )
    return found
