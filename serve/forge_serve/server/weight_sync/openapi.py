"""OpenAPI operations of the endpoints for trainers."""

from __future__ import annotations

from forge_serve.openapi.operation import NOT_READY, READS, WHOLE, Operation, Parameter
from forge_serve.openapi.schema import Schema
from forge_serve.server.weight_sync.forms import (
    Aborted,
    AbortRequest,
    FinishUpdateRequest,
    Paused,
    Sleeping,
    SyncStatus,
    UpdateWeightsRequest,
    WeightInfo,
    WeightUpdate,
    WorldSize,
)

OFF = (404, *NOT_READY)
REJECTS = (400, *OFF)
MODE: Schema = {"enum": ["abort", "wait", "keep"], "default": "abort"}
_MODE = Parameter("mode", "query", MODE, "treatment of unfinished requests")

OPERATIONS = {
    "pause": Operation(
        summary="Stop computing, for an update of the weights",
        answer=SyncStatus,
        errors=REJECTS,
        parameters=(_MODE,),
    ),
    "resume": Operation(summary="Continue after a pause", answer=SyncStatus, errors=REJECTS),
    "is_paused": Operation(summary="Check if the engine is paused", answer=Paused, errors=OFF),
    "abort_requests": Operation(
        summary="Abort some or all requests",
        request=AbortRequest,
        example={"request_ids": ["cmpl-1"]},
        answer=Aborted,
        errors=READS,
    ),
    "start_weight_update": Operation(
        summary="Begin an update of several parts", answer=WeightUpdate, errors=OFF
    ),
    "update_weights": Operation(
        summary="Replace the weights, or collect a part of them",
        request=UpdateWeightsRequest,
        example={"update_info": {"folder": "step-100"}, "weight_version": 100},
        answer=WeightUpdate,
        errors=READS,
    ),
    "finish_weight_update": Operation(
        summary="Install the collected weights",
        request=FinishUpdateRequest,
        example={"weight_version": 100},
        answer=WeightUpdate,
        errors=READS,
    ),
    "weight_info": Operation(
        summary="Get the version and size of the weights", answer=WeightInfo, errors=OFF
    ),
    "get_world_size": Operation(
        summary="Get the number of devices that share the model", answer=WorldSize, errors=OFF
    ),
    "reset_prefix_cache": Operation(
        summary="Empty the prefix cache",
        answer=SyncStatus,
        errors=REJECTS,
        parameters=(
            Parameter(
                "reset_running_requests",
                "query",
                {"type": "boolean", "default": False},
                "also recompute the KV cache of running requests",
            ),
        ),
    ),
    "sleep": Operation(
        summary="Pause, and free the device memory of weights and KV cache",
        answer=SyncStatus,
        errors=REJECTS,
        parameters=(
            Parameter(
                "level",
                "query",
                {**WHOLE, "minimum": 1, "maximum": 2, "default": 1},
                "1 copies the weights to host memory, 2 drops them",
            ),
            _MODE,
        ),
    ),
    "wake_up": Operation(
        summary="Restore weights and KV cache, and continue",
        answer=SyncStatus,
        errors=REJECTS,
        parameters=(
            Parameter(
                "tags",
                "query",
                {"type": "string", "enum": ["weights", "kv_cache", "weights,kv_cache"]},
                "arrays to restore; default: both",
            ),
        ),
    ),
    "is_sleeping": Operation(summary="Check if the engine sleeps", answer=Sleeping, errors=OFF),
    "init_weight_transfer_engine": Operation(
        summary="Rejected: the server has no device-to-device transport", errors=REJECTS
    ),
}
