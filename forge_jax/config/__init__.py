"""Configuration: the engine's options, and the fields of a model's `config.json`.

`options.py` defines every option, its default, its range and its help text. `aliases.py` maps the
option names of other engines. `suggest.py` finds the closest valid name for a misspelled one.
`hf_config.py` reads `config.json` and checks each field.
"""

from forge_jax.config.options import (
    LORA_NAME,
    MAX_NUM_SEQS,
    SELF,
    BatchConfig,
    Batching,
    CacheConfig,
    EngineConfig,
    GGUFWeights,
    Kernels,
    KVDType,
    ModelConfig,
    ParallelConfig,
    Policy,
    Pooling,
    Rounding,
    SpeculationConfig,
    Verification,
    flags_of,
    in_python,
    option,
    python_names,
    split_lora,
    split_steering,
)

__all__ = [
    "LORA_NAME",
    "MAX_NUM_SEQS",
    "SELF",
    "BatchConfig",
    "Batching",
    "CacheConfig",
    "EngineConfig",
    "GGUFWeights",
    "KVDType",
    "Kernels",
    "ModelConfig",
    "ParallelConfig",
    "Policy",
    "Pooling",
    "Rounding",
    "SpeculationConfig",
    "Verification",
    "flags_of",
    "in_python",
    "option",
    "python_names",
    "split_lora",
    "split_steering",
]
