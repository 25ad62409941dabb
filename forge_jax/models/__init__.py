"""Models: their description (`ModelSpec`), their families (`Architecture`) and their math.

`__all__` is everything that a family in another package needs.
"""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.decoder import (
    MLP,
    Attention,
    Decoder,
    DecoderLayer,
    Experts,
    Leaves,
    Model,
    Ragged,
    ResidualBlock,
    attend,
    attend_to_written,
    new_mlp,
)
from forge_jax.models.families import Architecture
from forge_jax.models.interface import DecoderModule
from forge_jax.models.kv import (
    KV,
    LayerKV,
    LayerLayout,
    PagedKV,
    PagedLayout,
    StateArray,
    StateArrays,
    StateLayout,
)
from forge_jax.models.linear import (
    LayerNorm,
    Linear,
    MatrixBuilder,
    RMSNorm,
    new_bias,
    new_norm,
)
from forge_jax.models.lora import LayerLora
from forge_jax.models.plugins import register
from forge_jax.models.registry import build_model
from forge_jax.models.spec import ModelSpec, RopeSpec, decoder_spec
from forge_jax.models.weight_map import Tensor, WeightMap, decoder_weights, renamed

__all__ = [
    "KV",
    "MLP",
    "Architecture",
    "Attention",
    "Decoder",
    "DecoderLayer",
    "DecoderModule",
    "Experts",
    "HFConfig",
    "LayerKV",
    "LayerLayout",
    "LayerLora",
    "LayerNorm",
    "Leaves",
    "Linear",
    "MatrixBuilder",
    "Model",
    "ModelSpec",
    "PagedKV",
    "PagedLayout",
    "RMSNorm",
    "Ragged",
    "ResidualBlock",
    "RopeSpec",
    "StateArray",
    "StateArrays",
    "StateLayout",
    "Tensor",
    "WeightMap",
    "attend",
    "attend_to_written",
    "build_model",
    "decoder_spec",
    "decoder_weights",
    "new_bias",
    "new_mlp",
    "new_norm",
    "register",
    "renamed",
]
