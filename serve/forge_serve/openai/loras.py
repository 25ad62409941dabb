"""Loading and unloading of LoRA adapters over HTTP, in vLLM's protocol.

Clients can only load adapters from folders below the operator's `--lora-folder`, and none if it is
not set.
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
    """Body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: Annotated[
        bool | None,
        msgspec.Meta(
            description="Rejected: not supported; unload the adapter and load it again.",
            extra_json_schema={"enum": [False, None]},
        ),
    ] = None


class UnloadLoraRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # ignored, because names identify adapters


async def load(
    engine: AsyncEngine, request: LoadLoraRequest, folder: str | None, model_name: str
) -> str:
    """Load an adapter, and return the message for the client.

    Args:
      folder: the folder of all adapters; None: clients cannot load any.
      model_name: the base model's name, which no adapter can have.

    Raises:
      UnknownAdapterError: the adapter's folder does not exist.
      RequestError: the adapter cannot be loaded.
    """
    if request.load_inplace:
        raise RequestError(
            "load_inplace is not supported: unload the adapter and load it again",
            param="load_inplace",
        )
    if request.lora_name == model_name:
        raise RequestError(
            "lora_name must differ from the name of the served model", param="lora_name"
        )
    root, path = _find(_allowed(folder), request.lora_path)
    try:
        await engine.load_lora(request.lora_name, str(path))
    except RequestError as error:  # the operator's path must not reach the client
        raise RequestError(str(error).replace(f"{root}/", ""), param=error.param) from error
    return f"Success: LoRA adapter '{request.lora_name}' added successfully."


async def unload(engine: AsyncEngine, request: UnloadLoraRequest, folder: str | None) -> str:
    """Unload an adapter, and return the message for the client.

    Raises:
      UnknownAdapterError: no adapter with this name is loaded.
      RequestError: unfinished requests use the adapter.
    """
    _allowed(folder)
    if all(adapter.name != request.lora_name for adapter in engine.loras):
        raise UnknownAdapterError("no LoRA adapter with this name is loaded", param="lora_name")
    await engine.unload_lora(request.lora_name)
    return f"Success: LoRA adapter '{request.lora_name}' removed successfully."


def shown_path(path: str, folder: str | None) -> str:
    """Return an adapter's path, relative to the operator's folder if it is inside."""
    if folder is not None:
        root = Path(folder).resolve()
        if Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root))
    return path


def _allowed(folder: str | None) -> Path:
    if folder is None:
        raise RequestError(
            "loading and unloading LoRA adapters is disabled: start the server with --lora-folder"
        )
    return Path(folder).resolve()


def _find(root: Path, path: str) -> tuple[Path, Path]:
    """Return the folder of all adapters and the adapter's own, with links resolved.

    Raises:
      UnknownAdapterError: the adapter's folder or one of its files is missing or outside.
    """
    try:
        found = (root / path).resolve()
        inside = found != root and found.is_dir()
        for place in (found, found / ADAPTER_CONFIG, found / ADAPTER_WEIGHTS):
            inside = inside and place.resolve().is_relative_to(root)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: a link loop; ValueError: a NUL byte
        inside = False
    if not inside:
        raise UnknownAdapterError(
            "lora_path: no such folder below the server's --lora-folder", param="lora_path"
        )
    return root, found
