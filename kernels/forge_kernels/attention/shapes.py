"""Shapes of real models, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of a layer; the last three attributes are set if some layers have them."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


FORGE_TINY = AttentionShape(heads=4, kv_heads=2, head_dim=64, layers=8)
SMOLLM2_135M = AttentionShape(heads=9, kv_heads=3, head_dim=64, layers=30)
TINYLLAMA_1B = AttentionShape(heads=32, kv_heads=4, head_dim=64, layers=22)
PHI_2 = AttentionShape(heads=32, kv_heads=32, head_dim=80, layers=32)
PHI_3_MINI = AttentionShape(heads=32, kv_heads=32, head_dim=96, layers=32, window=2047)
LLAMA_3_2_1B = AttentionShape(heads=32, kv_heads=8, head_dim=64, layers=16)
LLAMA_3_1_8B = AttentionShape(heads=32, kv_heads=8, head_dim=128, layers=32)
LLAMA_3_1_70B = AttentionShape(heads=64, kv_heads=8, head_dim=128, layers=80)
QWEN_2_5_7B = AttentionShape(heads=28, kv_heads=4, head_dim=128, layers=28)
GEMMA_2_9B = AttentionShape(
    heads=16, kv_heads=8, head_dim=256, layers=42, window=4096, soft_cap=50.0
)
GPT_OSS_20B = AttentionShape(heads=64, kv_heads=8, head_dim=64, layers=24, window=128, sinks=True)

SHAPES = {
    "forge-tiny": FORGE_TINY,
    "smollm2-135m": SMOLLM2_135M,
    "tinyllama-1b": TINYLLAMA_1B,
    "phi-2": PHI_2,
    "phi-3-mini": PHI_3_MINI,
    "llama-3.2-1b": LLAMA_3_2_1B,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-3.1-70b": LLAMA_3_1_70B,
    "qwen-2.5-7b": QWEN_2_5_7B,
    "gemma-2-9b": GEMMA_2_9B,
    "gpt-oss-20b": GPT_OSS_20B,
}
