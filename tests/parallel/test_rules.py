"""Partition rules and their rejections, without a device."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config import EngineConfig
from forge_jax.engine.builder import choose_device
from forge_jax.errors import ConfigError
from forge_jax.models import build_model
from forge_jax.models.plugins import find_architecture
from forge_jax.step.placement import choose_placements
from forge_jax.weights.partition import (
    check_shards,
    partition_of,
    shard_spec,
    with_whole_experts,
)

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"
FAMILIES = [
    name
    for name in sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
    if find_architecture(read_spec(GOLDENS / name).architecture).tensor_parallel
]


def config(**options):
    return EngineConfig.from_options(backend="cpu", **options)


# Of gated DeltaNet, or groups of Mamba-2.
TWO_KEY_HEADS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "granitemoehybrid_dense")


@pytest.mark.parametrize(
    ("name", "shards"),
    [(name, n) for name in FAMILIES for n in (2, 4) if n == 2 or name not in TWO_KEY_HEADS],
)
def test_shards_of_a_leaf_form_a_narrower_model(name, shards):
    spec = replace(read_spec(GOLDENS / name), quantization=None)  # MXFP4 has two values per byte
    check_shards(spec, shards)
    whole, narrow = build_model(spec), build_model(spec, shards=shards)
    assert whole.names == narrow.names
    cut_leaves = 0
    for leaf_name, leaf, part in zip(whole.names, whole.leaves, narrow.leaves, strict=True):
        cut = partition_of(leaf_name, spec, shards)
        if cut is None:
            assert leaf.shape == part.shape
            continue
        cut_leaves += 1
        numbers = 1 + np.arange(leaf.size).reshape(leaf.shape)
        parts = [cut.shard(numbers, index) for index in range(shards)]
        assert {each.shape for each in parts} == {part.shape}
        there = np.unique(np.concatenate([each.reshape(-1) for each in parts]))
        assert np.array_equal(there[there > 0], numbers.reshape(-1))
    assert cut_leaves >= 1 + 4 * spec.num_hidden_layers


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe_step", "gpt_oss"])
@pytest.mark.parametrize("shards", [2, 4])
def test_expert_parallel_device_has_whole_experts(name, shards):
    read = read_spec(GOLDENS / name)
    spec = with_whole_experts(read)
    check_shards(spec, shards)
    whole, part, cut = (
        build_model(each, shards=n) for each, n in ((spec, 1), (spec, shards), (read, shards))
    )
    own = spec.experts.count // shards
    for leaf_name, leaf, own_leaf, cut_leaf in zip(
        whole.names, whole.leaves, part.leaves, cut.leaves, strict=True
    ):
        partition = partition_of(leaf_name, spec, shards)
        of_experts = len(leaf.shape) == 3 or leaf_name.endswith(("gate_up_bias", "down_bias"))
        if not of_experts:  # as with tensor parallelism
            assert own_leaf.shape == cut_leaf.shape and partition == partition_of(
                leaf_name, read, shards
            )
            continue
        assert own_leaf.shape == (own, *leaf.shape[1:])
        numbers = np.arange(leaf.size).reshape(leaf.shape)
        for index in range(shards):
            of_device = numbers[own * index : own * (index + 1)]
            assert np.array_equal(partition.shard(numbers, index), of_device)
            assert partition.experts(index) == range(own * index, own * (index + 1))
    assert part.param_bytes < whole.param_bytes and part.names == whole.names


@pytest.mark.parametrize(
    ("name", "shards", "error"),
    [
        ("mixtral_window", 2, "the number of experts (5) of this model: omit --expert-parallel"),
        ("qwen3_moe", 8, "num_attention_heads (4) and the number of experts (12) of this model: "
         "use --tensor-parallel 2 or 4, or omit --expert-parallel"),
    ],
)  # fmt: skip
def test_device_count_that_does_not_divide_the_experts_is_rejected(name, shards, error):
    with pytest.raises(ConfigError, match=re.escape(error)):
        check_shards(with_whole_experts(read_spec(GOLDENS / name)), shards)


def test_expert_parallel_model_without_experts_is_rejected():
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM\) has none: omit the option"):
        with_whole_experts(read_spec(GOLDENS / "llama31"))


def test_expert_parallel_on_one_device_is_rejected():
    with pytest.raises(ConfigError, match="set tensor_parallel to at least 2, or omit expert_par"):
        config(expert_parallel=True)
    assert config(expert_parallel=True, tensor_parallel=2).parallel.expert_parallel


def test_experts_whose_width_cannot_be_split_are_divided():
    spec = read_spec(GOLDENS / "mixtral")
    spec = replace(spec, experts=replace(spec.experts, intermediate_size=49))
    with pytest.raises(ConfigError, match=r"the experts' intermediate size \(49\)"):
        check_shards(spec, 2)
    check_shards(with_whole_experts(spec), 2)


def test_query_shard_has_its_keys_and_values():
    spec = read_spec(GOLDENS / "llama31")
    H, K, D = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    assert (H, K) == (8, 2)
    head = np.repeat(np.arange(H + 2 * K), D)[:, None]  # the head of each row
    cut = partition_of("layers.0.attention.qkv.weight", spec, 4)
    assert cut is not None
    heads = [cut.shard(head, index)[::D, 0].tolist() for index in range(4)]
    assert heads == [[0, 1, 8, 10], [2, 3, 8, 10], [4, 5, 9, 11], [6, 7, 9, 11]]
    shard = shard_spec(spec, 4)
    assert (shard.num_attention_heads, shard.num_key_value_heads) == (2, 1)


def test_mamba_shard_has_its_heads_and_whole_shared_inputs():
    spec = read_spec(GOLDENS / "granitemoehybrid")
    G, H, N, P = spec.recurrent_heads
    assert (G, H) == (1, 8)
    head, shared = np.arange(H), np.full(2 * N, -1)  # the head of each row, or -1 for B and C
    channels = np.concatenate([np.repeat(head, P), shared])
    expected = {
        "inputs.weight": np.concatenate([np.repeat(head, P), channels, head])[:, None],
        "taps": channels[:, None],
        "taps_bias": channels,
        "out.weight": np.repeat(head, P)[None],
        "out_norm": np.repeat(head, P),
        "skip": head,
    }
    for leaf, rows in expected.items():
        cut = partition_of(f"layers.0.mamba.{leaf}", spec, 4)
        assert cut is not None
        for index in range(4):
            own = cut.shard(rows, index).reshape(-1)
            of_device = (rows == -1) | (rows // 2 == index)
            assert own.tolist() == rows[of_device].tolist(), leaf
    two_groups = read_spec(GOLDENS / "granitemoehybrid_dense")
    with pytest.raises(ConfigError, match=r"4 does not divide mamba_n_groups \(2\)"):
        check_shards(two_groups, 4)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next"])
def test_key_head_shard_has_its_value_heads_gates_and_channels(name):
    spec = read_spec(GOLDENS / name)
    layer = f"layers.{min(spec.recurrent_layers)}.delta"
    K, H, Dk, Dv = spec.recurrent_heads
    key, value = np.arange(K), np.arange(H) // (H // K)  # the key head of each head
    of_keys, of_values = np.repeat(key, Dk), np.repeat(value, Dv)
    channels = np.concatenate([of_keys, of_keys, of_values])
    rows, gates = np.concatenate([channels, of_values]), np.concatenate([value, value])
    if spec.grouped:
        rows, gates = np.sort(rows), np.sort(gates)
    expected = {
        f"{layer}.qkvz.weight": rows[:, None],
        f"{layer}.ba.weight": gates[:, None],
        f"{layer}.out.weight": of_values[None],
        f"{layer}.taps": channels[:, None],
        f"{layer}.decay": value,
        f"{layer}.decay_bias": value,
    }
    for leaf, heads in expected.items():
        cut = partition_of(leaf, spec, 2)
        assert cut is not None
        for index in range(2):
            own = cut.shard(heads, index)
            assert own.size == heads.size // 2
            assert set(own.flat) == set(range(index * K // 2, (index + 1) * K // 2)), leaf
    for leaf in (f"{layer}.out_norm", f"{layer}.norm.weight"):
        assert partition_of(leaf, spec, 2) is None


def test_gated_query_shard_has_its_gates():
    spec = read_spec(GOLDENS / "qwen3_5_text")
    H, K, D = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    assert (H, K) == (4, 2)
    head = np.repeat(np.arange(2 * H + 2 * K), D)[:, None]  # queries and gates, keys, values
    cut = partition_of("layers.1.attention.qkv.weight", spec, 2)
    assert cut is not None
    heads = [cut.shard(head, index)[::D, 0].tolist() for index in range(2)]
    assert heads == [[0, 1, 2, 3, 8, 10], [4, 5, 6, 7, 9, 11]]


def test_attention_sinks_are_split_like_query_heads():
    spec = read_spec(GOLDENS / "gpt_oss")
    cut = partition_of("layers.0.attention.sinks", spec, 2)
    assert cut is not None and spec.num_attention_heads == 4
    assert [cut.shard(np.arange(4), index).tolist() for index in range(2)] == [[0, 1], [2, 3]]


def test_gate_shard_has_its_alternating_ups():
    spec = read_spec(GOLDENS / "gpt_oss")
    inner = spec.experts.intermediate_size
    for leaf, rows in (
        ("weight", np.arange(2 * inner)[None, :, None]),
        ("bias", np.arange(2 * inner)[None]),
    ):
        cut = partition_of(f"layers.0.mlp.gate_up{'.' if leaf == 'weight' else '_'}{leaf}", spec, 2)
        assert cut is not None
        assert cut.shard(rows, 1).ravel().tolist() == list(range(inner, 2 * inner))
    assert partition_of("layers.0.mlp.down_bias", spec, 2) is None  # one device adds it


def test_gate_shard_has_its_ups():
    spec = read_spec(GOLDENS / "mixtral")
    inner = spec.experts.intermediate_size
    cut = partition_of("layers.0.mlp.gate_up.weight", spec, 2)
    rows = np.broadcast_to(np.arange(2 * inner)[:, None], (3, 2 * inner, 5))
    expected = [*range(inner // 2, inner), *range(inner + inner // 2, 2 * inner)]
    assert cut.shard(rows, 1)[2, :, 4].tolist() == expected


def test_indivisible_vocabulary_is_padded_with_zeros():
    spec = read_spec(GOLDENS / "llama2")
    assert spec.vocab_size == 331
    cut = partition_of("head.weight", spec, 4)
    last = cut.shard(np.ones((331, 2)), 3)
    assert last.shape == (83, 2) and last.sum(axis=0).tolist() == [82, 82]


@pytest.mark.parametrize(
    ("name", "shards", "error"),
    [
        ("llama31", 3, "num_attention_heads (8) and num_key_value_heads (2) and intermediate_size"),
        ("llama2", 8, "num_attention_heads (4) of this model: use --tensor-parallel 1 or 2 or 4"),
        ("mixtral", 5, "num_key_value_heads (2) and the experts' intermediate size (48) of this"),
        (
            "qwen3_next",
            4,
            "divide linear_num_key_heads (2) of this model: use --tensor-parallel 1 or 2",
        ),
    ],
)
def test_device_count_that_does_not_divide_the_model_is_rejected(name, shards, error):
    spec = read_spec(GOLDENS / name)
    with pytest.raises(ConfigError, match=re.escape(error)) as raised:
        check_shards(spec, shards)
    fit = [int(n) for n in re.findall(r"\d+", str(raised.value).split("use ")[1])]
    possible = (1, 2) if name in TWO_KEY_HEADS else (1, 2, 4, spec.num_attention_heads)
    assert fit == sorted(set(possible))
    for n in fit:
        check_shards(spec, n)


def test_key_heads_that_do_not_divide_evenly_are_rejected():
    spec = replace(read_spec(GOLDENS / "llama2"), num_attention_heads=12, num_key_value_heads=6)
    spec = replace(spec, intermediate_size=24)
    with pytest.raises(ConfigError, match=r"4 does not divide num_key_value_heads \(6\) of .* 12$"):
        check_shards(spec, 4)
    check_shards(spec, 3)
    check_shards(spec, 12)


def test_more_devices_than_available_are_rejected():
    asked = config(tensor_parallel=len(jax.devices("cpu")) + 1)
    with pytest.raises(ConfigError, match="there are 1: XLA_FLAGS=--xla_force_host_platform_dev"):
        choose_placements(asked, choose_device(asked))


def test_one_device_needs_no_mesh():
    [placement] = choose_placements(config(), choose_device(config()))
    assert placement.mesh is None


def test_more_stages_than_devices_are_rejected():
    asked = config(pipeline_parallel=len(jax.devices("cpu")) + 1)
    with pytest.raises(ConfigError, match="--tensor-parallel 1 and --pipeline-parallel 2: from"):
        choose_placements(asked, choose_device(asked))


@pytest.mark.parametrize(
    ("option", "value", "flag"),
    [
        ("draft_model", "self", "draft_model"),
        ("lora", ("a=b",), "lora"),
        ("max_loras", 2, "max_loras"),
        ("steering_vectors", ("a=b",), "steering_vectors"),
        ("activations", ("embed",), "activations"),
        ("host_kv_gib", 1.0, "host_kv_gib"),
    ],
)
def test_options_without_stages_are_rejected(option, value, flag):
    more = {"draft_layers": 1, "speculation": "draft"} if option == "draft_model" else {}
    config(**{option: value}, **more)
    with pytest.raises(ConfigError, match=f"^{flag} does not work with pipeline_parallel: omit"):
        config(**{option: value}, **more, pipeline_parallel=2)


def test_hosts_must_divide_all_devices():
    asked = {"num_hosts": 2, "coordinator": "127.0.0.1:5005"}
    config(**asked, pipeline_parallel=2)
    with pytest.raises(ConfigError, match="tensor_parallel=1 times pipeline_parallel=3 is the"):
        config(**asked, pipeline_parallel=3)


def test_tensor_parallel_below_one_is_rejected():
    with pytest.raises(ConfigError, match="tensor_parallel must be at least 1, not 0"):
        config(tensor_parallel=0)
