"""The Ray Data example without Ray and a model; `make test-clients` runs it with both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_ray_recipe_defers_importing_ray_and_jax():
    code = "import sys, ray_batch; assert not {'ray', 'jax', 'forge_jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=EXAMPLES)
