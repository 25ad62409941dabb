"""Writes bundles for GPUs with `forge-jax compile`: part of `make test-cuda-compile`.

    python tests/aot/bundle.py [--quick]

Prints a line per bundle. The exit code is 1 if a bundle is not what the GPU's engine would load.
Each GPU has its own process, because Mosaic compiles for only one GPU per process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import benchmarks.random_model as models
from forge_jax.step.targets import TARGETS, Target

SHAPE = models.Shape(256, 512, 1, 2, 1, vocab_size=512, tie_word_embeddings=True)
FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--dtype", "bfloat16")
STEPS = ("decode[4]", "mixed[64]", "pool[64]")
NAMES = {*STEPS, "new_state", "admit", "set_history"}
KERNEL = b"mosaic"  # compressed, so longer names may be in several pieces
QUICK_TARGETS = ("h200",)


def faults(bundle: Path, target: Target) -> Iterator[str]:
    """Return the differences from the bundle that the target's engine needs."""
    manifest = json.loads((bundle / "bundle.json").read_text())
    major, minor = target.gpu.capability
    device = f"gpu, compute capability {major}.{minor}, {target.cores} multiprocessors"
    if manifest["identity"]["device"] != device:
        yield f"the device is {manifest['identity']['device']}, not {device}"
    if manifest["identity"]["XLA's CUDA plugin"] is None:
        yield "the compiler's version is missing"
    entries = manifest["executables"]
    if entries.keys() != NAMES:
        yield f"the executables are {', '.join(entries)}"
    for name in STEPS:
        if name in entries and KERNEL not in (bundle / entries[name]["file"]).read_bytes():
            yield f"{name} has no attention kernel"
    blocks = f"the default, {manifest['num_blocks']}"
    if manifest["identity"]["--num-blocks"] != blocks or manifest["num_blocks"] < 4:
        yield f"the KV cache has {manifest['num_blocks']} blocks"


def write(model: Path, bundle: Path, target: str) -> str:
    """Write a bundle in its own process, and return the command's output."""
    command = [sys.executable, "-m", "forge_serve", "compile", str(model), *FLAGS]
    command += ["--output", str(bundle), "--target", target]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only for an H200")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.write_model(folder / "model", SHAPE)
        for key in QUICK_TARGETS if args.quick else TARGETS:
            start = time.perf_counter()
            print(write(folder / "model", folder / key, key), flush=True)
            found = list(faults(folder / key, Target.read(key)))
            print(f"{key}: {time.perf_counter() - start:.1f} s", *found, sep="\n    FAULT: ")
            failed = failed or bool(found)
        if not list(faults(folder / QUICK_TARGETS[0], Target.read("a100"))):
            print("    FAULT: the check does not detect another GPU")
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
