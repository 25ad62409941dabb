"""`WeightSync`: replaces the weights of a running engine from a folder or from shared memory.

Clients can only load folders below the operator's `--weight-sync-dir`. Without it, all of the
endpoints are disabled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_jax.errors import ModelError, RequestError
from forge_serve.errors import WeightSyncOffError
from forge_serve.server.weight_sync.forms import UpdateInfo, WeightInfo

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.engine.control import Control
    from forge_serve.server.weight_sync.forms import InFlight

TRANSPORTS = (
    "NCCL and device handles are not supported. Send update_info.folder, a folder below "
    "--weight-sync-dir, or update_info.shared_memory, a POSIX segment, with names, dtype_names, "
    "shapes and offsets"
)


class WeightSync:
    """Updates of one server's engine. Use it on the event loop.

    Between `start` and `finish`, `update` collects tensors, and `finish` installs them together.

    Args:
      folder: the folder below which clients may load folders. None: everything is disabled.
    """

    def __init__(self, folder: str | None):
        self._root = None if folder is None else Path(folder)
        self._collected: dict[str, Any] | Path | None = None  # None: no update has been started
        self._lock = asyncio.Lock()

    @property
    def enabled(self) -> bool:
        return self._root is not None

    def control(self, engine: AsyncEngine) -> Control:
        """Return the engine's control.

        Raises:
          WeightSyncOffError: weight sync is disabled.
        """
        self._checked_root()
        assert engine.control is not None  # `ServerConfig` rejects an engine process
        return engine.control

    def abort(self, engine: AsyncEngine, request_ids: Sequence[str] | None) -> int:
        """Abort requests by the ids of their responses, or all. Return the number of prompts."""
        self._checked_root()
        wanted = set(request_ids or ())
        found = [
            engine_id
            for engine_id in engine.streams.request_ids()
            if not wanted or not wanted.isdisjoint(_client_ids(engine_id))
        ]
        for engine_id in found:
            engine.abort(engine_id)
        return len(found)

    def start(self) -> None:
        """Begin an update of several parts. An unfinished one is discarded."""
        self._checked_root()
        self._collected = {}

    async def update(
        self, engine: AsyncEngine, given: UpdateInfo, version: int | None, in_flight: InFlight
    ) -> bool:
        """Install new weights, or collect them after `start`. Return True if they are installed.

        Raises:
          RequestError: the weights cannot be used. Nothing has changed.
          WeightSyncOffError: weight sync is disabled.
        """
        new = await self._read(given)
        collected = self._collected
        if collected is None:
            await self._install(engine, new, version, in_flight)
            return True
        if isinstance(new, Path):
            if collected:
                raise RequestError(
                    "update_info: a folder has all weights, so it cannot be combined with others",
                    param="update_info",
                )
            self._collected = new
            return False
        if isinstance(collected, Path) or collected.keys() & new.keys():
            raise RequestError(
                "update_info: this update already has some of these weights", param="update_info"
            )
        collected |= new
        return False

    async def finish(self, engine: AsyncEngine, version: int | None, in_flight: InFlight) -> None:
        """Install the collected weights.

        Raises:
          RequestError: nothing was collected, or the weights cannot be used. The update is over,
            and the engine has its old weights.
        """
        self._checked_root()
        collected, self._collected = self._collected, None
        if collected is None:
            raise RequestError("no update has been started: call POST /start_weight_update first")
        if not collected:
            raise RequestError("the update has no weights: call POST /update_weights before")
        await self._install(engine, collected, version, in_flight)

    def info(self, engine: AsyncEngine, model_name: str) -> WeightInfo:
        """Return the version and the size of the current weights."""
        self._checked_root()
        stats = engine.stats()
        try:
            model = engine.model  # type: ignore[attr-defined]  # an engine process is rejected
        except ModelError:  # a fake device
            return WeightInfo(stats.weight_version, model_name, 0, 0)
        return WeightInfo(stats.weight_version, model_name, len(model.names), model.param_bytes)

    async def _install(
        self,
        engine: AsyncEngine,
        weights: dict[str, Any] | Path,
        version: int | None,
        in_flight: InFlight,
    ) -> None:
        async with self._lock:
            try:
                await engine.update_weights(weights, version, in_flight=in_flight)
            except ModelError as error:  # the operator's path must not reach the client
                message = str(error).replace(f"{self._checked_root()}/", "")
                raise RequestError(f"update_info: {message}", param="update_info") from error
            except RequestError as error:
                if error.param != "version":
                    raise
                raise RequestError(f"weight_{error}", param="weight_version") from error

    async def _read(self, given: UpdateInfo) -> dict[str, Any] | Path:
        root = self._checked_root()
        if given.ipc_handles is not None or given.ipc_handles_pickled is not None:
            raise RequestError(f"update_info: {TRANSPORTS}", param="update_info")
        if (given.folder is None) == (given.shared_memory is None):
            both = given.folder is not None
            raise RequestError(
                "update_info: send either folder or shared_memory, not both"
                if both
                else f"update_info: {TRANSPORTS}",
                param="update_info",
            )
        if given.folder is not None:
            return await asyncio.to_thread(_find, root, given.folder)
        return await asyncio.to_thread(_read_shared, given)

    def _checked_root(self) -> Path:
        if self._root is None:
            raise WeightSyncOffError(
                "weight sync is disabled: start the server with --weight-sync-dir"
            )
        return self._root.resolve()


def _find(root: Path, name: str) -> Path:
    """Return a folder or GGUF file below `root`, with links resolved.

    Raises:
      RequestError: it or one of its files is missing or outside.
    """
    try:
        found = (root / name).resolve()
        inside = found != root and found.is_relative_to(root) and found.exists()
        if inside and found.is_dir():
            inside = all(each.resolve().is_relative_to(root) for each in found.rglob("*"))
    except (OSError, RuntimeError, ValueError):  # RuntimeError: a link loop; ValueError: a NUL byte
        inside = False
    if not inside:
        raise RequestError(
            "update_info.folder: no such folder below the server's --weight-sync-dir, or one of "
            "its files is a link to a place outside",
            param="update_info.folder",
        )
    return found


def _read_shared(given: UpdateInfo) -> dict[str, Any]:
    from forge_jax.checkpoint.shared_memory import SharedTensor, read_shared

    columns = (given.names, given.dtype_names, given.shapes, given.offsets)
    if None in columns or len({len(column or ()) for column in columns}) > 1:
        raise RequestError(
            "update_info: shared_memory needs names, dtype_names, shapes and offsets, with one "
            "entry for each tensor",
            param="update_info",
        )
    table = zip(*(column or () for column in columns), strict=True)
    tensors = [
        SharedTensor(name=name, dtype=dtype, shape=shape, offset=offset)
        for name, dtype, shape, offset in table
    ]
    assert given.shared_memory is not None
    try:
        return read_shared(given.shared_memory, tensors)
    except RequestError as error:
        raise RequestError(f"update_info.{error}", param=f"update_info.{error.param}") from error


def _client_ids(engine_id: str) -> tuple[str, str]:
    """Return the ids of a response and of its request. See `Generation` for the engine's ids."""
    response_id = engine_id.rsplit("-", 2)[0]
    return response_id, response_id.partition("-")[2]
