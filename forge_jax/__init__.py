"""forge-jax: an LLM inference engine compiled by JAX/XLA.

The names below are the public surface. They are imported on first use, so that `import forge_jax`
costs nothing and does not import jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_jax.config import EngineConfig as EngineConfig
    from forge_jax.engine import Engine as Engine
    from forge_jax.llm import LLM as LLM
    from forge_jax.research import decode_step as decode_step
    from forge_jax.research import forward as forward
    from forge_jax.research import load as load
    from forge_jax.research import logits as logits
    from forge_jax.research import new_kv as new_kv
    from forge_jax.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "forge_jax.llm",
    "Engine": "forge_jax.engine",
    "EngineConfig": "forge_jax.config",
    "SamplingParams": "forge_jax.sampling_params",
    "load": "forge_jax.research",
    "new_kv": "forge_jax.research",
    "forward": "forge_jax.research",
    "logits": "forge_jax.research",
    "decode_step": "forge_jax.research",
}
__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "SamplingParams",
    "__version__",
    "decode_step",
    "forward",
    "load",
    "logits",
    "new_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forge_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
