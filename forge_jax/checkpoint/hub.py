"""Finds a model's folder: the bundled one, one on disk, or a snapshot from the Hugging Face Hub."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

from forge_jax.errors import ModelError

BUNDLED = "forge-tiny"
FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model"]
TORCH_FILES = ["pytorch_model.bin", "pytorch_model-*.bin"]  # only where there is no safetensors
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def resolve(model: str, revision: str | None = None) -> Path:
    """The folder of `model`; downloads it if it is a Hugging Face id that is not in the cache.

    Args:
      model: "forge-tiny", an existing folder, or an id ("organisation/name"). A folder wins over an
        id.
      revision: branch, tag or commit of an id.

    Raises:
      ModelError: there is no such model, or it cannot be downloaded; the message says what to do.

    The cache is Hugging Face's own: HF_HOME and HF_TOKEN mean what they mean there.
    """
    if model == BUNDLED:
        folder = Path(str(importlib.resources.files("forge_jax"))) / "bundled" / BUNDLED
        if not (folder / "config.json").exists():
            raise ModelError(f"this installation does not bundle {BUNDLED}: give a folder or an id")
        return folder
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if model and path.exists():
        raise ModelError(
            f"{model} is a file: give the folder that holds config.json (GGUF is not supported yet)"
        )
    if not HUB_ID.fullmatch(model):
        raise ModelError(
            f"no model {model!r}: it is neither {BUNDLED}, nor an existing folder, nor a Hugging "
            "Face id (organisation/name)"
        )
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    at = f"{model} (revision {revision})" if revision else model
    try:
        folder = Path(
            huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=FILES)
        )
        if next(folder.glob("*.safetensors"), None) is None:
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=FILES + TORCH_FILES
            )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{at} is gated: accept its terms at https://huggingface.co/{model}, then set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{model} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"no model {model!r} on the Hugging Face Hub, nor a folder of that name; check the "
            "spelling, or set HF_TOKEN if it is private"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{at} is not in the cache and the Hugging Face Hub cannot be reached: connect, or "
            "copy the model here and give its folder"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{model!r} is not a Hugging Face id: {error}") from error
    except Exception as error:  # transport errors are those of whichever HTTP library it uses
        raise ModelError(f"{at} could not be downloaded: {error}") from error
    return folder
