"""Safe reads of the small files of a model folder, which are untrusted input.

A file's type, size and location are checked before it is opened, and the depth of JSON before it is
walked. A link must point to a file of the same model. The callers check the fields.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from forge_jax.errors import CheckpointError

MIB = 2**20

# Each limit is several times the largest known file of a published model.
MAX_BYTES = {
    "config.json": 4 * MIB,
    "adapter_config.json": MIB,
    "generation_config.json": MIB,
    "hf_quant_config.json": 4 * MIB,
    "tokenizer.json": 64 * MIB,
    "tokenizer_config.json": 16 * MIB,
    "special_tokens_map.json": MIB,
    "chat_template.jinja": 128 * 2**10,
    "chat_template.json": MIB,
    "forge_jax.json": 32 * MIB,
    ".zarray": 64 * 2**10,
    "model.safetensors.index.json": 64 * MIB,
    "pytorch_model.bin.index.json": 64 * MIB,
}
MAX_DEPTH = 64  # nesting depth of JSON
GGUF_SUFFIX = ".gguf"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def read_text(file: Path, kind: str | None = None, *, root: Path | None = None) -> str:
    """Return the UTF-8 text of a file.

    Args:
      kind: the key of the size limit in `MAX_BYTES`; default: the file's name.
      root: as for `file_size`.

    Raises:
      CheckpointError: the file is too large, not a regular file, a link out of the model's folder,
        not UTF-8, or unreadable.
      FileNotFoundError: the file does not exist.
    """
    limit = MAX_BYTES[kind or file.name]
    try:
        size = file_size(file, root)
        if size > limit:
            raise CheckpointError(
                f"{file} has {size} bytes; at most {limit} are allowed for a file of its kind"
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
    """Return the JSON object in a file.

    Args:
      max_depth: the maximum number of levels of nesting.
      root: as for `file_size`.

    Raises:
      CheckpointError: as `read_text`, or the file is not a JSON object, or it is nested deeper than
        `max_depth`.
      FileNotFoundError: the file does not exist.
    """
    text = read_text(file, root=root)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: it is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must contain a JSON object, not {type(value).__name__}")
    if depth_exceeds(value, max_depth):
        raise CheckpointError(f"{file} is nested deeper than {max_depth} levels")
    return value


def file_size(file: Path, root: Path | None = None) -> int:
    """Return the size in bytes of a regular file of a model.

    Pipes and devices are rejected, because they have no size and may never end. Loops of links are
    rejected. Links to files outside the model are rejected, because a server could disclose their
    content.

    Args:
      root: the model's folder; default: the folder of the file.

    Raises:
      CheckpointError: the file is not a regular file of the model, or is a broken link.
      FileNotFoundError: the file does not exist.
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
    """Raise `CheckpointError` if the file is a link out of `root`.

    Snapshots in Hugging Face's cache (`models--ORG--NAME/snapshots/COMMIT`) may link to their
    model's `blobs`, two folders above.
    """
    target, folder = Path(os.path.realpath(file)), Path(os.path.realpath(root))
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parents[1] / "blobs")  # not if `blobs` itself is a link
    if any(target.is_relative_to(each) for each in allowed):
        return
    raise CheckpointError(
        f"{file} is a link to {target}, which is not in the model's folder: if it belongs to the "
        f"model, copy it (cp --remove-destination {target} {file})"
    )


def depth_exceeds(value: Any, limit: int) -> bool:
    """Return True if JSON is nested deeper than `limit` levels, without recursion."""
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
    """Return a value's repr for an error message, limited in length."""
    try:
        text = repr(value) if not isinstance(value, dict | list) or len(value) < 100 else "..."
    except ValueError:  # an integer of thousands of digits
        text = "a huge integer"
    return text if len(text) <= limit else f"{text[:limit]}..."
