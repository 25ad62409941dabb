"""Measure the time to load weights from safetensors, GGUF and converted folders.

    python -m benchmarks.load [--shape M] [--rounds 5] [--cache warm|cold] [--memory used|new]
                              [--output FILE.json]

One model with random bfloat16 weights is written in each format. Each time is that of a new process
which has imported everything and started the device. It covers the call that reads, up to the last
leaf on the device, checks included.

The floor is `safetensors.numpy.load_file` alone, which makes numpy arrays and no leaves. "packed"
is for the CPU kernels: safetensors and GGUF blocks are packed while they are read, and a converted
folder is packed already. "mapped" leaves the files in the page cache.

Each round reads all formats in turn, starting with the next one. It also measures how fast the
machine reads the file, writes to new memory and copies (`benchmarks.floors`). Each process
allocates and frees memory before it reads, by default. This excludes the time that the host of a
virtual machine takes to find memory. `--memory new` includes it, as in a start on such a machine.

Warm: before each process the files are read, unmeasured. Cold: the files are dropped from the page
cache (`POSIX_FADV_DONTNEED`) on file systems that support it. Caches below the file system remain
unknown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report as reports
from benchmarks.floors import FLOORS, seconds_at_best
from benchmarks.k_quants import rounded_rows
from benchmarks.random_model import SHAPES, write_model
from forge_serve.bench.errors import BenchmarkError

FLOOR = "safetensors.numpy"
BLOCK = 16 << 20
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Case:
    """A format of the model, and how it is read."""

    name: str
    path: str  # relative to the benchmark's folder
    kernels: str  # value of `--kernels`
    mapped: bool = False


CASES = (
    Case(FLOOR, "safetensors/model.safetensors", "xla"),
    Case("safetensors", "safetensors", "xla"),
    Case("GGUF", "model.gguf", "xla"),
    Case("converted", "converted", "xla"),
    Case("safetensors, packed", "safetensors", "auto"),
    Case("GGUF Q8_0, packed", "Q8_0.gguf", "auto"),
    Case("converted, packed", "converted-packed", "auto"),
    Case("converted, packed, mapped", "converted-packed", "auto", mapped=True),
)
GGUF_FILES = {"BF16": "model.gguf", "Q8_0": "Q8_0.gguf"}  # by the type of their matrices


def main(argv: Sequence[str] | None = None) -> int:
    parser = reports.parser("load", "Measure the time to load weights by format.", rounds=5)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="M")
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm")
    parser.add_argument("--memory", choices=("used", "new"), default="used")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder for the model files, which are kept (default: a temporary one)",
    )
    parser.add_argument("--child", nargs=2, metavar=("NAME", "PATH"), help="internal")
    args = parser.parse_args(argv)
    if args.child:
        name, path = args.child
        [case] = [replace(case, path=path) for case in CASES if case.name == name]
        print(json.dumps(read_once(case, args.memory)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        return reports.publish("load", args, lambda: measure(args, folder), table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    left_out = write_forms(folder, args.shape)
    cases = [case for case in CASES if case.name not in left_out]
    rounds, floors = [], []
    for index in range(args.rounds):
        first = index % len(cases)  # so that no case always follows the same one
        order = [*cases[first:], *cases[:first]]
        title = f"round {index + 1} of {args.rounds}"
        rounds.append(_round(folder, order, args.cache, args.memory, title))
        _prepare(folder / CASES[0].path, args.cache)
        floors.append(seconds_at_best(folder / CASES[0].path))
    return {
        "shape": args.shape,
        "cache": args.cache,
        "memory": args.memory,
        "left_out": left_out,
        "rounds": rounds,
        "median": medians(rounds),
        "floors": floors,
    }


def write_forms(folder: Path, shape: str) -> dict[str, str]:
    """Write the missing formats and return the cases that cannot be written, with reasons."""
    source, left_out = folder / "safetensors", {}
    if not source.exists():
        write_model(source, SHAPES[shape])
    for kind, name in GGUF_FILES.items():
        if (folder / name).exists():
            continue
        try:
            write_gguf(source, folder / name, kind)
        except ImportError:
            left_out |= {case.name: "needs the package gguf" for case in CASES if case.path == name}
    for case in CASES:
        target = folder / case.path
        if not case.name.startswith("converted") or target.exists():
            continue
        command = ["convert", str(source), str(target), "--kernels", case.kernels]
        done = _python("-m", "forge_serve.cli.main", *command)
        if case.kernels == "auto" and "packed" not in done:
            packed = [case.name for case in CASES if case.kernels == "auto"]
            left_out |= dict.fromkeys(packed, "no CPU kernels here")
    return left_out


def write_gguf(source: Path, target: Path, kind: str = "BF16", *, vocabulary: bool = False) -> None:
    """Write the same Llama as GGUF, with its matrices rounded to the type `kind`.

    The gguf package rounds, or `benchmarks.k_quants` for types with blocks of 256. Matrices whose
    rows are not whole blocks of the type become bfloat16. Rows of queries and keys have llama.cpp's
    order, in which neighbors are rotated together. `vocabulary` adds that of
    `benchmarks.random_model`.
    """
    import gguf

    from forge_jax.checkpoint.safetensors import read_header

    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    width = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(config.get("head_dim") or width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if vocabulary:
        writer.add_name(source.name)
        _add_vocabulary(writer, source, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, stored in read_header(source / "model.safetensors").items():
        values = stored.read()
        if values.ndim < 2:
            writer.add_tensor(gguf_name(name), values.astype("float32"))
            continue
        count = heads.get(name.split(".")[-2])
        if count is not None:
            halves = values.reshape(count, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        chosen = gguf.GGMLQuantizationType[kind]
        if stored.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
            chosen = gguf.GGMLQuantizationType.BF16
        if chosen.name == values.dtype.name.replace("bfloat", "BF"):
            data = values.view("uint8")
        else:
            data = rounded_rows(values.astype("float32"), chosen.name)
        writer.add_tensor(gguf_name(name), data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, source: Path, config: dict[str, Any]) -> None:
    import gguf

    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    types = gguf.TokenType
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types(
        [types.CONTROL if i in special else types.NORMAL for i in range(len(ids))]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def gguf_name(name: str) -> str:
    """Return GGUF's name: "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    part = name.removesuffix(".weight")
    if not part.startswith("model.layers."):
        return f"{GGUF_NAMES[part]}.weight"
    _, _, layer, rest = part.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"


def read_once(case: Case, memory: str = "used") -> dict[str, float]:
    """Read the format once in this process and return its seconds and the bytes of the result."""
    read = _floor(case) if case.name == FLOOR else _leaves(case)
    if memory == "used":
        touch_memory(2 * sum(file.stat().st_size for file in files_of(Path(case.path))))
    start = time.perf_counter()
    arrays = read()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": sum(array.nbytes for array in arrays)}


def touch_memory(num_bytes: int) -> None:
    """Allocate memory, write to it and free it.

    On a virtual machine the host may have to find each page that was unused for seconds. This takes
    longer than the whole read, and the processes before decide which one pays.
    """
    import numpy as np

    np.empty(num_bytes, np.uint8).fill(1)


def _floor(case: Case) -> Callable[[], list[Any]]:
    import ml_dtypes  # noqa: F401  # without it the library knows no bfloat16
    from safetensors.numpy import load_file

    return lambda: list(load_file(case.path).values())


def _leaves(case: Case) -> Callable[[], Sequence[Any]]:
    import jax

    from forge_jax.checkpoint.load import load_weights
    from forge_jax.checkpoint.model_spec import read_spec
    from forge_jax.config import EngineConfig
    from forge_jax.engine.builder import choose_device, choose_kernels, read_converted
    from forge_jax.models import build_model

    folder = Path(case.path)
    config = EngineConfig.from_options(model=case.path, kernels=case.kernels)
    device = choose_device(config)
    spec = read_spec(folder)
    formats = choose_kernels(config, spec, device, read_converted(config, folder)).formats
    model = build_model(spec, "auto", formats)
    jax.block_until_ready(jax.device_put(0, device))

    return lambda: load_weights(model, folder, device=device, mapped=case.mapped, progress=False)


def _round(
    folder: Path, cases: Sequence[Case], cache: str, memory: str, title: str
) -> dict[str, Any]:
    figures = {}
    for case in cases:
        path = folder / case.path
        _prepare(path, cache)
        child = ["--child", case.name, str(path), "--memory", memory]
        found = json.loads(_python("-m", "benchmarks.load", *child))
        figures[case.name] = found
        reports.progress(f"{title}: {case.name} {found['seconds']:.2f} s")
    return figures


def _prepare(path: Path, cache: str) -> None:
    for file in files_of(path):
        drop(file) if cache == "cold" else _read_all(file)


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def drop(file: Path) -> None:
    """Drop a file from the page cache, after syncing it."""
    number = os.open(file, os.O_RDONLY)
    try:
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(number)


def _read_all(file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.read(BLOCK):
            pass


def _python(*arguments: str) -> str:
    """Return the output of a new Python process; raise with the end of its log if it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-5:])
        raise BenchmarkError(f"python {' '.join(arguments)} failed:\n{last}")
    return done.stdout


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by case: seconds, their ratio to the round's floor, and GB/s of the result."""

    def figures(name: str) -> Iterator[tuple[float, float, float]]:
        for one in rounds:
            seconds, floor = one[name]["seconds"], one[FLOOR]["seconds"]
            yield seconds, seconds / floor, one[name]["bytes"] / seconds / 1e9

    keys = ("seconds", "per_floor", "gb_per_s")
    return {
        name: dict(zip(keys, map(statistics.median, zip(*figures(name), strict=True)), strict=True))
        for name in rounds[0]
    }


def table(report: dict[str, Any]) -> str:
    rows = [
        (name, *(reports.number(f[key], 2) for key in ("seconds", "per_floor", "gb_per_s")))
        for name, f in report["median"].items()
    ]
    for name, title in FLOORS.items():
        seconds = statistics.median(floors[name] for floors in report["floors"])
        size = report["rounds"][0][FLOOR]["bytes"]
        rows.append((title, *(reports.number(x, 2) for x in (seconds, None, size / seconds / 1e9))))
    rows += [(name, why, "-", "-") for name, why in report["left_out"].items()]
    header = ("read from", "s", "of safetensors.numpy", "GB/s")
    num = len(report["rounds"])
    title = f"{reports.heading(report)}; shape {report['shape']}, page cache {report['cache']}, "
    title += f"memory {report['memory']}, "
    return "\n".join((f"{title}medians of {num} rounds", "", reports.table(header, rows)))


if __name__ == "__main__":
    sys.exit(main())
