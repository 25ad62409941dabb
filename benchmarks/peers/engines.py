"""How each engine is started as a server: the command, its environment, what its requests need.

Everybody gets two threads (or as many as there are cores), room for 32 sequences of 768 tokens, and
prompts that were never seen before, so that no prefix cache helps. Beyond that the defaults stand.
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

from benchmarks.peers import setup
from forge_jax.config import EngineConfig

MAX_NUM_SEQS = 32
MAX_MODEL_LEN = 768
KV_CACHE_GIB = 1  # vLLM; 32 sequences of 768 tokens of shape M are 0.6 GB
# transformers' defaults take nine tenths of the memory that is free, for the cache and for a dense
# mask of 8192 rows.
TRANSFORMERS_PAGE_SIZE, TRANSFORMERS_BATCH_TOKENS = 256, 512
LLAMA_CPP_QUANTIZATIONS = ("bf16", "q8_0", "q4_0")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A server that can be started. `{port}` in the command stands for its port."""

    name: str
    peer: str
    command: tuple[str, ...]
    model: str  # what its requests name
    environment: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)  # further fields of each request
    takes_token_ids: bool = True


def forge_jax(name: str, options: Mapping[str, Any], model: Path) -> Engine:
    """Raises `ConfigError` for an option that this version of the engine does not have."""
    own = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN, **options}
    EngineConfig.from_options(**own)
    flags = [part for key, value in own.items() for part in (_flag(key), str(value))]
    return Engine(
        name=f"forge-jax {name}",
        peer="forge-jax",
        command=(sys.executable, "-m", "forge_serve", "serve", str(model), *flags, *_port()),
        model=str(model),
    )


def vllm(model: Path, threads: int) -> Engine:
    preload = [str(setup.folder_of("vllm") / "venv" / "lib" / "libiomp5.so")]
    if tcmalloc := _tcmalloc():
        preload.append(tcmalloc)
    return Engine(
        name="vllm bf16",
        peer="vllm",
        command=(
            *(str(setup.python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", model.name, "--dtype", "bfloat16"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)),
            *_port(),
        ),
        environment={
            "LD_PRELOAD": ":".join(preload),  # as its documentation recommends
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        model=model.name,
    )


def llama_cpp(quantization: str, model: Path, threads: int) -> Engine:
    return Engine(
        name=f"llama.cpp {quantization}",
        peer="llama.cpp",
        command=(
            *(str(setup.llama_cpp_binary("llama-server")), "-m", str(gguf(model, quantization))),
            *("--alias", model.name, "--threads", str(threads), "--threads-batch", str(threads)),
            *("--parallel", str(MAX_NUM_SEQS), "--ctx-size", str(MAX_NUM_SEQS * MAX_MODEL_LEN)),
            *("--no-kv-unified", "--cache-ram", "0"),
            *_port(),
        ),
        body={"cache_prompt": False, "samplers": ["top_k"], "top_k": 1},  # greedy, nothing else
        model=model.name,
    )


def transformers(model: Path, threads: int) -> Engine:
    start = "from transformers.cli.transformers import main; main()"
    return Engine(
        name="transformers bf16",
        peer="transformers",
        command=(
            *(str(setup.python_of("transformers")), "-c", start, "serve", str(model)),
            *("--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"),
            *("--cb-num-blocks", str(MAX_NUM_SEQS * MAX_MODEL_LEN // TRANSFORMERS_PAGE_SIZE)),
            *("--cb-max-batch-tokens", str(TRANSFORMERS_BATCH_TOKENS)),
            *_port(),
        ),
        environment={"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        model=str(model),
        takes_token_ids=False,
    )


def gguf(model: Path, quantization: str) -> Path:
    """The model's GGUF file, made by llama.cpp's own tools unless it is there."""
    file = model / f"{quantization}.gguf"
    if file.exists():
        return file
    if quantization == "bf16":
        script = Path(__file__).with_name("to_gguf.py")
        command = [setup.python_of("llama.cpp"), script, model, file]
        subprocess.run([str(part) for part in command], check=True)
        return file
    partial = file.with_name(file.name + ".tmp")
    command = [setup.llama_cpp_binary("llama-quantize"), gguf(model, "bf16"), partial, quantization]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    partial.rename(file)
    return file


def vocab_size(model: Path) -> int:
    return json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]


def num_threads() -> int:
    return len(os.sched_getaffinity(0))


def _port() -> tuple[str, str]:
    return ("--port", "{port}")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _tcmalloc() -> str | None:
    return ctypes.util.find_library("tcmalloc_minimal")
