"""LoRA adapters over HTTP: loaded and unloaded in vLLM's words, from one folder of the operator's.

A client names a folder below `--lora-folder`, and nothing else of the machine: without the flag no
client loads anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from forge_jax.errors import RequestError
from forge_jax.host.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from forge_serve.errors import UnknownAdapterError

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine


class LoadLoraRequest(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: Annotated[
        bool | None,
        msgspec.Meta(
            description="refused: unload the adapter, and load it again",
            extra_json_schema={"enum": [False, None]},
        ),
    ] = None


class UnloadLoraRequest(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None  # no effect: the name says it


async def load(
    engine: AsyncEngine, request: LoadLoraRequest, folder: str | None, model_name: str
) -> str:
    """Loads an adapter; what the client is told.

    Args:
      folder: where adapters may be; None: clients load none.
      model_name: that of the model itself, which no adapter can have.

    Raises:
      UnknownAdapterError: there is no such folder.
      RequestError: it cannot be loaded.
    """
    if request.load_inplace:
        raise RequestError(
            "load_inplace is not supported: unload the adapter, and load it again",
            param="load_inplace",
        )
    if request.lora_name == model_name:
        raise RequestError("lora_name: the model itself has this name", param="lora_name")
    root, path = _find(_allowed(folder), request.lora_path)
    try:
        await engine.load_lora(request.lora_name, str(path))
    except RequestError as error:  # where the operator keeps it is not the client's to know
        raise RequestError(str(error).replace(f"{root}/", ""), param=error.param) from error
    return f"Success: LoRA adapter '{request.lora_name}' added successfully."


async def unload(engine: AsyncEngine, request: UnloadLoraRequest, folder: str | None) -> str:
    """Unloads an adapter; what the client is told.

    Raises:
      UnknownAdapterError: there is none of the name.
      RequestError: requests that have not ended take it.
    """
    _allowed(folder)
    if all(adapter.name != request.lora_name for adapter in engine.loras):
        raise UnknownAdapterError("there is no LoRA adapter of this name", param="lora_name")
    await engine.unload_lora(request.lora_name)
    return f"Success: LoRA adapter '{request.lora_name}' removed successfully."


def shown_path(path: str, folder: str | None) -> str:
    """An adapter's path as it was given: below the operator's folder it begins there."""
    if folder is not None:
        root = Path(folder).resolve()
        if Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root))
    return path


def _allowed(folder: str | None) -> Path:
    if folder is None:
        raise RequestError(
            "clients neither load nor unload LoRA adapters here: the server has no --lora-folder"
        )
    return Path(folder).resolve()


def _find(root: Path, path: str) -> tuple[Path, Path]:
    """The folder of all adapters and that of one, links resolved; nothing of it lies elsewhere."""
    try:
        found = (root / path).resolve()
        inside = found != root and found.is_dir()
        for place in (found, found / ADAPTER_CONFIG, found / ADAPTER_WEIGHTS):
            inside = inside and place.resolve().is_relative_to(root)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a ring; ValueError: \0
        inside = False
    if not inside:
        raise UnknownAdapterError(
            "there is no such folder in the server's folder of LoRA adapters", param="lora_path"
        )
    return root, found
