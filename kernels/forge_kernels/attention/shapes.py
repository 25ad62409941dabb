"""Shapes of real models, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int


FORGE_TINY = AttentionShape(heads=4, kv_heads=2, head_dim=64, layers=8)
SMOLLM2_135M = AttentionShape(heads=9, kv_heads=3, head_dim=64, layers=30)
TINYLLAMA_1B = AttentionShape(heads=32, kv_heads=4, head_dim=64, layers=22)
LLAMA_3_2_1B = AttentionShape(heads=32, kv_heads=8, head_dim=64, layers=16)
LLAMA_3_1_8B = AttentionShape(heads=32, kv_heads=8, head_dim=128, layers=32)

SHAPES = {
    "forge-tiny": FORGE_TINY,
    "smollm2-135m": SMOLLM2_135M,
    "tinyllama-1b": TINYLLAMA_1B,
    "llama-3.2-1b": LLAMA_3_2_1B,
    "llama-3.1-8b": LLAMA_3_1_8B,
}
