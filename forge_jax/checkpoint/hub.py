"""Model lookup: the bundled model, a folder or GGUF file, or a Hugging Face Hub snapshot."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from forge_jax.checkpoint.gguf.split import first_files, part_files
from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import ModelError
from forge_jax.host.files import GGUF_SUFFIX, file_size

BUNDLED = "forge-tiny"
FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model"]
TORCH_FILES = ["pytorch_model.bin", "pytorch_model-*.bin"]  # only if there are no safetensors
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?", re.ASCII)
PROJECTORS = "*mmproj*"  # GGUF files with the vision part of a model


def resolve(model: str, revision: str | None = None) -> Path:
    """Return the folder or GGUF file of `model`; downloads a Hub id that is not cached.

    The cache is Hugging Face's own, and HF_HOME and HF_TOKEN have their usual meaning.

    Args:
      model: "forge-tiny", an existing folder or GGUF file, or a Hub id ("organization/name"). An
        existing path takes precedence. A folder without config.json may hold one GGUF model. The
        type or the name of a GGUF file of the Hub follows a colon ("organization/name:Q4_K_M").
      revision: branch, tag or commit of a Hub id.

    Raises:
      ModelError: the model does not exist or cannot be downloaded; the message has a remedy.
    """
    return local(model) or _download(model, revision)


def local(model: str) -> Path | None:
    """Return a folder or GGUF file that needs no download; None if `model` looks like a Hub id.

    Raises:
      ModelError: it is none of these.
    """
    if model == BUNDLED:
        folder = Path(str(importlib.resources.files("forge_jax.checkpoint"))) / "bundled" / BUNDLED
        if not (folder / "config.json").exists():
            raise ModelError(f"{BUNDLED} is not bundled with this installation: pass another model")
        return folder
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _only_gguf(path) or path
    if model and path.exists():
        if path.suffix != GGUF_SUFFIX:
            raise ModelError(
                f"{model} is not a {GGUF_SUFFIX} file: pass one, or the folder with config.json"
            )
        return path
    if not HUB_ID.fullmatch(model):
        raise ModelError(
            f"no model {model!r}: it is neither {BUNDLED}, nor an existing folder or {GGUF_SUFFIX} "
            f"file, nor a Hugging Face ID (organization/name){did_you_mean(model, _near(path))}"
        )
    return None


def _near(path: Path) -> list[str]:
    """Return likely corrections of a path: the bundled model, and models in the same folder."""
    try:
        beside = list(path.parent.iterdir())
    except OSError:
        return [BUNDLED]
    found = [each for each in beside if each.suffix == GGUF_SUFFIX or each.is_dir()]
    return [BUNDLED, *map(str, found)]


def _cached() -> list[str]:
    """Return the ids of the models in Hugging Face's cache."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]


def _only_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder without config.json, or None."""
    if (folder / "config.json").exists():
        return None
    files = first_files(file for file in folder.glob(f"*{GGUF_SUFFIX}") if file.is_file())
    if len(files) > 1:
        names = _listed(file.name for file in files)
        raise ModelError(f"{folder} has {len(files)} GGUF files: pass one of them ({names})")
    if not files:
        return None
    file_size(files[0], folder)  # rejects a link out of the folder
    return files[0]


def _listed(names: Iterable[object]) -> str:
    some = [str(name) for name in names]
    return ", ".join(some[:10]) + (", ..." if some[10:] else "")


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import errors

    model, _, kind = model.partition(":")
    at = f"{model} (revision {revision})" if revision else model
    try:
        return _gguf(model, kind, revision) if kind else _folder(model, revision)
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{at} is gated: accept its terms at https://huggingface.co/{model}, then set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{model} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"no model {model!r} on the Hugging Face Hub, and no folder with that name: check the "
            f"spelling, or set HF_TOKEN if it is private{did_you_mean(model, _cached())}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{at} is not in the cache and the Hugging Face Hub cannot be reached: go online, or "
            f"copy the model here and pass its folder{did_you_mean(model, _cached())}"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{model!r} is not a Hugging Face ID: {error}") from error
    except Exception as error:  # the types depend on the HTTP library that huggingface_hub uses
        raise ModelError(f"{at} could not be downloaded: {error}") from error


def _folder(model: str, revision: str | None) -> Path:
    import huggingface_hub

    def download(patterns: list[str]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns)
        )

    folder = download(FILES)
    if next(folder.glob("*.safetensors"), None) is None:
        download(FILES + TORCH_FILES)
        present = any(next(folder.glob(pattern), None) for pattern in TORCH_FILES)
        if not present and (names := _hub_ggufs(model, revision)):
            raise ModelError(
                f"{model} has no safetensors or .bin files, but GGUF files: append a type, such as "
                f"{model}:Q4_K_M (its files: {_listed(names)})"
            )
    return folder


def _gguf(model: str, kind: str, revision: str | None) -> Path:
    """Download the GGUF file of a type, such as "Q4_K_M", or of a name, with all its parts."""
    import huggingface_hub

    patterns = _patterns(kind)
    folder = Path(
        huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=[PROJECTORS]
        )
    )
    present = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.gguf")}
    matching = (file for name, file in present.items() if _matches(name, patterns))
    files = first_files(matching)
    if len(files) > 1:
        names = _listed(file.relative_to(folder).as_posix() for file in files)
        raise ModelError(
            f"{model} has {len(files)} GGUF files for {kind!r} ({names}): pass the name of one, as "
            f"in {model}:{files[0].name}"
        )
    if not files:
        names = _hub_ggufs(model, revision) or first_files(map(Path, present))
        has = f"its files: {_listed(names)}" if names else "it has none"
        raise ModelError(f"{model} has no GGUF file for {kind!r}: check the type ({has})")
    return files[0]


def _patterns(kind: str) -> list[str]:
    """Return the patterns of paths in a repository that end in a type, or are a file's parts."""
    if kind.endswith(GGUF_SUFFIX):
        names = [part.name for part in part_files(Path(kind))]
        return [*names, *(f"*/{name}" for name in names)]
    return [
        f"{start}{name}{end}.gguf"
        for name in dict.fromkeys((kind, kind.upper(), kind.lower()))
        for start in ("", "*-", "*.", "*/")
        for end in ("", "-?????-of-?????")
    ]


def _matches(path: str, patterns: list[str]) -> bool:
    wanted = any(fnmatchcase(path, pattern) for pattern in patterns)
    return wanted and not fnmatchcase(path, PROJECTORS)


def _hub_ggufs(model: str, revision: str | None) -> list[Path]:
    """Return the GGUF files of a repository; empty if it cannot be reached."""
    import huggingface_hub

    try:
        names = huggingface_hub.list_repo_files(model, revision=revision)
    except Exception:  # the caller reports a fault without this list
        return []
    found = (name for name in names if name.endswith(GGUF_SUFFIX))
    return first_files(Path(name) for name in found if not fnmatchcase(name, PROJECTORS))
