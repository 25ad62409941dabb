"""`config.json`: read like transformers, field by field, or refused by name.

`tests/fixtures/goldens/make_configs.py` created both tables with transformers: the default fields
of its configuration classes, and its models' results for some thousand small configurations.
"""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import ModelError
from forge_jax.models import ModelSpec, spec
from forge_jax.models.decoder import rope_frequencies, rope_kind
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.families.multimodal import TextSide
from forge_jax.models.families.qwen3_next import DeltaNetSpec
from forge_jax.models.mamba import MambaSpec

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
DEFAULTS = json.loads((GOLDENS / "config_defaults.json").read_text())["fields"]
TABLE = json.loads((GOLDENS / "config_variants.json").read_text())
LENGTH = TABLE["length"]
# transformers has no configuration class of these: checkpoints bring theirs along.
REMOTE = {"MiniCPMForCausalLM"}
TEXT_DEFAULTS = json.loads((GOLDENS / "text_config_defaults.json").read_text())
FAMILIES = sorted(ARCHITECTURES.keys() - REMOTE - TEXT_DEFAULTS.keys())

# Fields that we read and that are not in their family's class in transformers.
OTHERS = {
    *("rope_scaling", "torch_dtype", "dtype", "is_causal", "per_layer_config", "model_type"),
    *("partial_rotary_factor", "quantization_config", "compression_config", "gguf_types"),
    *("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"),
    *("sliding_window_pattern", "use_bidirectional_attention", "layer_types"),
    *("original_max_position_embeddings", "num_experts", "num_local_experts", "head_dim"),
    *("scoring_func", "topk_method", "moe_layer_freq"),
    *("global_head_dim", "num_global_key_value_heads"),
    *("clip_qkv", "use_sliding_window", "qkv_bias", "bias", "num_experts_per_tok"),
    *("full_attention_interval", "attn_output_gate"),
    *("gguf_tiled_values", "gguf_split_projections"),
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("rotary_emb_base", "rotary_pct"),
}
# Reasons to refuse configurations that transformers can compute.
REFUSALS = (
    r"rope type '\w+' is not supported in this architecture",
    r"type '\w+' contradicts rope_type '\w+'",
    r"partial_rotary_factor is not supported",
    r"(full|sliding)_attention is not supported: all layers of this architecture have the same",
    r"rope_parameters: \w+ is not supported: put it into full_attention or sliding_attention",
    r"num_attention_heads must be a divisor of hidden_size",
    r"(hidden_act\w*|activation|activation_function) '\w+' is not supported",
    r"(add_cross_attention|scale_attn_by_inverse_layer_idx) is not supported",
    r"layer_types must be a list of 4, each",
    r"clip_qkv is not supported",
    r"use_bias is not supported with experts",
    r"(partial_rotary_factor|rope_theta) must not be null",
    r"layer_types without full_attention is not supported",
    r"partial_rotary_factor must be an even share of the head dim",
    r"head_dim must be even",
    r"attention_chunk_size 7 is not supported",
    r"head_dim must be hidden_size / num_attention_heads",
    r"qk_layernorm true is not supported",
    r"(short|long)_factor must be a list of 2 positive numbers, not \[1\.0\]",
    r"head_dim must be qk_rope_head_dim",
    r"num_experts_per_tok must be at most the \d+ experts of topk_group groups",
    r"num_key_value_heads must be num_attention_heads",
    r"n_group must be a divisor of the \d+ experts",
    r"mscale_all_dim is supported only with rope type yarn",
    r"(mlp_bias|norm_topk_prob) is not supported",
    r"use_double_wide_mlp is not supported with enable_moe_block",
    r"vocab_size_per_layer_input must be at least vocab_size",
    r"(per_layer_config|use_bidirectional_attention|is_causal false) is not supported",
)


def spec_of(name: str, config: dict) -> ModelSpec:
    return ARCHITECTURES[name].read(HFConfig(config), HFConfig({}))


def variants_of(name: str) -> list[tuple[dict, str, int]]:
    """Return (config, difference from the family's base, index of its result)."""
    return [
        (
            {k: v for k, v in (TABLE["bases"][name] | changes).items() if k not in without},
            f"{changes} without {without}",
            result,
        )
        for family, changes, without, result in TABLE["variants"]
        if family == name
    ]


def described(model: ModelSpec) -> dict:
    """Return a spec in the terms of the table."""
    return {
        "layers": [_layer(model, index) for index in range(model.num_hidden_layers)],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "eps": model.norm_eps,
        "tied": model.tie_word_embeddings,
        "embedding_scale": model.embedding_scale,
        "logit_scale": model.logit_scale,
        "logit_soft_cap": model.logit_soft_cap,
        "bos_token_id": model.bos_token_id,
        "eos_token_ids": list(model.eos_token_ids),
        "dtype": model.dtype,
    }


def _layer(model: ModelSpec, index: int) -> dict:
    rope, model = rope_kind(model, index), model.of_layer(index)
    table = None
    if rope is not None:
        angles = np.outer([1, LENGTH - 1], rope_frequencies(rope, model.head_dim))
        table = (np.stack([np.cos(angles), np.sin(angles)]) * rope.attention_factor).ravel()
    experts = model.experts_of(index)
    mlp = {"mlp_bias": model.mlp_bias, "inner": model.intermediate_size}
    if experts is not None:
        sizes = [experts.count, experts.per_token, experts.intermediate_size]
        mlp = {"experts": sizes, "normalized": experts.normalized, "shared": experts.shared_size}
    mlp["residual_scale"] = model.residual_scale
    mlp["activation"] = [_ACTIVATIONS[model.activation](x) for x in (-1.5, 0.7)]
    if isinstance(model, DeltaNetSpec) and index in model.recurrent_layers:
        return {"delta": [*model.recurrent_heads, model.conv_taps], **mlp}
    if isinstance(model, MambaSpec) and index in model.recurrent_layers:
        biases = model.conv_bias, model.projection_bias
        return {"mamba": [*model.recurrent_heads, model.conv_taps, *biases], **mlp}
    return {
        "window": model.window(index),
        "chunk": model.chunk(index),
        "scale": model.sm_scale,
        "soft_cap": model.attention_soft_cap,
        "heads": model.num_attention_heads,
        "kv_heads": model.num_key_value_heads,
        "head_dim": getattr(model, "qk_head_dim", model.head_dim),
        "rope": None if table is None else table.tolist(),
        "biases": [model.attention_bias, model.output_bias],
        "parallel": model.parallel_block,
        **mlp,
    }


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def _gelu(x: float) -> float:
    return x / 2 * (1 + math.erf(x / math.sqrt(2)))


def _gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


def expected(result: dict) -> dict:
    layers = [TABLE["layers"][index] for index in result["layers"]]
    want = {**result, "layers": layers}
    size = result["vocab_size"]  # default ids beyond it cannot be sampled
    ends = want.pop("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    want["eos_token_ids"] = [token for token in ends if token < size]
    if want["bos_token_id"] is not None and want["bos_token_id"] >= size:
        want["bos_token_id"] = None
    want["dtype"] = want["dtype"] or "float32"
    return want


def differences(ours: object, theirs: object, at: str = "") -> list[str]:
    """Yield differences, to the digits of the table."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return [
            line
            for key, value in theirs.items()
            for line in differences(ours.get(key), value, f"{at}.{key}")
        ]
    if isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(theirs):
        return [
            line
            for index, (a, b) in enumerate(zip(ours, theirs, strict=True))
            for line in differences(a, b, f"{at}[{index}]")
        ]
    if isinstance(theirs, float) and isinstance(ours, int | float):
        same = math.isclose(ours, theirs, rel_tol=6e-4, abs_tol=1e-4)
    else:
        same = ours == theirs
    return [] if same else [f"{at}: {ours}, transformers {theirs}"]


@cache
def first_difference(model: ModelSpec, result: int) -> str | None:
    lines = differences(described(model), expected(TABLE["results"][result]))
    return lines[0] if lines else None


def faults(name: str) -> tuple[list[str], Counter]:
    """Return differences from transformers, and the count of refusals by reason."""
    found, refusals = [], Counter()
    for config, case, result in variants_of(name):
        refused = TABLE["results"][result].get("refused")
        try:
            model = spec_of(name, config)
        except ModelError as error:
            reason = next((each for each in REFUSALS if re.search(each, str(error))), None)
            refusals["transformers" if refused else reason] += 1
            if refused is None and reason is None:
                found.append(f"{case}: refused: {error}")
            continue
        refusals["read"] += 1
        if refused is not None:
            found.append(f"{case}: read; transformers refuses it: {refused}")
        elif line := first_difference(model, result):
            found.append(f"{case}: {line}")
    return found, refusals


@pytest.mark.parametrize("name", FAMILIES)
def test_variants_match_transformers_or_are_rejected(name):
    found, refusals = faults(name)
    assert not found, f"{len(found)} of {sum(refusals.values())}:\n" + "\n".join(found[:40])
    # transformers refuses most rotations of Ministral 3, because they lack its own field.
    assert refusals["read"] > 0.2 * sum(refusals.values())
    assert refusals["read"] + refusals["transformers"] > 0.7 * sum(refusals.values())


def _prefer_rope_parameters(config, *rest, read=spec.read_rope, **options):
    if config.has("rope_parameters"):
        config = HFConfig({**config.values, "rope_scaling": None})
    return read(config, *rest, **options)


PLANTS = {
    "a default": ("SmolLM3ForCausalLM", {"rope_theta": 1e4}, {}),
    "no default": ("MistralForCausalLM", {"sliding_window": None}, {}),
    "rope_parameters before rope_scaling": (
        "LlamaForCausalLM",
        {},
        {"read_rope": _prefer_rope_parameters},
    ),
    "layer_types ignored": (
        "Qwen2ForCausalLM",
        {},
        {"read_layer_types": lambda config: None},
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_fault_is_detected(plant, monkeypatch):
    name, defaults, functions = PLANTS[plant]
    own = ARCHITECTURES[name]
    planted = replace(own, defaults={**own.defaults, **defaults})
    monkeypatch.setitem(ARCHITECTURES, name, planted)
    for function, wrong in functions.items():
        monkeypatch.setattr(spec, function, wrong)
    assert faults(name)[0]


class Recorder(dict):
    """A dict that records the names of the fields that are read."""

    def __init__(self, values):
        super().__init__(values)
        self.seen: set[str] = set()

    def get(self, name, default=None):
        self.seen.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.seen.add(name)
        return super().__getitem__(name)

    def __contains__(self, name):
        self.seen.add(name)
        return super().__contains__(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_has_the_default_of_transformers(name):
    own, theirs = ARCHITECTURES[name], DEFAULTS[name]
    config = HFConfig(TABLE["bases"][name]).with_defaults(own.defaults, own.defaults)
    config.values = values = Recorder(config.values)
    own.read_spec(config, HFConfig({}))
    assert values.seen - theirs.keys() <= OTHERS
    follows = {"rope_parameters", "layer_types"}  # code derives them from their absence
    assert (values.seen & theirs.keys()) - own.defaults.keys() <= follows
    for field in own.defaults.keys() & theirs.keys():
        assert own.defaults[field] == theirs[field]["default"], field
    assert own.defaults.keys() - theirs.keys() <= OTHERS


@pytest.mark.parametrize("name", sorted(TEXT_DEFAULTS))
def test_every_field_of_text_config_has_the_default_of_transformers(name):
    own, theirs = ARCHITECTURES[name], TEXT_DEFAULTS[name]
    assert isinstance(own, TextSide)
    for field in own.defaults.keys() & theirs.keys() - {"tie_word_embeddings"}:
        assert own.defaults[field] == theirs[field]["default"], field
    # Fields of the text model's family that the class of `text_config` lacks.
    assert own.defaults.keys() - theirs.keys() <= OTHERS | {
        *("tie_word_embeddings", "use_sliding_window", "sliding_window", "max_window_layers"),
        *("bos_token_id", "eos_token_id", "norm_topk_prob", "hidden_size_per_layer_input"),
        *("vocab_size_per_layer_input", "enable_moe_block", "top_k_experts"),
        "moe_intermediate_size",
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_field_is_its_default_and_null_only_where_meaningful(name):
    own, theirs, base = ARCHITECTURES[name], DEFAULTS[name], TABLE["bases"][name]

    def outcome(config):
        try:
            return spec_of(name, config)
        except ModelError as error:
            return str(error).removesuffix(", the default because the field is missing")

    for field, entry in theirs.items():
        if field not in own.defaults:
            continue
        missing = {key: value for key, value in base.items() if key != field}
        if entry["default"] is not None and not field.endswith("_token_id"):
            assert outcome(missing) == outcome({**base, field: entry["default"]}), field
        if not entry["null"]:
            assert f"{field} must not be null" in str(outcome({**base, field: None}))
    optional = {field for field, entry in theirs.items() if entry["null"]}
    assert own.nullable - OTHERS <= optional


def test_default_eos_tokens_apply_only_without_a_generation_config():
    own, base = ARCHITECTURES["LlamaForCausalLM"], dict(TABLE["bases"]["LlamaForCausalLM"])
    assert own.read(HFConfig(base), HFConfig({"eos_token_id": 5})).eos_token_ids == (5, 2)
    del base["eos_token_id"]
    assert own.read(HFConfig(base), HFConfig({})).eos_token_ids == (2,)
    assert own.read(HFConfig(base), HFConfig({"eos_token_id": 5})).eos_token_ids == (5,)
    assert own.read(HFConfig(base), HFConfig({"temperature": 1.0})).eos_token_ids == ()
    assert own.read(HFConfig({**base, "eos_token_id": None}), HFConfig({})).eos_token_ids == ()
