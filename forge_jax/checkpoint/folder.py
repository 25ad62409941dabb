"""The tensors of a model: from a GGUF file, or a folder of safetensors or PyTorch .bin files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forge_jax.checkpoint.gguf import is_gguf, open_gguf
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.checkpoint.torch_bin import read_bin
from forge_jax.errors import CheckpointError
from forge_jax.host.files import read_json, short_repr
from forge_jax.weights.stored import StoredTensor, TensorSource

MAX_SHARDS = 10_000


@dataclass(frozen=True)
class _Format:
    index: str
    single: str
    read: Callable[[Path], dict[str, StoredTensor]]


FORMATS = (
    _Format("model.safetensors.index.json", "model.safetensors", read_header),
    _Format("pytorch_model.bin.index.json", "pytorch_model.bin", read_bin),
)


def open_checkpoint(folder: Path) -> Mapping[str, TensorSource]:
    """Return all tensors of a model folder or GGUF file.

    A folder has one file, or an index and its shards; safetensors are preferred to .bin files. The
    names of a GGUF file are translated to Hugging Face's. Only headers (of .bin files: directories
    and pickles) are read.

    Raises:
      CheckpointError: the files are missing or broken; the message names the file and the tensor.
    """
    if is_gguf(folder):
        return open_gguf(folder)
    for format in FORMATS:
        if _present(folder / format.index):
            return _open_shards(folder / format.index, format.read)
        if _present(folder / format.single):
            return format.read(folder / format.single)
    names = ", ".join(name for format in FORMATS for name in (format.single, format.index))
    raise CheckpointError(f"{folder} has no weights: expected one of {names}")


def _present(file: Path) -> bool:
    """Return True if the name exists, even as a broken link, which the reader reports."""
    return file.exists() or file.is_symlink()


def _open_shards(
    index: Path, read: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    shard_of = _read_index(index)
    shards: dict[str, dict[str, StoredTensor]] = {}
    held_by: dict[str, str] = {}
    for shard in dict.fromkeys(shard_of.values()):
        shards[shard] = read(index.parent / shard)
        for name in shards[shard]:
            if name in held_by:
                raise CheckpointError(
                    f"tensor {name!r} is in two shards of {index}: {held_by[name]} and {shard}"
                )
            held_by[name] = shard
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{index} lists {short_repr(name)} in {shard}, but it is not there"
            )
    return {name: shards[shard][name] for name, shard in shard_of.items()}


def _read_index(index: Path) -> dict[str, str]:
    """Return the file name of each tensor; all files are in the folder of the index."""
    try:
        shard_of = read_json(index, max_depth=4).get("weight_map")
    except FileNotFoundError:
        raise CheckpointError(f"{index} is missing: it is a broken link") from None
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{index} cannot be read: weight_map must map names to files")
    names = set()
    for name, shard in shard_of.items():
        if not isinstance(shard, str):
            raise CheckpointError(
                f"{index} cannot be read: the file of {short_repr(name)} must be a string"
            )
        names.add(shard)
    if len(names) > MAX_SHARDS:
        raise CheckpointError(f"{index} names {len(names)} files; the limit is {MAX_SHARDS}")
    for shard in names:
        if not shard or shard in (".", "..") or Path(shard).name != shard or "\0" in shard:
            raise CheckpointError(f"{index} names a file outside the folder: {short_repr(shard)}")
    return shard_of
