"""Small default sizes for engines in the processes that tests/docs starts.

Python imports this module at startup, because its folder is in PYTHONPATH. With the usual sizes, a
start traces and compiles seven steps. With these it takes two. Options that a document names keep
their values.
"""

from dataclasses import fields
from typing import Any

from forge_jax.config import BatchConfig, ParallelConfig

DEFAULTS: dict[type, dict[str, Any]] = {
    BatchConfig: {"max_num_seqs": 4, "max_num_batched_tokens": 32},
    # `forge-jax` saves executables. In Python this is off, because code may replace functions.
    ParallelConfig: {"saved_executables": True},
}

for options, defaults in DEFAULTS.items():
    parameters = options.__init__.__kwdefaults__
    for field in fields(options):
        if field.name in defaults:
            parameters[field.name] = field.default = defaults[field.name]
            setattr(options, field.name, field.default)
