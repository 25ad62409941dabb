"""The Llama trained here, as Flax NNX modules.

This module owns the architecture and its arithmetic in training: f32 master weights, bf16 matrix
products with f32 results. It is independent of data, optimizers and files. Attention is dense,
because training rows are short.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


# forge-tiny's draft model: 0.5 million parameters, less than 1 MB.
DRAFT_MODEL = ModelConfig(
    hidden_size=96,
    intermediate_size=224,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


@jax.custom_vjp
def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply x: f32[..., K] by weight: f32[N, K], as in the checkpoint, to f32[..., N] in bf16.

    XLA:CPU runs the shapes of the forward pass and the input gradient in bf16 at about 900 GFLOP/s
    on two AVX512_BF16 cores. The weight gradient contracts over tokens, where bf16 is no faster
    than f32, so it stays in f32.
    """
    return _matmul_forward(x, weight)[0]


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _matmul_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
    x_rows = x.reshape(-1, x.shape[-1]).astype(jnp.bfloat16)
    weight = weight.astype(jnp.bfloat16)
    out = _dot(x_rows, weight, 1, 1).reshape(*x.shape[:-1], weight.shape[0])
    return out, (x_rows, weight)


def _matmul_backward(saved: tuple, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_rows, weight = saved
    grad_rows = grad.reshape(-1, grad.shape[-1])
    grad_x = _dot(grad_rows.astype(jnp.bfloat16), weight, 1, 0)
    grad_weight = _dot(grad_rows, x_rows.astype(jnp.float32), 0, 0)
    return grad_x.reshape(*grad.shape[:-1], weight.shape[1]), grad_weight


matmul.defvjp(_matmul_forward, _matmul_backward)


def rope_tables(config: ModelConfig, length: int) -> tuple[jax.Array, jax.Array]:
    """Return cos, sin: f32[length, head_dim], as in Hugging Face (two halves, `rotate_half`)."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] / config.rope_theta**exponents
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x: f32[B, T, heads, D] by cos, sin: f32[T, D]."""
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos[:, None, :] + jnp.concatenate([-second, first], axis=-1) * sin[:, None, :]


class Linear(nnx.Module):
    def __init__(self, inputs: int, outputs: int, std: float, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), (outputs, inputs)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return matmul(x, self.weight[...])


class RMSNorm(nnx.Module):
    def __init__(self, config: ModelConfig):
        self.weight = nnx.Param(jnp.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * scale * self.weight[...]


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, out_std: float, *, rngs: nnx.Rngs):
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden, std = config.hidden_size, config.hidden_size**-0.5
        self.q_proj = Linear(hidden, self.heads * self.head_dim, std, rngs=rngs)
        self.k_proj = Linear(hidden, self.kv_heads * self.head_dim, std, rngs=rngs)
        self.v_proj = Linear(hidden, self.kv_heads * self.head_dim, std, rngs=rngs)
        self.o_proj = Linear(self.heads * self.head_dim, hidden, out_std, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Map x: f32[B, T, hidden]; `mask`: bool[B, T, T] is true where a query may see a key."""
        B, T, _ = x.shape
        K, G, D = self.kv_heads, self.heads // self.kv_heads, self.head_dim
        q = rotate(self.q_proj(x).reshape(B, T, self.heads, D), cos, sin)
        k = rotate(self.k_proj(x).reshape(B, T, K, D), cos, sin)
        v = self.v_proj(x).reshape(B, T, K, D)
        q = (q * D**-0.5).reshape(B, T, K, G, D).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, D)
        scores = jnp.einsum("bkqd,bskd->bkqs", q, k).reshape(B, K, G, T, T)
        probabilities = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1)
        out = jnp.einsum("bkqs,bskd->bkqd", probabilities.reshape(B, K, G * T, T), v)
        out = out.reshape(B, K, G, T, D).transpose(0, 3, 1, 2, 4).reshape(B, T, K * G * D)
        return self.o_proj(out)


class MLP(nnx.Module):
    def __init__(self, config: ModelConfig, out_std: float, *, rngs: nnx.Rngs):
        hidden, inner, std = config.hidden_size, config.intermediate_size, config.hidden_size**-0.5
        self.gate_proj = Linear(hidden, inner, std, rngs=rngs)
        self.up_proj = Linear(hidden, inner, std, rngs=rngs)
        self.down_proj = Linear(inner, hidden, out_std, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        out_std = 0.02 / (2 * config.num_hidden_layers) ** 0.5
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config, out_std, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = MLP(config, out_std, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), mask, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config)

    def __call__(self, tokens: jax.Array, documents: jax.Array) -> jax.Array:
        """Return logits: f32[B, T, V] of tokens, documents: int[B, T].

        `documents` numbers the documents packed into a row; attention stays inside each of them.
        """
        length = tokens.shape[1]
        cos, sin = rope_tables(self.config, length)
        causal = jnp.tril(jnp.ones((length, length), bool))
        mask = causal & (documents[:, :, None] == documents[:, None, :])
        x = self.embed_tokens[...][tokens]
        for layer in self.layers:
            x = layer(x, mask, cos, sin)
        return matmul(self.norm(x), self.embed_tokens[...])
