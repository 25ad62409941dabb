"""A family with state: a layer of decayed sums, then attention without positions; in NumPy too."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models import (
    Architecture,
    Decoder,
    Linear,
    PagedLayout,
    StateArray,
    StateLayout,
    attend,
    decoder_spec,
)
from forge_jax.models.weight_map import Tensor

NAME = "DecayedForCausalLM"
VOCAB, HIDDEN, HEADS, DIM, DECAY = 512, 32, 2, 16, 0.875
TOKENIZER = Path(__file__).parent.parent / "fixtures/stories260k-hf/tokenizer.json"


class DecayedSum(nnx.Module):
    """Adds `out(s)`, where s = DECAY * s + update(x) over the tokens of a sequence."""

    def __init__(self, spec, dtype, matrix, layer):
        d, name = spec.hidden_size, f"layers.{layer}"
        self.update = Linear(matrix(f"{name}.update.weight", d, d))
        self.out = Linear(matrix(f"{name}.out.weight", d, d))

    def __call__(self, x, kv, ragged):
        slots, cu = ragged.state_slots, ragged.cu_q_lens
        values, q_lens = self.update(x).astype(jnp.float32), cu[1:] - cu[:-1]
        starts = ragged.kv_lens - q_lens
        inputs, most = kv["inputs"][slots], kv["inputs"].shape[1]
        base = jnp.where(starts == 0, 0, kv["base"][slots])
        before = jnp.where((starts == 0)[:, None], 0.0, kv["sum"][slots])
        for i in range(most):
            accepted = (base + i < starts)[:, None]
            before = jnp.where(accepted, DECAY * before + inputs[:, i], before)
        rows = jnp.arange(len(x))
        seq = jnp.minimum(jnp.searchsorted(cu, rows, side="right") - 1, len(slots) - 1)

        def add(sums, token):
            row, own, value = token
            new = jnp.where(row < ragged.num_tokens, DECAY * sums[own] + value, sums[own])
            return sums.at[own].set(new), new

        after, sums = jax.lax.scan(add, before, (rows, seq, values))
        short = q_lens <= most  # drafts, which may be rejected
        new = {
            "base": jnp.where(short, starts, ragged.kv_lens),
            "sum": jnp.where(short[:, None], before, after),
            "inputs": values[jnp.minimum(cu[:-1, None] + jnp.arange(most)[None], len(x) - 1)],
        }
        kv = {name: kv[name].at[slots].set(new[name]) for name in kv}
        return kv, self.out(sums.astype(x.dtype), residual=x)


class PlainAttention(nnx.Module):
    def __init__(self, spec, dtype, matrix, layer):
        self.heads = HEADS + 2
        self.qkv = Linear(matrix(f"layers.{layer}.qkv.weight", self.heads * DIM, HIDDEN))
        self.out = Linear(matrix(f"layers.{layer}.out.weight", HIDDEN, HEADS * DIM))

    def __call__(self, x, kv, ragged):
        qkv = self.qkv(x).reshape(len(x), self.heads, DIM)
        kv, out = attend(qkv, kv, ragged, sm_scale=DIM**-0.5)
        return kv, self.out(out, residual=x)


class DecayedDecoder(Decoder):
    @staticmethod
    def layer(spec, dtype, matrix, index):
        return (PlainAttention if index % 2 else DecayedSum)(spec, dtype, matrix, index)


def layouts(spec):
    of_state = StateLayout(
        arrays=(
            StateArray(name="base", shape=(), dtype="int32"),
            StateArray(name="sum", shape=(HIDDEN,), axis=0),
            StateArray(name="inputs", shape=(HIDDEN,), pending=True, axis=0),
        )
    )
    both = of_state, PagedLayout(heads=1, dim=DIM)
    return tuple(both[index % 2] for index in range(spec.num_hidden_layers))


def weights(spec):
    shapes = {"norm": (HIDDEN,), "head": (VOCAB, HIDDEN)}
    for index in range(spec.num_hidden_layers):
        layer = f"layers.{index}"
        if index % 2:
            shapes |= {f"{layer}.qkv": ((HEADS + 2) * DIM, HIDDEN)}
        else:
            shapes |= {f"{layer}.update": (HIDDEN, HIDDEN)}
        shapes |= {f"{layer}.out": (HIDDEN, HIDDEN)}
    return {f"{name}.weight": (Tensor(f"{name}.weight", s),) for name, s in shapes.items()}


def spec_of(config, generation):
    spec = decoder_spec(config, generation, NAME)
    return replace(spec, no_rope=frozenset(range(spec.num_hidden_layers)))


DECAYED = Architecture(
    read_spec=spec_of,
    defaults={
        **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4},
        **{"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None},
    },
    decoder=DecayedDecoder,
    cache=layouts,
    weights=weights,
    lora=False,
    tensor_parallel=False,
)


def write(folder, **changes):
    """Write a model with random weights. `DECAYED` must be registered as NAME."""
    config = {
        **{"architectures": [NAME], "vocab_size": VOCAB, "hidden_size": HIDDEN},
        **{"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": DIM},
        **{"num_hidden_layers": 4, "intermediate_size": 1, "max_position_embeddings": 128},
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    rng = np.random.default_rng(0)
    tensors = {
        part.name: (0.2 * rng.standard_normal(part.shape)).astype(np.float32)
        for (part,) in weights(read_spec(folder)).values()
    }
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(TOKENIZER, folder)
    return tensors


def reference(tensors, ids):
    """Return f64[T, V] logits of one whole sequence."""
    w = {name.removesuffix(".weight"): value.astype(np.float64) for name, value in tensors.items()}
    x, T = w["head"][ids], len(ids)
    decays = np.tril(DECAY ** np.subtract.outer(np.arange(T), np.arange(T)).clip(0))
    for index in range(4):
        layer = f"layers.{index}"
        if index % 2 == 0:
            x = x + decays @ (x @ w[f"{layer}.update"].T) @ w[f"{layer}.out"].T
            continue
        q, k, v = np.split(x @ w[f"{layer}.qkv"].T, [HEADS * DIM, (HEADS + 1) * DIM], axis=1)
        scores = np.einsum("thd,sd->hts", q.reshape(T, HEADS, DIM), k) * DIM**-0.5
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        shares = scores / scores.sum(-1, keepdims=True)
        x = x + np.einsum("hts,sd->thd", shares, v).reshape(T, -1) @ w[f"{layer}.out"].T
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w["norm"]
    return x @ w["head"].T
