"""The way to start each engine as a server: command, environment, and fields of its requests.

Every engine gets as many threads as there are cores, and KV room for the same number of sequences
of the same length (`Room`). Other settings keep their defaults.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load import write_gguf
from benchmarks.peers import setup
from forge_jax.config import EngineConfig

BLOCK_SIZE = 16  # forge-jax's CPU block size
# By default, transformers takes nine tenths of the free memory for the cache and for a dense mask
# of 8192 rows.
TRANSFORMERS_PAGE_SIZE, TRANSFORMERS_BATCH_TOKENS = 256, 512
LLAMA_CPP_QUANTIZATIONS = ("bf16", "q8_0", "q4_0", "q4_k_m")


@dataclass(frozen=True, kw_only=True)
class Room:
    """The sequences that a server must have room for."""

    max_num_seqs: int
    max_model_len: int  # tokens of a sequence, prompt and output

    @property
    def num_tokens(self) -> int:
        return self.max_num_seqs * self.max_model_len


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A server that can be started; `{port}` in the command stands for its port."""

    name: str
    peer: str
    weights: str  # type of its matrices; for a GGUF file, "gguf " and the file's type
    command: tuple[str, ...]
    model: str  # name in its requests
    environment: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)  # additional fields of each request
    takes_token_ids: bool = True


def forge_jax(name: str, options: Mapping[str, Any], model: Path, room: Room) -> Engine:
    """Return forge-jax on a model folder.

    Raises:
      ConfigError: This version of the engine does not have an option.
    """
    return _forge_jax(name, str(options.get("quantization", "bf16")), options, model, room)


def forge_jax_gguf(quantization: str, model: Path, room: Room) -> Engine:
    """Return forge-jax on llama.cpp's GGUF file, with its matrices kept in blocks."""
    name = f"gguf {quantization}"
    return _forge_jax(name, name, {"gguf_weights": "packed"}, gguf(model, quantization), room)


def _forge_jax(
    name: str, weights: str, options: Mapping[str, Any], model: Path, room: Room
) -> Engine:
    own = {
        "max_num_seqs": room.max_num_seqs,
        "max_model_len": room.max_model_len,
        "num_blocks": -(-room.num_tokens // options.get("block_size", BLOCK_SIZE)),
        **options,
    }
    EngineConfig.from_options(**own)
    flags = [part for key, value in own.items() for part in (_flag(key), str(value))]
    return Engine(
        name=f"forge-jax {name}",
        peer="forge-jax",
        weights=weights,
        command=(sys.executable, "-m", "forge_serve", "serve", str(model), *flags, *_port()),
        model=str(model),
    )


def vllm(model: Path, threads: int, room: Room) -> Engine:
    preload = [str(setup.folder_of("vllm") / "venv" / "lib" / "libiomp5.so")]
    if tcmalloc := _tcmalloc():
        preload.append(tcmalloc)
    return Engine(
        name="vllm bf16",
        peer="vllm",
        weights="bf16",
        command=(
            *(str(setup.python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", model.name, "--dtype", "bfloat16"),
            *("--max-model-len", str(room.max_model_len)),
            *("--max-num-seqs", str(room.max_num_seqs)),
            *_port(),
        ),
        environment={
            "LD_PRELOAD": ":".join(preload),  # recommended by its documentation
            "VLLM_CPU_KVCACHE_SPACE": str(_kv_gib(model, room)),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        model=model.name,
    )


def llama_cpp(quantization: str, model: Path, threads: int, room: Room) -> Engine:
    return Engine(
        name=f"llama.cpp {quantization}",
        peer="llama.cpp",
        weights="bf16" if quantization == "bf16" else f"gguf {quantization}",
        command=(
            *(str(setup.llama_cpp_binary("llama-server")), "-m", str(gguf(model, quantization))),
            *("--alias", model.name, "--threads", str(threads), "--threads-batch", str(threads)),
            *("--parallel", str(room.max_num_seqs), "--ctx-size", str(room.num_tokens)),
            *("--no-kv-unified", "--cache-ram", "0"),
            *_port(),
        ),
        body={"cache_prompt": False, "samplers": ["top_k"], "top_k": 1},  # greedy sampling only
        model=model.name,
    )


def transformers(model: Path, threads: int, room: Room) -> Engine:
    start = "from transformers.cli.transformers import main; main()"
    return Engine(
        name="transformers bf16",
        peer="transformers",
        weights="bf16",
        command=(
            *(str(setup.python_of("transformers")), "-c", start, "serve", str(model)),
            *("--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"),
            *("--cb-num-blocks", str(-(-room.num_tokens // TRANSFORMERS_PAGE_SIZE))),
            *("--cb-max-batch-tokens", str(TRANSFORMERS_BATCH_TOKENS)),
            *_port(),
        ),
        environment={"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        model=str(model),
        takes_token_ids=False,
    )


def gguf(model: Path, quantization: str) -> Path:
    """Return the model's GGUF file, written by llama.cpp's own quantizer if it does not exist."""
    file = model / f"{quantization}.gguf"
    if file.exists():
        return file
    partial = file.with_name(file.name + ".tmp")
    if quantization == "bf16":
        write_gguf(model, partial, vocabulary=True)
        return partial.rename(file)
    command = [setup.llama_cpp_binary("llama-quantize"), gguf(model, "bf16"), partial, quantization]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return partial.rename(file)


def config(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text(encoding="utf-8"))


def vocab_size(model: Path) -> int:
    return config(model)["vocab_size"]


def _kv_gib(model: Path, room: Room) -> int:
    """Return the whole GiB that hold a bfloat16 KV cache for that room."""
    own = config(model)
    values = 2 * own["num_hidden_layers"] * own["num_key_value_heads"] * own["head_dim"]
    return -(-room.num_tokens * values * 2 // 2**30)


def num_threads() -> int:
    return len(os.sched_getaffinity(0))


def _port() -> tuple[str, str]:
    return ("--port", "{port}")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _tcmalloc() -> str | None:
    return ctypes.util.find_library("tcmalloc_minimal")
