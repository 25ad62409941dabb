"""Small quantized Llamas and Mixtrals, written and computed in numpy by definition.

forge_jax is not used. If a format is defined by value, values are computed one by one. Every
writer returns the tensors of a matrix and the float64 matrix that they represent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS, PER_TOKEN = 4, 2
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
CODES = {"float32": "F32", "float16": "F16", "int8": "I8", "int32": "I32", "int64": "I64"}

# E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; all ones is NaN, there is no infinity.
E4M3 = np.array(
    [
        m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
    ]
)
E4M3[127] = np.nan


class Fp8(np.ndarray):
    """uint8 codes that are written as F8_E4M3."""


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Return codes of the nearest values, with ties to the even code."""
    finite = E4M3[:127]
    size = np.minimum(np.abs(x), 448.0)
    high = np.clip(np.searchsorted(finite, size), 1, 126)
    low = high - 1
    below, above = size - finite[low], finite[high] - size
    code = np.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)
    return (code + 128 * (np.signbit(x))).astype(np.uint8)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    codes = np.asarray(codes).view(np.ndarray)
    return np.where(codes >= 128, -1.0, 1.0) * E4M3[codes % 128]


# ---- FP8 and int8 ----------------------------------------------------------------------------


def _blocks(shape: tuple[int, int], rows: int, columns: int):
    for i in range(0, shape[0], rows):
        for j in range(0, shape[1], columns):
            yield i // rows, j // columns, np.s_[i : i + rows, j : j + columns]


def fp8(w, *, rows, columns, name="weight_scale", shape=None, input_scale=None):
    """Quantize with one scale per block of rows x columns."""
    scale = np.empty((-(-w.shape[0] // rows), -(-w.shape[1] // columns)), np.float32)
    codes, exact = np.empty(w.shape, np.uint8), np.empty(w.shape)
    for i, j, block in _blocks(w.shape, rows, columns):
        scale[i, j] = np.abs(w[block]).max() / 448
        codes[block] = to_e4m3(w[block] / scale[i, j])
        exact[block] = from_e4m3(codes[block]) * np.float64(scale[i, j])
    tensors = {"weight": codes.view(Fp8), name: scale if shape is None else scale.reshape(shape)}
    if input_scale is not None:
        tensors["input_scale"] = np.full((1,), input_scale, np.float32)
    return tensors, exact


def int8(w, *, rows=1, input_scale=None):
    """Quantize with one scale per row, or one for all."""
    scale = np.empty((-(-w.shape[0] // rows), 1), np.float32)
    values = np.empty(w.shape, np.int8)
    for i, _, block in _blocks(w.shape, rows, w.shape[1]):
        scale[i] = np.abs(w[block]).max() / 127.5
        values[block] = np.clip(np.rint(w[block] / scale[i]), -128, 127)
    exact = values * np.repeat(scale.astype(np.float64), rows, axis=0)[: len(w)]
    tensors = {"weight": values, "weight_scale": scale if rows == 1 else scale.reshape(1)}
    if input_scale is not None:
        tensors["input_scale"] = np.full((1,), input_scale, np.float32)
    return tensors, exact


# ---- 4 bits ------------------------------------------------------------------------------------


def _round4(w: np.ndarray, groups: np.ndarray, symmetric: bool):
    """Return (values u[N, K] of 0 to 15, zeros [N, G], f16 scales [N, G], the exact matrix)."""
    count = groups.max() + 1
    values, exact = np.empty(w.shape, np.int64), np.empty(w.shape)
    zeros, scales = np.empty((len(w), count), np.int64), np.empty((len(w), count), np.float16)
    for g in range(count):
        part = w[:, groups == g]
        if symmetric:
            scale = (np.abs(part).max(axis=1) / 7.5).astype(np.float16)
            zero = np.full(len(w), 8)
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scale = ((high - low) / 15).astype(np.float16)
            # GPTQ's first format cannot represent a zero point of 0.
            zero = np.clip(np.rint(-low / scale), 1, 15).astype(np.int64)
        wide = scale.astype(np.float64)[:, None]
        q = np.clip(np.rint(part / wide) + zero[:, None], 0, 15).astype(np.int64)
        values[:, groups == g], zeros[:, g], scales[:, g] = q, zero, scale
        exact[:, groups == g] = (q - zero[:, None]) * wide
    return values, zeros, scales, exact


def _words(nibbles: list[np.ndarray]) -> np.ndarray:
    """Pack eight arrays of 4 bits into int32, the lowest bits first."""
    word = sum(n.astype(np.uint64) << np.uint64(4 * i) for i, n in enumerate(nibbles))
    return word.astype(np.uint32).view(np.int32)


def _groups_of(w, group, rng, ordered):
    groups = np.arange(w.shape[1]) // group
    return rng.permutation(groups) if ordered else groups


def gptq(w, *, group, rng, symmetric=True, ordered=False, version=1, index=None):
    """Quantize as AutoGPTQ: qweight packs 8 rows of w.T, qzeros 8 columns, minus 1 in v1."""
    groups = _groups_of(w, group, rng, ordered) if index is None else index
    values, zeros, scales, exact = _round4(w, groups, symmetric)
    stored = (zeros - (1 if version == 1 else 0)).T
    return {
        "qweight": _words([values.T[i::8] for i in range(8)]),
        "qzeros": _words([stored[:, i::8] for i in range(8)]),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": groups.astype(np.int32),
    }, exact


def awq(w, *, group, rng):
    """Quantize as AutoAWQ's GEMM: 8 outputs per word, in the order 0 2 4 6 1 3 5 7."""
    values, zeros, scales, exact = _round4(w, _groups_of(w, group, rng, False), False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": _words([values.T[:, place::8] for place in order]),
        "qzeros": _words([zeros.T[:, place::8] for place in order]),
        "scales": np.ascontiguousarray(scales.T),
    }, exact


def packed4(w, *, group, rng, symmetric=True, ordered=False, index=None):
    """Quantize as compressed-tensors: values -8 to 7 stored plus 8, with 8 of a row per word."""
    groups = _groups_of(w, group, rng, ordered) if index is None else index
    values, zeros, scales, exact = _round4(w, groups, symmetric)
    tensors = {
        "weight_packed": _words([values[:, i::8] for i in range(8)]),
        "weight_shape": np.array(w.shape, np.int64),
        "weight_scale": scales,
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words([zeros[i::8] for i in range(8)])
    if ordered:
        tensors["weight_g_idx"] = groups.astype(np.int32)
    return tensors, exact


# ---- models ------------------------------------------------------------------------------------


def plain_weights(seed: int = 0, *, experts: bool = False) -> dict[str, np.ndarray]:
    """Return float64 weights of a small Llama or Mixtral with uneven sizes."""
    rng = np.random.default_rng(seed)
    d, inner, kv, vocab = 64, 192, KV_HEADS * HEAD_DIM, 96
    shapes = {"model.embed_tokens": (vocab, d), "lm_head": (vocab, d)}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.{p}_proj": (n, d)
            for p, n in (("q", d), ("k", kv), ("v", kv), ("o", d))
        }
        if experts:
            moe = f"{name}.block_sparse_moe"
            shapes[f"{moe}.gate"] = (EXPERTS, d)
            for expert in range(EXPERTS):
                for matrix, shape in (("w1", (inner, d)), ("w3", (inner, d)), ("w2", (d, inner))):
                    shapes[f"{moe}.experts.{expert}.{matrix}"] = shape
            continue
        shapes |= {f"{name}.mlp.gate_proj": (inner, d), f"{name}.mlp.up_proj": (inner, d)}
        shapes[f"{name}.mlp.down_proj"] = (d, inner)
    weights = {
        f"{name}.weight": rng.standard_normal(shape)
        * rng.uniform(0.5, 2.0, (shape[0], 1))
        / np.sqrt(shape[1])
        for name, shape in shapes.items()
    }
    norms = ["model.norm"]
    for layer in range(CONFIG["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            norms.append(f"model.layers.{layer}.{name}")
    weights |= {f"{name}.weight": rng.uniform(0.5, 1.5, d) for name in norms}
    return {name: w.astype(np.float32).astype(np.float64) for name, w in weights.items()}


def write_model(
    folder: Path,
    weights: dict[str, np.ndarray],
    quantize: Callable | None = None,
    quantization: dict | None = None,
    more: dict[str, np.ndarray] | None = None,
    **config,
) -> dict[str, np.ndarray]:
    """Write a model folder with quantized layer matrices; return the weights that it represents.

    `quantize(name, w)` returns tensors by their last name, and the exact matrix. `more` are
    additional tensors.
    """
    tensors, exact = dict(more or {}), dict(weights)
    for name, w in weights.items():
        if quantize is not None and is_quantized(name):
            module = name.removesuffix(".weight")
            parts, exact[name] = quantize(module, w)
            tensors |= {f"{module}.{part}": array for part, array in parts.items()}
        else:
            tensors[name] = w.astype(np.float32)
    save(tensors, folder / "model.safetensors")
    text = CONFIG | {"torch_dtype": "float32"} | config
    if quantization is not None:
        text["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(text))
    return exact


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight") or ".experts." in name


def save(tensors: dict[str, np.ndarray], file: Path) -> None:
    header, data = {}, b""
    for name, array in tensors.items():
        code = "F8_E4M3" if isinstance(array, Fp8) else CODES[str(array.dtype)]
        content = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def llama_logits(weights, ids, round_rows: Callable | None = None) -> np.ndarray:
    """Return float64[T, V] of one sequence; `round_rows` applies to inputs of layer matrices."""

    def linear(x, name):
        if round_rows is not None:
            x = round_rows(x)
        return x @ weights[f"{name}.weight"].T

    def norm(x, name):
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + CONFIG["rms_norm_eps"])
        return x / scale * weights[f"{name}.weight"]

    T = len(ids)
    angles = np.arange(T)[:, None] * 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(x):
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        y = norm(x, f"{name}.input_layernorm")
        q = rotate(linear(y, f"{name}.self_attn.q_proj").reshape(T, HEADS, HEAD_DIM))
        k = rotate(linear(y, f"{name}.self_attn.k_proj").reshape(T, KV_HEADS, HEAD_DIM))
        v = linear(y, f"{name}.self_attn.v_proj").reshape(T, KV_HEADS, HEAD_DIM)
        k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", scores, v).reshape(T, -1)
        x = x + linear(out, f"{name}.self_attn.o_proj")
        y = norm(x, f"{name}.post_attention_layernorm")
        if f"{name}.block_sparse_moe.gate.weight" in weights:
            x = x + mixture(weights, y, f"{name}.block_sparse_moe", round_rows)
            continue
        gate = linear(y, f"{name}.mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * linear(y, f"{name}.mlp.up_proj")
        x = x + linear(inner, f"{name}.mlp.down_proj")
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def choose(weights, x, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (experts [T, k], their weights) by the router, with unrounded rows."""
    scores = x @ weights[f"{name}.gate.weight"].T
    share = np.exp(scores - scores.max(axis=1, keepdims=True))
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :PER_TOKEN]
    part = np.take_along_axis(share, chosen, 1)
    return chosen, part / part.sum(axis=1, keepdims=True)


def mixture(weights, x, name: str, round_rows: Callable | None = None, choice=None) -> np.ndarray:
    """Return float64[T, d] of the experts called `name`; `choice` is that of `choose`."""
    chosen, share = choose(weights, x, name) if choice is None else choice
    rounded = round_rows or (lambda rows: rows)
    out = np.zeros_like(x)
    for row, (experts, part) in enumerate(zip(chosen, share, strict=True)):
        for expert, weight in zip(experts, part, strict=True):
            w1, w2, w3 = (weights[f"{name}.experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
            y = rounded(x[row : row + 1])
            gate = y @ w1.T
            inner = gate / (1 + np.exp(-gate)) * (y @ w3.T)
            out[row] += weight * (rounded(inner) @ w2.T)[0]
    return out


def round_int8(x: np.ndarray, scale: float | None = None) -> np.ndarray:
    """Round each row to its own 255 steps, or to steps of a given size."""
    steps = np.abs(x).max(axis=-1, keepdims=True) / 127 if scale is None else scale
    return np.clip(np.rint(x / steps), -128, 127) * steps


def round_fp8(x: np.ndarray, scale: float | None = None, group: int | None = None) -> np.ndarray:
    """Round each row, or group of its columns, to FP8 with its own scale or a given one."""
    out = np.empty_like(x)
    for start in range(0, x.shape[-1], group or x.shape[-1]):
        part = x[..., start : start + (group or x.shape[-1])]
        size = np.abs(part).max(axis=-1, keepdims=True) / 448 if scale is None else scale
        out[..., start : start + part.shape[-1]] = from_e4m3(to_e4m3(part / size)) * size
    return out
