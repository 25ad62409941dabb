"""Options in Python: names of other engines, misspelled names, and errors in Python's spelling."""

from __future__ import annotations

import pytest

from forge_jax import LLM
from forge_jax.config import EngineConfig, in_python
from forge_jax.config.suggest import did_you_mean, nearest
from forge_jax.engine.process.messages import WireError
from forge_jax.errors import ConfigError


def test_names_of_other_engines_are_arguments():
    config = EngineConfig.from_options(
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        gpu_memory_utilization=0.5,
        kv_cache_dtype="fp8_e4m3",
        enable_prefix_caching=False,
        enforce_eager=True,
        speculative_config={"method": "suffix", "num_speculative_tokens": 4},
        lora_modules=[{"name": "a", "path": "x"}, "b=y"],
        enable_lora=True,
        trust_remote_code=True,
    )
    assert config == EngineConfig.from_options(
        tensor_parallel=2,
        expert_parallel=True,
        memory_fraction=0.5,
        kv_dtype="fp8",
        prefix_cache=False,
        command_buffers=False,
        speculation="suffix",
        max_draft_tokens=4,
        lora=("a=x", "b=y"),
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_seq": 1}, "no such option: max_num_seq; did you mean max_num_seqs?"),
        ({"swap_space": 4}, "swap_space is not supported: preempted sequences are recomputed"),
        ({"tensor_parallel": 1, "tensor_parallel_size": 1}, "tensor_parallel are the same option"),
        ({"tp_size": 1, "tensor_parallel_size": 1}, "are the same option: set only one of them"),
        ({"enable_lora": True}, "enable_lora has no effect by itself: set lora or max_loras"),
        ({"speculative_config": "eagle"}, "speculative_config must be a JSON object"),
        (
            {"quantization": "awq"},
            "quantization awq: the checkpoint's config.json sets the method",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"dtype": "bfloat"}, "dtype must be one of .*, not 'bfloat'; did you mean bfloat16"),
        ({"memory_fraction": "0.5"}, "memory_fraction must be a number, not '0.5'"),
        ({"prefix_cache": 0}, "prefix_cache must be True or False, not 0"),
        ({"speculation": "draft"}, 'speculation="draft" requires draft_model: a folder'),
        (
            {"chunked_prefill": False, "prefill_chunk_size": 8},
            "prefill_chunk_size splits prompts, which chunked_prefill=False forbids",
        ),
        ({"itl_target_ms": 0.5}, "itl_target_ms must be from 1 to 60000 milliseconds, or 0"),
        ({"itl_target_ms": float("nan")}, "itl_target_ms must be from 1 to 60000 milliseconds"),
        ({"itl_target_ms": "200"}, "itl_target_ms must be a number, not '200'"),
        (
            {"itl_target_ms": 200, "deterministic": True},
            "itl_target_ms varies the size of steps, which deterministic=True fixes",
        ),
        (
            {"itl_target_ms": 200, "chunked_prefill": False},
            "itl_target_ms splits prompts, which chunked_prefill=False forbids",
        ),
        ({"lora": ("a=x", "a=y")}, "lora a: two adapters have this name"),
    ],
)
def test_errors_name_python_arguments(options, said):
    with pytest.raises(ConfigError, match=said) as error:
        EngineConfig.from_options(**options)
    assert "--" not in str(error.value)


@pytest.mark.parametrize("itl_target_ms", [None, 0, 0.0])
def test_disabled_latency_target_allows_one_step_size(itl_target_ms):
    EngineConfig.from_options(itl_target_ms=itl_target_ms, deterministic=True)
    EngineConfig.from_options(itl_target_ms=itl_target_ms, chunked_prefill=False)


@pytest.mark.parametrize(("options", "target_ms"), [({}, 0), ({"itl_target_ms": 50}, 50)])
def test_llm_has_no_latency_target_by_default(options, target_ms, monkeypatch):
    configs: list[EngineConfig] = []
    monkeypatch.setattr("forge_jax.llm.assemble", configs.append)
    monkeypatch.setattr(LLM, "_start", lambda *_: None)
    LLM(**options)
    assert configs[0].batch.itl_target_ms == target_ms


def test_command_line_errors_name_flags():
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_options(max_num_seqs=0)
    assert error.value.on_command_line == "--max-num-seqs must be at least 1, not 0"
    assert WireError.of(error.value).error().args == (error.value.on_command_line,)


@pytest.mark.parametrize(
    ("message", "python"),
    [
        ("--max-model-len 99 does not fit", "max_model_len=99 does not fit"),
        ("lower --num-blocks, or", "lower num_blocks, or"),
        ("use --tensor-parallel 1 or 2", "use tensor_parallel=1 or 2"),
        ("with --kernels xla.", 'with kernels="xla".'),
        ("leave --deterministic out", "leave deterministic=True out"),
        ("--no-compile-cache: no", "compile_cache=False: no"),
        ("--compile-cache DIR", "compile_cache_dir DIR"),
        ("for --draft-model self only", 'for draft_model="self" only'),
        ("--lora b=/x: rank 8", "lora b=/x: rank 8"),
        ("--gpu-memory-utilization", "gpu_memory_utilization"),
        ("forge-jax profile --logdir D, --port 1", "forge-jax profile --logdir D, --port 1"),
    ],
)
def test_flags_become_arguments(message, python):
    assert in_python(message) == python


def test_only_a_similar_name_is_suggested():
    assert nearest("Forge-Tyni", ["other", "forge-tiny"]) == "forge-tiny"
    assert nearest("x", ["forge-tiny"]) is None
    assert did_you_mean("prot", ["port", "host"]) == "; did you mean port?"
    assert did_you_mean("prot", []) == ""
