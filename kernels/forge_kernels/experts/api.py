"""Mixtures of experts with SwiGLU: the choice by a router's logits, and the weighted sum.

A token's result depends only on that token. Every expert that it chose computes it, whatever other
tokens chose. Its sum is in the order of the experts' numbers, or of its choices.
"""

import functools
import logging
from collections.abc import Callable
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.blocks import BITS
from forge_kernels.derivatives import zero_from
from forge_kernels.devices import current_gpu
from forge_kernels.experts.activations import swiglu
from forge_kernels.experts.backward import Mixture, experts_backward
from forge_kernels.experts.cpu_ffi import packed_experts
from forge_kernels.experts.reference import reference_experts
from forge_kernels.experts.xla import (
    Activation,
    Biases,
    all_experts,
    experts_by_chunks,
    experts_by_pair,
    few_pairs,
    in_fusions,
    num_experts,
    shape_of,
    tiled_experts,
)
from forge_kernels.linear import (
    MatrixWeight,
    MixedMatrix,
    OrderedWeight,
    PackedWeight,
    PlainWeight,
    QuantizedWeight,
)
from forge_kernels.linear.quantized import convertible

IN_BLOCKS = {f"{values} blocks" for values in BITS}  # formats that the kernels can combine
Implementation = Literal["auto", "reference"]

Matrices = jax.Array | PackedWeight | QuantizedWeight  # matrices of all experts

_TINY = 1e-20  # so that weights that are all 0 stay 0

log = logging.getLogger(__name__)


def choose_experts(
    logits: jax.Array,
    per_token: int,
    *,
    normalized: bool,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    correction: jax.Array | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    best_of_group: int = 2,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Return the experts of each token with the highest scores; ties go to the lower number.

    Args:
      logits: f32[T, E], of the router.
      per_token: k.
      normalized: True to scale the weights of a token's experts to sum to one.
      scores: the function of the logits, the softmax over all experts or the sigmoid of each.
      correction: f32[E], added to the scores to choose experts, but not to the weights (Wang et al.
        2024, arXiv:2408.15664).
      groups: the number of groups of experts, which divides E.
      kept_groups: the groups from which a token's experts are chosen.
      best_of_group: how many of a group's highest scores its own is the sum of: two in DeepSeek-V3
        (arXiv:2412.19437), and one in V2 (arXiv:2405.04434).
      scale: the factor on the weights.

    Returns:
      (experts i32[T, k], weights f32[T, k]), the weights from the scores.
    """
    logits = logits.astype(jnp.float32)
    found = jax.nn.softmax(logits, axis=-1) if scores == "softmax" else jax.nn.sigmoid(logits)
    ranked = found if correction is None else found + correction[None]
    if scores == "sigmoid" and correction is None and kept_groups == groups:
        ranked = logits  # large logits have equal sigmoids in float32
    if kept_groups < groups:
        by_group = ranked.reshape(len(ranked), groups, -1)
        of_group = jnp.sum(lax.top_k(by_group, best_of_group)[0], axis=-1)
        kept = lax.top_k(of_group, kept_groups)[1]
        allowed = jnp.any(kept[:, :, None] == jnp.arange(groups)[None, None], axis=1)
        ranked = jnp.where(allowed[:, :, None], by_group, -jnp.inf).reshape(ranked.shape)
    weights, experts = lax.top_k(ranked, per_token)
    if ranked is not found:
        weights = jnp.take_along_axis(found, experts, axis=1)
    if normalized:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _TINY)
    return experts.astype(jnp.int32), weights if scale == 1.0 else weights * scale


def mix_experts(  # noqa: PLR0913
    x: jax.Array,
    gate_up: jax.Array | MatrixWeight,
    down: jax.Array | MatrixWeight,
    experts: jax.Array,
    weights: jax.Array,
    *,
    order: jax.Array | None = None,
    num_rows: jax.Array | None = None,
    total: int | None = None,
    biases: Biases | None = None,
    activation: Activation = swiglu,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Return the weighted sum of down(activation(gate_up(x))) over each token's experts.

    The sum is in float32. On a CPU, rows are sorted by expert and multiplied in tiles, by the C++
    kernels if packed, so experts without tokens are not read. Neither are they on a GPU, if there
    are few rows or a Pallas kernel supports the matrices. For many rows, it supports quantized
    matrices by converting a few experts at a time to floats. Otherwise every expert computes every
    row.

    Args:
      x: float[T, d].
      gate_up: float[E, 2 I, d] of x's type, in the activation's order, or quantized, or packed as
        `paired`, which requires bfloat16 x.
      down: float[E, d, I], or packed, or quantized.
      experts: i32[T, k], in [0, E), distinct within a row. With `total`, E means an expert of
        another device, which adds nothing and is not computed.
      weights: f32[T, k].
      order: i32[E, d], the column of x for each column of a quantized gate_up; an `OrderedWeight`
        has its own.
      num_rows: i32[], a promise that the caller ignores rows from there on; they are undefined.
      total: the number of experts on all devices, if other devices have the rest.
      biases: float[E, 2 I] and float[E, d], added to the products of `gate_up` and `down`.
      activation: SwiGLU with gates above ups, or another function of a row's products, such as
        `ClampedSwiGLU`. With another one, or with biases, plain XLA computes the experts, on GPUs
        all of them if there are many rows.
      implementation: "reference" computes every row with every expert, in float32.

    Returns:
      [T, d] of x's type. Its gradient is that of the reference in reverse mode, whatever the
      implementation and the storage of the matrices. It leads to all floats, one expert at a time.

    Raises:
      TypeError: types do not match, or packed experts have biases or another activation.
      ValueError: shapes do not match.
    """
    if isinstance(gate_up, OrderedWeight):
        gate_up, order = gate_up.matrix, gate_up.order
    gate_up, down = _of_experts(gate_up), _of_experts(down)
    _check(x, gate_up, down, experts, weights, total)
    _check_biases(gate_up, down, biases)
    if order is not None and not isinstance(gate_up, QuantizedWeight | PackedWeight):
        raise TypeError("order requires quantized experts")
    mixture = Mixture(x, gate_up, down, weights, biases, experts, order, num_rows)

    def mix(mixture: Mixture) -> jax.Array:
        return _mix(mixture, total, activation, implementation)

    is_plain = isinstance(gate_up, jax.Array) and isinstance(down, jax.Array)
    if implementation == "reference" and is_plain:  # JAX differentiates it, also forward
        return mix(mixture)

    def forward(mixture: Mixture) -> tuple[jax.Array, Mixture]:
        return zero_from(mix(mixture), mixture.num_rows), mixture

    def backward(mixture: Mixture, slope: jax.Array) -> tuple[Mixture]:
        return (experts_backward(slope, mixture, activation),)

    differentiable = jax.custom_vjp(mix)
    differentiable.defvjp(forward, backward)
    return differentiable(mixture)


def _mix(
    mixture: Mixture,
    total: int | None,
    activation: Activation,
    implementation: Implementation,
) -> jax.Array:
    """Compute `mix_experts`, without a derivative."""
    x, gate_up, down, weights, biases, experts, order, num_rows = mixture
    gate_up, down = cast(Matrices, gate_up), cast(Matrices, down)
    is_plain = biases is None and activation is swiglu
    biases = jax.tree.map(lambda bias: bias.astype(jnp.float32), biases)
    if isinstance(gate_up, PackedWeight) or isinstance(down, PackedWeight):
        assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight)
        if not is_plain:
            raise TypeError("packed experts support SwiGLU without biases only")
        return packed_experts(x, gate_up, down, experts, weights, order, num_rows)
    if isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight):
        if implementation == "reference":
            return experts_by_chunks(
                x, gate_up, down, experts, weights, None, order, biases, activation=activation
            )
    elif implementation == "reference":
        return reference_experts(x, gate_up, down, experts, weights, biases, activation=activation)
    default = _gpu_form(x, gate_up, down, experts, order, total, is_plain=is_plain)
    rows = jnp.int32(len(x)) if num_rows is None else num_rows
    arrays = (x, gate_up, down, experts, weights, rows)
    on_cpu = functools.partial(tiled_experts, total=total)
    if is_plain:
        arrays += () if order is None else (order,)
        return lax.platform_dependent(*arrays, cpu=on_cpu, default=default)
    on_cpu, default = (functools.partial(form, activation=activation) for form in (on_cpu, default))
    return lax.platform_dependent(*arrays, order, biases, cpu=on_cpu, default=default)


def _gpu_form(
    x: jax.Array,
    gate_up: jax.Array | QuantizedWeight,
    down: jax.Array | QuantizedWeight,
    experts: jax.Array,
    order: jax.Array | None,
    total: int | None,
    *,
    is_plain: bool,
) -> Callable[..., jax.Array]:
    """Return the function that computes these shapes on the accelerator, if there is one."""
    quantized = [w for w in (gate_up, down) if isinstance(w, QuantizedWeight)]
    by_pair = functools.partial(experts_by_pair, shared=total is not None)
    at_most_all = experts.size <= num_experts(gate_up)  # matrices, if each pair reads its own
    if few_pairs(experts.size, gate_up) or (quantized and at_most_all):
        return by_pair
    plain_xla = by_pair if at_most_all else experts_by_chunks if quantized else all_experts
    device = current_gpu()
    if device is None or order is not None or not all(map(convertible, quantized)):
        return plain_xla
    if quantized and in_fusions(len(x), gate_up, down):
        return experts_by_chunks
    # Pallas takes a second to import, and CPUs do not need it.
    from forge_kernels.experts import mosaic_gpu

    reason = "the kernel supports SwiGLU without biases only"
    if is_plain:
        reason = mosaic_gpu.unsupported(*shape_of(down)[1:], x.dtype)
    if reason is not None:
        if not at_most_all:
            _say_once(f"experts run in plain XLA, which reads all of them: {reason}")
        return plain_xla
    capability = device.capability
    return functools.partial(mosaic_gpu.jitted_experts, capability=capability, total=total)


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)


def _of_experts(w: jax.Array | MatrixWeight) -> Matrices:
    if isinstance(w, PlainWeight):
        return w.weight
    if isinstance(w, OrderedWeight | MixedMatrix):
        raise TypeError(f"matrices of experts must not be a {type(w).__name__}")
    return cast(Matrices, w)


def _check_biases(gate_up: Matrices, down: Matrices, biases: Biases | None) -> None:
    if biases is None or isinstance(gate_up, PackedWeight) or isinstance(down, PackedWeight):
        return
    for bias, w in zip(biases, (gate_up, down), strict=True):
        if bias.shape != shape_of(w)[:2]:
            raise ValueError(f"a bias {bias.shape} does not fit experts {shape_of(w)}")


def _check(
    x: jax.Array,
    gate_up: Matrices,
    down: Matrices,
    experts: jax.Array,
    weights: jax.Array,
    total: int | None,
) -> None:
    if isinstance(gate_up, PackedWeight) != isinstance(down, PackedWeight):
        raise TypeError("gate_up and down of experts must both be packed, or neither")
    shapes = []
    for name, w in (("gate_up", gate_up), ("down", down)):
        if isinstance(w, QuantizedWeight):
            of = w.quantization
            shapes.append((of.experts, of.outputs, of.inputs))
        elif isinstance(w, PackedWeight):
            packing = w.packing
            if x.dtype != jnp.bfloat16:
                raise TypeError(f"packed experts need activations of bfloat16, got {x.dtype}")
            if packing.paired != (name == "gate_up"):
                raise ValueError("experts must have gate_up packed as paired, and down not")
            shapes.append((packing.experts, packing.outputs, packing.inputs))
        else:
            if w.dtype != x.dtype:
                raise TypeError(
                    f"experts of {w.dtype} need activations of that type, got {x.dtype}"
                )
            shapes.append(w.shape)
    formats = {w.packing.format for w in (gate_up, down) if isinstance(w, PackedWeight)}
    if len(formats) > 1 and not formats <= IN_BLOCKS:
        raise TypeError(f"experts must have one packed format, got {' and '.join(sorted(formats))}")
    count, width = shapes[0][0], x.shape[-1]
    if x.ndim != 2 or shapes != [
        (count, *shapes[0][1:2], width),
        (count, width, shapes[0][1] // 2),
    ]:
        raise ValueError(
            f"the shapes of experts {shapes[0]} and {shapes[1]} do not fit x {x.shape}"
        )
    if experts.shape != weights.shape or experts.ndim != 2 or len(experts) != len(x):
        raise ValueError(
            f"experts {experts.shape} and weights {weights.shape} do not fit x {x.shape}"
        )
    most = total or count or 0
    if experts.shape[1] > most:
        raise ValueError(f"a token chose {experts.shape[1]} experts, but there are only {most}")
    if weights.dtype != jnp.float32 or experts.dtype != jnp.int32:
        raise TypeError(
            f"experts must be int32 and weights float32, got {experts.dtype} and {weights.dtype}"
        )
