"""forge-tiny, the bundled model, and its draft model: corpus, training, export."""

from pathlib import Path

BUNDLED = Path(__file__).parents[2] / "forge_jax" / "checkpoint" / "bundled" / "forge-tiny"
DRAFT = Path(__file__).parent / "draft"
