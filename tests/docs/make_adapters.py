"""Writes adapters of forge-tiny by name into `adapters`: `python -m make_adapters NAME...`."""

import sys
from pathlib import Path

from lora_files import write_adapter

from forge_jax.checkpoint.hub import resolve

for seed, name in enumerate(sys.argv[1:]):
    write_adapter(Path("adapters") / name, resolve("forge-tiny"), seed=seed, size=0.05)
