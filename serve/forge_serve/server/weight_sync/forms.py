"""Bodies of the weight sync endpoints, and their responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from forge_serve.openapi.payload import Payload

InFlight = Literal["keep", "restart", "abort"]
_UNSUPPORTED = msgspec.Meta(description="Rejected: the server has no device-to-device transport.")


class UpdateInfo(msgspec.Struct, kw_only=True):
    """New weights in a folder, or in a shared memory segment with a table of its tensors."""

    folder: Annotated[
        str | None,
        msgspec.Meta(description="A model folder below --weight-sync-dir, or a GGUF file."),
    ] = None
    shared_memory: Annotated[
        str | None, msgspec.Meta(description="The name of a POSIX shared memory segment.")
    ] = None
    names: Annotated[
        list[str] | None,
        msgspec.Meta(description="The tensors' names, as in the checkpoint or the model."),
    ] = None
    dtype_names: Annotated[
        list[str] | None, msgspec.Meta(description="Their types, such as bfloat16.")
    ] = None
    shapes: list[list[int]] | None = None
    offsets: Annotated[
        list[int] | None,
        msgspec.Meta(description="The position of each tensor's first byte in the segment."),
    ] = None
    packed: Annotated[bool | None, _UNSUPPORTED] = None
    ipc_handles: Annotated[Any, _UNSUPPORTED] = None
    ipc_handles_pickled: Annotated[Any, _UNSUPPORTED] = None


class UpdateWeightsRequest(msgspec.Struct, kw_only=True):
    """Body of POST /update_weights."""

    update_info: UpdateInfo
    weight_version: Annotated[
        int | None,
        msgspec.Meta(description="Above the current version. Default: the next number."),
    ] = None
    in_flight: Annotated[
        InFlight, msgspec.Meta(description="Treatment of unfinished requests.")
    ] = "keep"


class FinishUpdateRequest(msgspec.Struct, kw_only=True):
    """Body of POST /finish_weight_update."""

    weight_version: int | None = None
    in_flight: InFlight = "keep"


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of POST /abort_requests."""

    request_ids: Annotated[
        list[str] | None,
        msgspec.Meta(description="IDs of responses or requests. Default: all requests."),
    ] = None


class SyncStatus(Payload):
    """The new state: paused, resumed, sleeping, awake or reset."""

    status: str


class Aborted(Payload):
    """Number of aborted prompts."""

    status: str
    aborted: int


class Paused(Payload):
    is_paused: bool


class Sleeping(Payload):
    is_sleeping: bool


class WeightUpdate(Payload):
    """Result of a step of an update, with the version of the current weights."""

    message: str
    weight_version: int


class WeightInfo(Payload):
    """The current weights. Without a model, the number of leaves and of bytes is 0."""

    weight_version: int
    model: str
    num_leaves: int
    num_bytes: int


class WorldSize(Payload):
    """Number of devices that share the model."""

    world_size: int
