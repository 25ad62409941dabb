"""forge-jax: an LLM inference engine compiled by JAX/XLA.

`__all__` is the public API. Names are imported on first use, so `import forge_jax` imports neither
JAX nor any other dependency.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_jax.config import (
        BatchConfig,
        CacheConfig,
        EngineConfig,
        ModelConfig,
        ParallelConfig,
        SpeculationConfig,
    )
    from forge_jax.engine.adapters import LoadedAdapter
    from forge_jax.engine.async_engine import EngineStats
    from forge_jax.engine.process.client import EngineProcess
    from forge_jax.engine.streams import QueueLimits, Stream
    from forge_jax.engine.thread import Engine
    from forge_jax.errors import (
        CheckpointError,
        ConfigError,
        ContextLengthError,
        EngineError,
        ForgeError,
        GrammarError,
        GrammarLimitError,
        LostAdapterError,
        ModelError,
        NumericalError,
        OverloadedError,
        RequestError,
        StepError,
        UnsupportedModelError,
    )
    from forge_jax.grammar.spec import GrammarSpec
    from forge_jax.llm import LLM
    from forge_jax.models.plugins import register
    from forge_jax.research import LoadedModel, decode_step, forward, load, logits, new_kv
    from forge_jax.sampling_params import ReturnActivations, SamplingParams, SteeringVector
    from forge_jax.schedule.activations import Activations
    from forge_jax.schedule.outputs import Completion, Delta, RequestOutput
    from forge_jax.schedule.plan import TokenLogprobs
    from forge_jax.schedule.request import FinishReason
    from forge_jax.scoring import ScoreOptions, score
    from forge_jax.speculate.speculator import SpeculationStats

__version__ = "0.1.0"  # The only definition: pyproject.toml reads it from here.

_MODULES = {
    "forge_jax.engine.adapters": ("LoadedAdapter",),
    "forge_jax.config": (
        "BatchConfig",
        "CacheConfig",
        "EngineConfig",
        "ModelConfig",
        "ParallelConfig",
        "SpeculationConfig",
    ),
    "forge_jax.engine.thread": ("Engine",),
    "forge_jax.errors": (
        "CheckpointError",
        "ConfigError",
        "ContextLengthError",
        "EngineError",
        "ForgeError",
        "GrammarError",
        "GrammarLimitError",
        "LostAdapterError",
        "ModelError",
        "NumericalError",
        "OverloadedError",
        "RequestError",
        "StepError",
        "UnsupportedModelError",
    ),
    "forge_jax.grammar.spec": ("GrammarSpec",),
    "forge_jax.llm": ("LLM",),
    "forge_jax.models.plugins": ("register",),
    "forge_jax.schedule.outputs": ("Completion", "Delta", "RequestOutput"),
    "forge_jax.engine.process.client": ("EngineProcess",),
    "forge_jax.research": ("LoadedModel", "decode_step", "forward", "load", "logits", "new_kv"),
    "forge_jax.sampling_params": ("ReturnActivations", "SamplingParams", "SteeringVector"),
    "forge_jax.schedule.activations": ("Activations",),
    "forge_jax.schedule.plan": ("TokenLogprobs",),
    "forge_jax.schedule.request": ("FinishReason",),
    "forge_jax.scoring": ("ScoreOptions", "score"),
    "forge_jax.speculate.speculator": ("SpeculationStats",),
    "forge_jax.engine.async_engine": ("EngineStats",),
    "forge_jax.engine.streams": ("QueueLimits", "Stream"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "LLM",
    "Activations",
    "BatchConfig",
    "CacheConfig",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineProcess",
    "EngineStats",
    "FinishReason",
    "ForgeError",
    "GrammarError",
    "GrammarLimitError",
    "GrammarSpec",
    "LoadedAdapter",
    "LoadedModel",
    "LostAdapterError",
    "ModelConfig",
    "ModelError",
    "NumericalError",
    "OverloadedError",
    "ParallelConfig",
    "QueueLimits",
    "RequestError",
    "RequestOutput",
    "ReturnActivations",
    "SamplingParams",
    "ScoreOptions",
    "SpeculationConfig",
    "SpeculationStats",
    "SteeringVector",
    "StepError",
    "Stream",
    "TokenLogprobs",
    "UnsupportedModelError",
    "__version__",
    "decode_step",
    "forward",
    "load",
    "logits",
    "new_kv",
    "register",
    "score",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'forge_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
