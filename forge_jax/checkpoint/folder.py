"""All tensors of a model: a GGUF file, or a folder: safetensors first, else PyTorch's .bin."""

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
    """All tensors of a model folder: one file, or the shards that an index names.

    Or of a GGUF file, whose names are turned into Hugging Face's.

    Only headers (of .bin files: directories and pickles) are read.

    Raises:
      CheckpointError: no such files, or a broken one: it names the file and the tensor.
    """
    if is_gguf(folder):
        return open_gguf(folder)
    for format in FORMATS:
        if _present(folder / format.index):
            return _open_shards(folder / format.index, format.read)
        if _present(folder / format.single):
            return format.read(folder / format.single)
    names = ", ".join(name for format in FORMATS for name in (format.single, format.index))
    raise CheckpointError(f"{folder} has no weights: none of {names}")


def _present(file: Path) -> bool:
    """Whether there is anything of that name, be it a broken link: then the reader says so."""
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
                f"{index} says that {shard} holds {short_repr(name)}, but it does not"
            )
    return {name: shards[shard][name] for name, shard in shard_of.items()}


def _read_index(index: Path) -> dict[str, str]:
    """Tensor -> file name, of files that stand beside the index."""
    try:
        shard_of = read_json(index, max_depth=4).get("weight_map")
    except FileNotFoundError:
        raise CheckpointError(f"{index} is missing: it is a link to nothing") from None
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{index} cannot be read: it has no weight_map of names to files")
    names = set()
    for name, shard in shard_of.items():
        if not isinstance(shard, str):
            raise CheckpointError(
                f"{index} cannot be read: the file of {short_repr(name)} is not a string"
            )
        names.add(shard)
    if len(names) > MAX_SHARDS:
        raise CheckpointError(f"{index} names {len(names)} files; at most {MAX_SHARDS} are read")
    for shard in names:
        if not shard or shard in (".", "..") or Path(shard).name != shard or "\0" in shard:
            raise CheckpointError(f"{index} names a file outside the folder: {short_repr(shard)}")
    return shard_of
