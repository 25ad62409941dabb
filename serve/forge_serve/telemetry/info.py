"""Information about the server and its model, also in SGLang's and Ollama's fields.

Each field is listed explicitly. None contains a secret, or a path or the content of a file. The
exception is the name of the model as passed to the server, which /v1/models also returns.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET, UnsetType

from forge_jax import __version__
from forge_serve.openapi.payload import Payload

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine, EngineStats


class Version(Payload):
    version: str = __version__


class ModelInfo(Payload, kw_only=True):
    """Description of the model, in SGLang's fields."""

    model_path: str
    tokenizer_path: str | None
    served_model_name: str
    is_generation: bool = True
    architectures: list[str] | None
    max_model_len: int
    vocab_size: int
    has_image_understanding: bool = False
    has_audio_understanding: bool = False
    preferred_sampling_params: None = None
    weight_version: str = "default"


class WorkerLoad(Payload):
    """Current load."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float
    max_running_requests: int
    utilization: float


class ReplicaLoad(WorkerLoad, kw_only=True):
    """Current load of one replica."""

    dp_rank: int = 0
    timestamp: float


class Loads(Payload, kw_only=True):
    """Current load of each replica."""

    timestamp: str
    version: str = __version__
    loads: list[ReplicaLoad]


class ServerInfo(Payload, kw_only=True):
    """Capacity and current load of the server, in SGLang's fields."""

    model_id: str
    model_path: str
    served_model_name: str
    status: str
    version: str = __version__
    max_model_len: int
    context_length: int
    max_req_input_len: int
    max_total_num_tokens: int
    max_total_tokens: int
    max_running_requests: int
    max_num_reqs: int
    tp_size: int
    dp_size: int = 1
    disaggregation_mode: str = "null"
    system_fingerprint: str | None
    internal_states: list[WorkerLoad]


class OllamaDetails(Payload):
    """Details of a model; unknown fields are empty."""

    family: str
    families: list[str]
    parent_model: str = ""
    format: str = ""
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Payload, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str = ""
    details: OllamaDetails


class OllamaTags(Payload):
    """List of the models, in Ollama's fields."""

    models: list[OllamaModel]


class Load(Payload):
    """Number of running and waiting samples."""

    server_load: int


class Profile(Payload):
    """Name of a profile's folder."""

    profile: str


ServerState = Literal[
    "starting",
    "serving",
    "ready",
    "recovering",
    "unavailable",
    "stopping",
    "stopped",
    "failed",
    "stalled",
]


class Health(Payload):
    """State of the server. It serves requests if the status is serving or ready.

    `engines` has the state of each engine of --data-parallel.
    """

    status: ServerState
    engines: list[ServerState] | UnsetType = UNSET


class DetailedHealth(Health, kw_only=True):
    """State of the server with its model and, once the engine is loaded, the size of the queue."""

    model: str | None
    max_model_len: int | UnsetType = UNSET
    num_running: int | UnsetType = UNSET
    num_waiting: int | UnsetType = UNSET
    steps: int | UnsetType = UNSET


def model_info(engine: AsyncEngine, name: str) -> ModelInfo:
    """Return the description of the model, which is served as `name`."""
    return ModelInfo(
        model_path=engine.name,
        tokenizer_path=None if engine.tokenizer is None else engine.name,
        served_model_name=name,
        architectures=[engine.architecture] if engine.architecture else None,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
    )


def server_info(engine: AsyncEngine, name: str, state: str) -> ServerInfo:
    """Return the capacity and current load of the server."""
    stats = engine.stats()
    most = engine.max_model_len
    return ServerInfo(
        model_id=name,
        model_path=engine.name,
        served_model_name=name,
        status=state,
        max_model_len=most,
        context_length=most,
        max_req_input_len=most - 1,
        max_total_num_tokens=sum(each.limits.kv_tokens for each in engine.engines),
        max_total_tokens=sum(each.limits.kv_tokens for each in engine.engines),
        max_running_requests=stats.num_slots,
        max_num_reqs=stats.num_slots,
        tp_size=stats.tensor_parallel,
        dp_size=len(engine.engines),
        system_fingerprint=engine.system_fingerprint,
        internal_states=[WorkerLoad(**_load(each)) for each in engine.engines],
    )


@cache
def stats_type() -> type[EngineStats]:
    """Return the type of `stats`. It is created late, because its base has heavy imports."""
    from forge_jax.engine.async_engine import GroupStats

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class StatsAnswer(GroupStats):
        """Counters of the engine. Some are repeated under the names of other servers.

        `engines` has the counters of each engine of --data-parallel.
        """

        model: str
        running: int
        page_size: int
        average_batch_size: float  # sequences per step
        max_batch_size: int

    return StatsAnswer


def stats(engine: AsyncEngine, name: str) -> EngineStats:
    """Return the engine's counters, some of them also under the names of other servers."""
    found, engines = engine.stats(), engine.engines
    kind: Any = stats_type()
    return kind(
        **vars(found),
        model=name,
        running=found.num_running,
        page_size=found.block_size,
        average_batch_size=found.step_sequences / found.steps if found.steps else 0.0,
        max_batch_size=found.max_step_sequences,
        engines=[each.stats() for each in engines] if len(engines) > 1 else [],
    )


def loads(engine: AsyncEngine) -> Loads:
    """Return the load of each engine."""
    found = [
        ReplicaLoad(dp_rank=rank, timestamp=time.time(), **_load(each))
        for rank, each in enumerate(engine.engines)
    ]
    return Loads(timestamp=datetime.now(UTC).isoformat(), loads=found)


def ollama_tags(engine: AsyncEngine, names: Sequence[str], created_s: int) -> OllamaTags:
    """Return the models in Ollama's fields, as llama.cpp does. Unknown fields are empty."""
    family = engine.architecture or ""
    details = OllamaDetails(family, [family] if family else [])
    created = datetime.fromtimestamp(created_s, UTC).isoformat()
    return OllamaTags(
        [OllamaModel(name=name, model=name, modified_at=created, details=details) for name in names]
    )


def _load(engine: AsyncEngine) -> dict[str, Any]:
    stats, kv_tokens = engine.stats(), engine.limits.kv_tokens
    used = stats.num_used_blocks / stats.num_blocks
    queries = stats.prefix_cache_queries
    return {
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_total_reqs": stats.num_running + stats.num_waiting,
        "num_used_tokens": round(used * kv_tokens),
        "max_total_num_tokens": kv_tokens,
        "token_usage": used,
        "cache_hit_rate": stats.prefix_cache_hits / queries if queries else 0.0,
        "max_running_requests": stats.num_slots,
        "utilization": stats.num_running / stats.num_slots,
    }
