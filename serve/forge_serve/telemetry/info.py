"""What routers ask of a worker: /server_info, /model_info and /v1/loads, in SGLang's words.

The fields are chosen one by one: none of them is a secret, a path of a file or its content, but for
the name of the model as the server was given it, which /v1/models tells as well.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from forge_jax import __version__

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine


def model_info(engine: AsyncEngine, name: str) -> dict[str, Any]:
    """The model, which is served as `name`."""
    return {
        "model_path": engine.name,
        "tokenizer_path": None if engine.tokenizer is None else engine.name,
        "served_model_name": name,
        "is_generation": True,
        "architectures": [engine.architecture] if engine.architecture else None,
        "max_model_len": engine.max_model_len,
        "vocab_size": engine.vocab_size,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }


def server_info(engine: AsyncEngine, name: str, state: str) -> dict[str, Any]:
    """What the server can hold, and what it does now."""
    stats = engine.stats()
    most = engine.max_model_len
    return {
        "model_id": name,
        "model_path": engine.name,
        "served_model_name": name,
        "status": state,
        "version": __version__,
        "max_model_len": most,
        "context_length": most,
        "max_req_input_len": most - 1,
        "max_total_num_tokens": engine.limits.kv_tokens,
        "max_total_tokens": engine.limits.kv_tokens,
        "max_running_requests": stats.num_slots,
        "max_num_reqs": stats.num_slots,
        "tp_size": stats.tensor_parallel,
        "dp_size": 1,
        "disaggregation_mode": "null",
        "system_fingerprint": engine.system_fingerprint,
        "internal_states": [_load(engine)],
    }


def stats(engine: AsyncEngine, name: str) -> dict[str, Any]:
    """The engine's counters, and what other servers call some of them."""
    found = engine.stats()
    return {
        **dataclasses.asdict(found),
        "model": name,
        "running": found.num_running,
        "page_size": found.block_size,
        "average_batch_size": found.step_sequences / found.steps if found.steps else 0.0,
        "max_batch_size": found.max_step_sequences,
    }


def loads(engine: AsyncEngine) -> dict[str, Any]:
    """How much there is to do, for each replica: this server has one."""
    now = datetime.now(UTC)
    load = {"dp_rank": 0, "timestamp": time.time(), **_load(engine)}
    return {"timestamp": now.isoformat(), "version": __version__, "loads": [load]}


def ollama_tags(
    engine: AsyncEngine, names: Sequence[str], created_s: int
) -> dict[str, list[dict[str, Any]]]:
    """The models in Ollama's words, as llama.cpp's server says them: unknown fields are empty."""
    family = engine.architecture or ""
    details = {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }
    created = datetime.fromtimestamp(created_s, UTC).isoformat()
    about = {"modified_at": created, "size": 0, "digest": "", "details": details}
    return {"models": [{"name": name, "model": name, **about} for name in names]}


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
