"""The small files of a model folder, read as what they are: input from a stranger.

A file's kind, size and place are checked before it is opened, the depth of JSON before anything
walks it. A link must lead to a file of the same model. What a field means, and which values are
right, is its reader's matter. Nothing here runs anything.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from forge_jax.errors import CheckpointError

MIB = 2**20

# Each is several times the largest that is known of any published model.
MAX_BYTES = {
    "config.json": 4 * MIB,
    "adapter_config.json": MIB,
    "generation_config.json": MIB,
    "tokenizer.json": 64 * MIB,
    "tokenizer_config.json": 16 * MIB,
    "special_tokens_map.json": MIB,
    "chat_template.jinja": 128 * 2**10,
    "forge_jax.json": 32 * MIB,
    ".zarray": 64 * 2**10,
    "model.safetensors.index.json": 64 * MIB,
    "pytorch_model.bin.index.json": 64 * MIB,
}
MAX_DEPTH = 64  # of JSON
GGUF_SUFFIX = ".gguf"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def read_text(file: Path, kind: str | None = None, *, root: Path | None = None) -> str:
    """The UTF-8 text of a file, no larger than files of its `kind` (by default its name) may be.

    Args:
      root: as `file_size`.

    Raises:
      CheckpointError: it is too large, no ordinary file, a link out of the model's folder, not
        UTF-8, or cannot be read.
      FileNotFoundError: there is no such file.
    """
    limit = MAX_BYTES[kind or file.name]
    try:
        size = file_size(file, root)
        if size > limit:
            raise CheckpointError(
                f"{file} has {size} bytes; at most {limit} are read of a file of its kind"
            )
        with file.open("rb") as stream:
            return stream.read(size).decode("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def read_json(
    file: Path, *, max_depth: int = MAX_DEPTH, root: Path | None = None
) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
      root: as `file_size`.

    Raises:
      CheckpointError: as `read_text`, or it holds no JSON object, or one nested deeper than
        `max_depth`.
      FileNotFoundError: there is no such file.
    """
    text = read_text(file, root=root)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: it is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(value).__name__}")
    if depth_exceeds(value, max_depth):
        raise CheckpointError(f"{file} is nested deeper than {max_depth} levels")
    return value


def file_size(file: Path, root: Path | None = None) -> int:
    """Return the bytes of an ordinary file of a model.

    A pipe or a device has no size and may never end: it is refused. So is a loop of links, and a
    link to a file that is not the model's, whose content a server would then give away.

    Args:
      root: the model's folder; default: the folder of the file.

    Raises:
      CheckpointError: it is not an ordinary file of the model, or a link to none.
      FileNotFoundError: there is no such file.
    """
    try:
        found = os.stat(file)
    except FileNotFoundError:
        if file.is_symlink():
            raise CheckpointError(
                f"{file} is a link to {os.readlink(file)}, which does not exist: "
                "copy the file there"
            ) from None
        raise
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file} cannot be read: it is not an ordinary file")
    _check_inside(file, file.parent if root is None else root)
    return found.st_size


def _check_inside(file: Path, root: Path) -> None:
    """Raise `CheckpointError` if links lead from the file out of `root`.

    A snapshot in Hugging Face's cache (`models--ORG--NAME/snapshots/COMMIT`) has links to the blobs
    of its model, two folders above.
    """
    target, folder = Path(os.path.realpath(file)), Path(os.path.realpath(root))
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parents[1] / "blobs")  # if that is a link, it is none of these
    if any(target.is_relative_to(each) for each in allowed):
        return
    raise CheckpointError(
        f"{file} is a link to {target}, which is not in the model's folder: if the file is the "
        f"model's, copy it there (cp --remove-destination {target} {file})"
    )


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether JSON is nested deeper than `limit` levels; walks it level by level."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def short_repr(value: Any, limit: int = 80) -> str:
    """A value from a file as an error message shows it: never long."""
    try:
        text = repr(value) if not isinstance(value, dict | list) or len(value) < 100 else "..."
    except ValueError:  # an integer of thousands of digits
        text = "a huge integer"
    return text if len(text) <= limit else f"{text[:limit]}..."
