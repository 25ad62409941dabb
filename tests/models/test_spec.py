"""config.json: both spellings become a ModelSpec, and errors are named."""

import json
import os
from pathlib import Path

import pytest

from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.errors import CheckpointError, ModelError, UnsupportedModelError
from forge_jax.models import RopeSpec, build_model

FIXTURES = Path(__file__).parent.parent / "fixtures"
LLAMA = json.loads((FIXTURES / "goldens/llama2/config.json").read_text())


@pytest.fixture
def spec_of(tmp_path):
    def read(generation=None, without=(), **changes):
        config = {name: value for name, value in (LLAMA | changes).items() if name not in without}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_spec(tmp_path)

    return read


def test_old_and_new_spellings_are_equivalent():
    old = read_spec(FIXTURES / "goldens/llama31")
    assert old.rope == RopeSpec(
        type="llama3",
        theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    )
    new = read_spec(FIXTURES / "goldens/llama32_tied")
    assert new.rope.type == "llama3" and new.rope.theta == 500000.0 and new.rope.factor == 32.0
    assert (old.dtype, new.dtype) == ("float32", "float32")
    assert (old.tie_word_embeddings, new.tie_word_embeddings) == (False, True)


def test_optional_config_fields_have_defaults(spec_of):
    spec = spec_of(
        without=("num_key_value_heads", "head_dim", "torch_dtype", "rope_theta", "rms_norm_eps")
    )
    assert spec.num_key_value_heads == spec.num_attention_heads == 4
    assert spec.head_dim == 16 and spec.sm_scale == 0.25
    assert spec.dtype == "float32" and spec.rope == RopeSpec() and spec.norm_eps == 1e-6


def test_rope_types_are_read(spec_of):
    assert spec_of(rope_scaling={"type": "linear", "factor": 2}).rope == RopeSpec(
        type="linear", factor=2.0
    )
    assert spec_of(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope.theta == 7.0
    with pytest.raises(UnsupportedModelError, match=r"'axial'.*supported: default, linear, dyn"):
        spec_of(rope_scaling={"rope_type": "axial", "factor": 2})
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        spec_of(partial_rotary_factor=0.5)
    with pytest.raises(ModelError, match="rope_scaling: factor must be a number, not None"):
        spec_of(rope_scaling={"rope_type": "linear"})
    with pytest.raises(ModelError, match="high_freq_factor must be above"):
        spec_of(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 1,
            }
        )


def test_eos_tokens_come_from_both_files(spec_of):
    assert spec_of().eos_token_ids == (2,)
    assert spec_of(eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    assert spec_of(eos_token_id=None).eos_token_ids == ()
    assert spec_of({"eos_token_id": [7, 2]}).eos_token_ids == (7, 2)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        spec_of({"eos_token_id": ["</s>"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["RavenForCausalLM"]}, r"'RavenForCausalLM'.*supported: LlamaFor"),
        (
            {"hidden_act": "relu"},
            "hidden_act 'relu' is not supported; supported: silu, swish, gelu",
        ),
        ({"quantization_config": {"quant_method": "exl2"}}, "quant_method 'exl2'"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn' is not supported"),
    ],
)
def test_unsupported_features_are_rejected_by_name(spec_of, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        spec_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architectures must be a list of one name, not None"),
        ({"architectures": []}, "architectures must be"),
        ({"hidden_size": "64"}, "hidden_size must be an integer from 1"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer from 1"),
        ({"vocab_size": 2**31}, "vocab_size must be an integer from 1"),
        ({"vocab_size": None}, "vocab_size must not be null: set it, or remove it"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of"),
        ({"head_dim": None, "hidden_size": 66}, "num_attention_heads must be a divisor of"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number above 0"),
        ({"rope_theta": "10000"}, "rope_theta must be a number"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be an object"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": 1}, "hidden_act must be a string"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"eos_token_id": -1}, "eos_token_id must be a token ID"),
        ({"eos_token_id": 331}, "eos_token_id must be a token ID below 331"),
        ({"eos_token_id": [2] * 10**6}, "eos_token_id must be a token ID"),
        ({"bos_token_id": 2**40}, "bos_token_id must be a token ID"),
        ({"bos_token_id": True}, "bos_token_id must be a token ID"),
        ({"hidden_size": 10**400}, "hidden_size must be an integer from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 1024"),
        ({"num_attention_heads": 10**6}, "num_attention_heads must be an integer from 1"),
        ({"intermediate_size": 2**30}, "intermediate_size must be an integer from 1"),
        ({"head_dim": 2**30}, "head_dim must be an integer from 1"),
        ({"max_position_embeddings": 2**60}, "max_position_embeddings must be an integer from 1"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number above 0"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps must be a finite number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta must be a finite number"),
        ({"rope_theta": [1]}, "rope_theta must be a number"),
        ({"rope_scaling": {"rope_type": ["x" * 10**6]}}, "rope_type must be a string"),
        ({"hidden_act": "x" * 10**6}, "hidden_act 'x"),
        ({"torch_dtype": {"a": 1}}, "torch_dtype must be a string"),
        ({"architectures": ["x" * 10**6]}, "architecture 'x"),
        ({"architectures": {"a": 1}}, "architectures must be a list of one name"),
    ],
)
def test_wrong_field_is_named_in_the_error(spec_of, changes, message):
    with pytest.raises(ModelError, match=message) as caught:
        spec_of(**changes)
    assert len(str(caught.value)) < 2000  # an unknown architecture lists all names


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_unreadable_config_file_is_rejected(spec_of, tmp_path, name):
    """Covers size, depth, a number of a hundred thousand digits, a pipe, and a link loop."""
    spec_of({})
    file = tmp_path / name
    good = file.read_text()

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            read_spec(tmp_path)

    for text in ('{"a": ' + "[" * 100 + "]" * 100 + "}", '{"a": ' + "9" * 10**5 + "}"):
        file.write_text(text)
        refused(name.replace(".", r"\."))
    with file.open("wb") as stream:
        stream.truncate(2**40)  # a sparse file, which takes no disk space
    refused("has 1099511627776 bytes; at most")
    file.unlink()
    os.mkfifo(file)
    refused("not an ordinary file")
    file.unlink()
    file.symlink_to(file)
    refused("cannot be read")
    file.unlink()
    file.write_text(good)
    read_spec(tmp_path)


def test_folder_without_a_model_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json: it is not a model folder"):
        read_spec(tmp_path)
    for text in ("{", "[]", "[" * 100_000, "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_spec(tmp_path)


def test_dtype_is_the_checkpoints_unless_given(spec_of):
    spec = spec_of(torch_dtype="bfloat16")
    assert build_model(spec).dtype == "bfloat16"
    assert build_model(spec, "float32").dtype == "float32"
    with pytest.raises(ModelError, match="dtype must be auto, bfloat16, float16, float32, got 'i"):
        build_model(spec, "int8")
