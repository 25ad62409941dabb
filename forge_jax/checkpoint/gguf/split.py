"""A GGUF model in one file, or in the parts that `llama-gguf-split` writes.

Parts are named MODEL-00001-of-00003.gguf. The first part has the metadata of the model. Each part
has `split.no` (from 0), `split.count`, `split.tensors.count` (of the model) and some tensors:
https://github.com/ggml-org/llama.cpp/blob/master/tools/gguf-split/README.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from forge_jax.checkpoint.gguf.reader import GGUFFile, GGUFTensor, read_file
from forge_jax.errors import CheckpointError
from forge_jax.host.files import short_repr
from forge_jax.weights.stored import MAX_TENSORS

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)
_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
_MAX_PARTS = 10_000


def read_gguf(file: Path) -> GGUFFile:
    """Read the header of a file, or the headers of all parts of a model, given the first.

    Tensor data is mapped when it is read.

    Raises:
      CheckpointError: a file is not GGUF, is truncated, or has contradictory values. Also if a part
        is missing, or `file` is not the first part.
    """
    first = read_file(file)
    count = first.view.integer(_COUNT, 0, high=_MAX_PARTS)
    if count < 2:
        return first
    total = first.view.integer(_TENSORS, high=MAX_TENSORS)
    number = first.view.integer(_NUMBER, high=count - 1)
    files = part_files(file)
    if len(files) != count:
        raise CheckpointError(
            f"{file} is one of {count} parts of a model, so its name must end in "
            f"-{number + 1:05}-of-{count:05}.gguf: restore the names of all parts"
        )
    if number or files[0] != file:
        raise CheckpointError(f"{file} is not the first part of its model: pass {files[0].name}")
    tensors: dict[str, GGUFTensor] = {}
    for index, part in enumerate(files):
        header = _part(part, index, count) if index else first
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"the tensor {short_repr(name)} is in two parts of a model: "
                    f"{tensors[name].file} and {part}"
                )
            tensors[name] = tensor
    if len(tensors) != total:
        raise CheckpointError(
            f"{file} declares {total} tensors, but its {count} parts have {len(tensors)}: download "
            "all parts again"
        )
    return replace(first, tensors=tensors)


def _part(file: Path, index: int, count: int) -> GGUFFile:
    if not file.exists():
        raise CheckpointError(f"{file} is missing: it is part {index + 1} of {count}; download it")
    header = read_file(file)
    view = header.view
    if (view.integer(_NUMBER), view.integer(_COUNT)) != (index, count):
        raise CheckpointError(
            f"{file} declares that it is part {view.integer(_NUMBER) + 1} of "
            f"{view.integer(_COUNT)}, but is named part {index + 1} of {count}: download it again"
        )
    return header


def part_files(file: Path) -> list[Path]:
    """Return the files of a model, in order, from the name of one of them: all parts, or `file`."""
    found = _PART.fullmatch(file.name)
    if not found or not 1 <= int(found[2]) <= int(found[3]) <= _MAX_PARTS:
        return [file]
    count = int(found[3])
    return [file.with_name(f"{found[1]}-{k + 1:05}-of-{count:05}.gguf") for k in range(count)]


def first_files(files: Iterable[Path]) -> list[Path]:
    """Return the sorted files without later parts of a model whose first part is listed."""
    listed = sorted(files)
    return [
        file for file in listed if (first := part_files(file)[0]) == file or first not in listed
    ]
