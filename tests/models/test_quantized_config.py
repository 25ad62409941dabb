"""Quantization settings in config.json: they become a QuantSpec, and unknown ones are named."""

import pytest

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import ModelError, UnsupportedModelError
from forge_jax.weights.methods import read_quantization
from forge_jax.weights.names import compile_pattern
from forge_jax.weights.quantization import read_names

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCKS = FP8 | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "mlp.gate"]}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": True,
    "sym": True,
    "damp_percent": 0.01,
    "lm_head": False,
    "static_groups": False,
    "true_sequential": True,
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


def args(**changes):
    """Return the settings of weights or activations with all fields that llm-compressor writes."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "channel",
        "symmetric": True,
        "type": "int",
    } | changes


def compressed(form, weights, inputs=None, **changes):
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "global_compression_ratio": 1.2,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    } | changes


TOKEN = args(dynamic=True, strategy="token", observer=None)
W8A8 = compressed("int-quantized", args(), TOKEN)
FP8_ROWS = compressed("float-quantized", args(type="float"), TOKEN | {"type": "float"})
W4A16 = compressed("pack-quantized", args(num_bits=4, strategy="group", group_size=128))
LAYER = "model.layers.3.mlp.down_proj"


def read(quantization, key="quantization_config"):
    return read_quantization(HFConfig({key: quantization}))


def scheme(quantization, module=LAYER):
    spec = read(quantization)
    assert spec is not None
    return spec.scheme_of(module)


def test_config_without_a_section_is_not_quantized():
    assert read(None) is None


def test_fp8_is_read_by_matrix_and_by_block():
    found = scheme(FP8)
    assert (found.values, found.block, found.scale_name) == ("fp8", (None, None), "weight_scale")
    assert (found.activations, found.static) == ("fp8", False)
    assert scheme(FP8 | {"activation_scheme": "static"}).static
    found = scheme(BLOCKS)
    assert (found.block, found.scale_name) == ((128, 128), "weight_scale_inv")


def test_gptq_and_awq_spellings_are_read():
    found = scheme(GPTQ)
    assert (found.layout.name, found.block, found.ordered, found.zeros) == (
        "gptq",
        (1, 128),
        True,
        False,
    )
    assert (found.zero_offset, scheme(GPTQ | {"checkpoint_format": "gptq_v2"}).zero_offset) == (
        1,
        0,
    )
    found = scheme(GPTQ | {"group_size": -1, "sym": False})
    assert (found.block, found.ordered, found.zeros) == ((1, None), False, True)
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}
    assert scheme(AWQ).block == (1, 128) and scheme(old).block == (1, 64)
    assert scheme(AWQ).zeros and scheme(AWQ).layout.name == "awq"


def test_compressed_tensors_configs_are_read():
    found = scheme(W8A8)
    assert (found.values, found.block, found.activations) == ("int8", (1, None), "int8")
    assert scheme(FP8_ROWS).values == scheme(FP8_ROWS).activations == "fp8"
    static = args(strategy="tensor", type="float")
    found = scheme(compressed("float-quantized", args(strategy="tensor", type="float"), static))
    assert found.block == (None, None) and found.static
    found = scheme(W4A16)
    assert (found.layout.name, found.values, found.block) == ("packed", "int4", (1, 128))
    assert found.activations is None and not found.ordered
    ordered = args(num_bits=4, strategy="group", group_size=32, actorder="group", symmetric=False)
    found = scheme(compressed("pack-quantized", ordered))
    assert found.ordered and found.zeros
    weights = args(type="float", strategy="block", block_structure=[128, 128])
    rows = args(type="float", strategy="group", group_size=128, dynamic=True)
    assert scheme(compressed("float-quantized", weights, rows)).block == (128, 128)


def test_older_section_name_is_read():
    assert read({k: v for k, v in W8A8.items() if k != "quant_method"}, "compression_config")
    with pytest.raises(ModelError, match="compression_config must be omitted"):
        read_quantization(HFConfig({"quantization_config": W8A8, "compression_config": W8A8}))


@pytest.mark.parametrize(
    ("quantization", "plain"),
    [
        (W8A8, ["lm_head"]),
        (BLOCKS, ["lm_head", "model.layers.0.mlp.gate"]),
        (GPTQ, ["lm_head"]),
        (AWQ | {"modules_to_not_convert": ["self_attn"]}, ["model.layers.1.self_attn.q_proj"]),
        (W8A8 | {"ignore": ["re:.*self_attn.(q|k)_proj$"]}, ["model.layers.1.self_attn.k_proj"]),
        (
            GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]},
            ["model.layers.0.mlp.up_proj"],
        ),
    ],
)
def test_excluded_modules_are_left_unquantized(quantization, plain):
    assert scheme(quantization) is not None
    assert scheme(quantization, "model.layers.0.mlp.gate_proj") is not None or plain[0].endswith(
        "up_proj"
    )
    assert [scheme(quantization, module) for module in plain] == [None] * len(plain)


def test_head_can_be_quantized():
    assert scheme(GPTQ | {"lm_head": True}, "lm_head") is not None
    assert scheme(W8A8 | {"ignore": []}, "lm_head") is not None


def of_groups(*groups):
    """Return a config of groups, each with a list of targets and its group size."""
    weights = W4A16["config_groups"]["group_0"]["weights"]
    config_groups = {
        f"group_{i}": {"targets": targets, "weights": weights | {"group_size": size}}
        for i, (targets, size) in enumerate(groups)
    }
    return W4A16 | {"config_groups": config_groups}


def test_most_specific_target_wins():
    """A name precedes a pattern, and a pattern a class, in any order."""
    groups = [(["Linear"], 128), (["re:.*down_proj"], 64), ([LAYER], 32)]
    for order in (groups, groups[::-1]):
        spec = read(of_groups(*order))
        names = (LAYER, LAYER.replace("3", "4"), "model.layers.3.mlp.up_proj")
        assert [spec.scheme_of(name).block[1] for name in names] == [32, 64, 128]
    assert scheme(of_groups((["re:.*down"], 64), (["re:.*mlp.*"], 64))).block[1] == 64
    with pytest.raises(UnsupportedModelError, match=f"several config_groups match {LAYER}"):
        scheme(of_groups((["re:.*down"], 64), (["re:.*mlp.*"], 32)))
    assert scheme(of_groups((["re:.*up_proj"], 64))) is None


@pytest.mark.parametrize("quantization", [GPTQ, AWQ, FP8], ids=["gptq", "awq", "fp8"])
def test_methods_for_all_modules_exclude_routers(quantization):
    router = "model.layers.3.mlp.gate"
    assert read(quantization).scheme_of(router) is not None
    assert read(quantization).scheme_of(router, is_router=True) is None
    expert = "model.layers.3.mlp.experts.7.gate_proj"
    assert read(quantization).scheme_of(expert) == scheme(quantization)


def test_explicitly_targeted_routers_are_quantized():
    router = "model.layers.3.mlp.gate"
    named = GPTQ | {"modules_in_block_to_quantize": [["mlp.gate", "mlp.experts.7.up_proj"]]}
    for quantization in (named, W8A8):
        assert read(quantization).scheme_of(router, is_router=True) is not None
    ignored = W8A8 | {"ignore": ["re:.*mlp.gate$"]}
    assert read(ignored).scheme_of(router, is_router=True) is None
    assert read(ignored).scheme_of(router.replace("gate", "experts.7.gate_proj")) is not None


def changed(quantization, **changes):
    """Return the config with other weights, or (`inputs`) other activations, in its group."""
    group = dict(quantization["config_groups"]["group_0"])
    inputs = changes.pop("inputs", {})
    group["weights"] = group["weights"] | changes
    if inputs:
        group["input_activations"] = group["input_activations"] | inputs
    return quantization | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'.*supported: fp8, com"),
        ({}, "quant_method must be a string"),
        (3, "quantization_config must be an object"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8 | {"scale_fmt": "ue8m0"}, "'scale_fmt' is not a known field"),
        (FP8 | {"activation_scheme": "none"}, "activation_scheme 'none'"),
        (BLOCKS | {"activation_scheme": "static"}, "activation_scheme 'static'"),
        (BLOCKS | {"weight_block_size": [128]}, "weight_block_size must be a list of two"),
        (BLOCKS | {"weight_block_size": [128, True]}, "weight_block_size must be"),
        (BLOCKS | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
        (GPTQ | {"bits": 8}, "bits 8 is not supported; supported: 4"),
        (GPTQ | {"bits": True}, "bits True"),
        (GPTQ | {"group_size": 0}, "group_size must be an integer"),
        (GPTQ | {"group_size": 33}, "group_size must be even"),
        (GPTQ | {"sym": "yes"}, "sym must be true or false"),
        (GPTQ | {"dynamic": {"-:mlp": {}}}, "'dynamic' is not a known field"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"format": "gptq_v2", "checkpoint_format": "gptq"}, "format 'gptq_v2'"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype 'int8'"),
        (GPTQ | {"modules_in_block_to_quantize": [1]}, "modules_in_block_to_quantize must be"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (W8A8 | {"format": "marlin-24"}, "format 'marlin-24'"),
        (W8A8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (W8A8 | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (W8A8 | {"config_groups": {}}, "config_groups must be an object of 1"),
        (W8A8 | {"ignore": ["re:(?=a)"]}, r"ignore: pattern 're:\(\?=a\)'.* not supported"),
        (changed(W8A8, symmetric=False), "weights: symmetric False"),
        (changed(W8A8, num_bits=4), "num_bits 4.*8 with format int-quantized"),
        (changed(W8A8, type="float"), "type 'float'"),
        (changed(W8A8, strategy="tensor_group"), "strategy 'tensor_group'"),
        (changed(W8A8, group_size=128), "group_size must be omitted with strategy channel"),
        (changed(W8A8, inputs={"group_size": 64}), "group_size must be omitted with strategy to"),
        (changed(W4A16, block_structure=[8, 8]), "block_structure must be omitted with strate"),
        (changed(W8A8, novelty=1), "'novelty' is not a known field"),
        (changed(W8A8, inputs={"symmetric": False}), "input_activations: symmetric False"),
        (changed(W8A8, inputs={"strategy": "tensor"}), "strategy 'tensor'.*token if dynamic"),
        (changed(W8A8, inputs={"dynamic": "local"}), "dynamic 'local'"),
        (changed(FP8_ROWS, inputs={"num_bits": 4}), "num_bits 4"),
        (changed(W4A16, num_bits=8), "num_bits 8.*4 with format pack-quantized"),
        (changed(W4A16, actorder="other"), "actorder 'other'"),
    ],
)  # fmt: skip
def test_unknown_settings_are_named_in_the_error(quantization, message):
    with pytest.raises(ModelError, match=message) as caught:
        read(quantization)
    assert "config" in str(caught.value) and len(str(caught.value)) < 500


def test_calibrated_cache_scales_are_ignored_and_logged(caplog):
    assert read(FP8 | {"kv_cache_scheme": args(type="float")}) is not None
    assert "kv_cache_scheme is ignored" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (".*lm_head", ["lm_head", "a.lm_head", "lm_heads"], ["lm_hea"]),
        (r"model\.layers\.[0-3]\..*", ["model.layers.2.x"], ["model.layers.20.x", "modelx"]),
        (".*mlp.(gate|up)_proj$", ["x.mlp.up_proj"], ["x.mlp.down_proj", "x.mlp.up_proj.y"]),
        (r".*\.\d+\.a?b+$", ["x.10.abb", "x.1.b"], ["x..b", "x.1.a", "x.1.aab"]),
        ("^x", ["xy"], ["yx"]),
        (r"a{2}\.(?:mlp\.(?:up|down)|attn)$", ["aa.mlp.up", "aa.attn"], ["a.attn", "aa.mlp"]),
    ],
)  # fmt: skip
def test_patterns_match_from_the_start_like_pythons(pattern, yes, no):
    matches = compile_pattern(pattern)
    assert [matches(name) for name in yes + no] == [True] * len(yes) + [False] * len(no)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a|b", r"\1", "(?!x)", "[z-a]", "a**", "((a{100}){100}){100}", "\ud800", "x" * 257),
        *(r"\pL{400}", r"(\pL{400}|[a-z.]{900})x"),  # megabytes
        *("x{,2}", "[[:alpha:]]", r"\Qa\E", r"\C"),  # different meaning in Python
    ],
)
def test_unsupported_patterns_are_rejected(pattern, capfd):
    with pytest.raises(ValueError, match=r"supported|longer|surrogates"):
        compile_pattern(pattern)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("pattern", [".*" * 100 + "b", "(a+)+$", "(.*)*" * 50 + "b"])
def test_pattern_takes_linear_time(pattern):
    """A backtracking engine would not return from any of these."""
    assert not compile_pattern(pattern)("a" * 4000 + "c")


def test_pattern_list_is_limited():
    section = HFConfig({"targets": [f"re:layers.{i}" for i in range(1001)]}, "config_groups.a")
    with pytest.raises(ModelError, match=r"config_groups.a: targets must be .* at most 1000 patt"):
        read_names(section, "targets", "patterns")


def test_unimplemented_options_raise_unsupported_model_error():
    with pytest.raises(UnsupportedModelError):
        read(GPTQ | {"bits": 3})


def test_model_optimizer_section_is_refused_by_name():
    section = {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt"}}
    with pytest.raises(UnsupportedModelError, match="quant_algo 'FP8' without a quant_method"):
        read_quantization(HFConfig({"quantization_config": section}))
