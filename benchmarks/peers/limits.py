"""Upper bounds of a machine: bytes over measured bandwidth, operations over measured peak.

A step takes at least the time for its bytes and at least the time for its operations, whichever is
longer. Only work that every engine must do is counted. A step reads each matrix and the context's
keys and values once, and computes every product once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import Workload
from benchmarks.peers.peak import peak_for
from forge_jax.checkpoint.gguf import read_gguf

KV_BITS = 16
# Bits of forge-jax's own quantization without scales, as a lower bound.
BITS = {"bf16": 16.0, "int8": 8.0, "int4": 4.0}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates measured with all threads."""

    bytes_per_s: float
    peaks: Mapping[str, float]  # operations/s by instruction


@dataclass(frozen=True, kw_only=True)
class Model:
    """The costs of a token, from the model's config.json."""

    layer_values: int  # values in the matrices of all layers
    output_values: int  # values in the matrix that makes the logits
    kv_values: int  # per token
    pair_operations: int  # per earlier token that a token attends to

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Model:
        layers, d, ffn = (
            config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size")
        )
        q = config["num_attention_heads"] * config["head_dim"]
        kv = config["num_key_value_heads"] * config["head_dim"]
        return cls(
            layer_values=layers * d * (2 * q + 2 * kv + 3 * ffn),
            output_values=config["vocab_size"] * d,
            kv_values=layers * 2 * kv,
            pair_operations=layers * 4 * q,
        )


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Storage of a model's matrices in one engine."""

    bits: float  # per value of the layers, on average
    num_bytes: float  # read by one step

    @classmethod
    def of_type(cls, name: str, model: Model) -> Weights:
        """Return bfloat16 or one of forge-jax's own quantizations."""
        bits = BITS[name]
        return cls(bits=bits, num_bytes=(model.layer_values + model.output_values) * bits / 8)

    @classmethod
    def of_gguf(cls, file: Path, model: Model) -> Weights:
        """Return the matrices of a file: all of it except norms and a separate embedding."""
        tensors = [t for t in read_gguf(file).tensors.values() if len(t.shape) == 2]
        separate = any(t.name == "output.weight" for t in tensors)
        read = sum(t.num_bytes for t in tensors if not (separate and t.name == "token_embd.weight"))
        layers = sum(t.num_bytes for t in tensors if t.name.startswith("blk."))
        return cls(bits=8 * layers / model.layer_values, num_bytes=read)


def figures(
    workload: Workload, model: Model, weights: Weights, machine: Machine
) -> dict[str, float]:
    """Return upper bounds under the names of `measure.figures`, or nothing without a peak."""
    peak = peak_for(machine.peaks, weights.bits)
    if peak is None:
        return {}
    batch, prompt, new = workload.batch, workload.prompt_tokens, workload.max_tokens
    prefill_s = _prefill_s(batch, prompt, model, weights, machine, peak)
    context = prompt + new / 2  # average context of a step
    step_s = _step_s(batch, context, model, weights, machine, peak)
    return {
        "prefill_tokens_per_s": batch * prompt / prefill_s,
        "decode_tokens_per_s": batch / step_s,
        "output_tokens_per_s": batch * new / (prefill_s + (new - 1) * step_s),
        "ttft_s": prefill_s,
    }


def trace_figures(
    prompt_lens: Sequence[int], model: Model, weights: Weights, machine: Machine
) -> dict[str, float]:
    """Return lower bounds of each latency, as if every request had the machine to itself."""
    peak = peak_for(machine.peaks, weights.bits)
    if peak is None or not prompt_lens:
        return {}
    middle = sorted(prompt_lens)[len(prompt_lens) // 2]
    ttft_s = _prefill_s(1, middle, model, weights, machine, peak)
    step_s = _step_s(1, middle, model, weights, machine, peak)
    return {"ttft_p50_ms": 1e3 * ttft_s, "itl_p50_ms": 1e3 * step_s, "itl_p99_ms": 1e3 * step_s}


def _prefill_s(
    batch: int, tokens: int, model: Model, weights: Weights, machine: Machine, peak: float
) -> float:
    """Return the time to prefill `batch` prompts, with logits of their last tokens only."""
    pairs = tokens * (tokens + 1) / 2
    operations = batch * (
        2 * model.layer_values * tokens + 2 * model.output_values + model.pair_operations * pairs
    )
    return max(weights.num_bytes / machine.bytes_per_s, operations / peak)


def _step_s(
    batch: int, context: float, model: Model, weights: Weights, machine: Machine, peak: float
) -> float:
    """Return the time of a step in which `batch` sequences of that context decode."""
    num_bytes = weights.num_bytes + batch * context * model.kv_values * KV_BITS / 8
    values = model.layer_values + model.output_values
    operations = batch * (2 * values + model.pair_operations * context)
    return max(num_bytes / machine.bytes_per_s, operations / peak)
