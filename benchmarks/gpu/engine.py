"""The whole engine on an 8B model, and transformers' continuous batching on the same weights."""

from __future__ import annotations

import atexit
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.model import write_folder
from benchmarks.gpu.parts import Case, Missing

REQUESTS, PROMPT, OUTPUT = 128, 256, 128
WRITE_S, RUN_S = 60.0, 110.0
END_S = 5.0  # time for a process to end before its case counts as hanging


def engine(tiny: bool) -> Iterator[Case]:
    """Yield output tokens/s, prompts included, of this engine and of transformers.

    The deterministic tier also compares a request alone with the same request in the batch.
    """
    yield Case("write the model", lambda: _written(tiny)[1], WRITE_S)
    for which in ("forge", "forge_deterministic", "forge_fp8", "transformers"):
        yield Case(which, partial(_generate, which, tiny), RUN_S)


@cache
def _written(tiny: bool) -> tuple[Path, dict[str, Any]]:
    """Return a folder with the model, which is deleted at exit, and how long it took to write."""
    folder = Path(tempfile.mkdtemp(prefix="forge-gpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    begin_s = time.perf_counter()
    spec = write_folder(folder, tiny)
    return folder, {"write_s": time.perf_counter() - begin_s, "vocab_size": spec.vocab_size}


def _generate(which: str, tiny: bool) -> dict[str, Any]:
    """Run one engine in a separate process, because each takes most of the device's memory."""
    if which == "transformers":
        for package in ("torch", "transformers"):
            if importlib.util.find_spec(package) is None:
                raise Missing(f"{package} is not installed")
    folder, written = _written(tiny)
    sizes = (4, 16, 8) if tiny else (REQUESTS, PROMPT, OUTPUT)
    command = [sys.executable, "-m", "benchmarks.gpu.engine", which, str(folder)]
    command += map(str, (*sizes, written["vocab_size"]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S - END_S)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-6:]))
    return json.loads(done.stdout.strip().splitlines()[-1])


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return token ids with nothing in common and without special tokens."""
    return [
        [(7919 * i + 31 * j) % (vocab_size - 10) + 5 for j in range(length)] for i in range(count)
    ]


def forge(
    folder: str,
    count: int,
    length: int,
    output: int,
    vocab_size: int,
    kv_dtype: str = "auto",
    deterministic: bool = False,
) -> dict[str, Any]:
    from forge_jax import LLM, SamplingParams

    begin_s = time.perf_counter()
    llm = LLM(
        folder,
        kv_dtype=kv_dtype,
        max_model_len=length + output + 64,
        max_num_seqs=max(count, 4),
        deterministic=deterministic,
    )
    ready_s = time.perf_counter() - begin_s
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    llm.generate(prompts(4, length, vocab_size)[1:], params, progress=False)
    batch = prompts(count + 4, length, vocab_size)[4:]
    begin_s = time.perf_counter()
    outputs = llm.generate(batch, params, progress=False)
    seconds = time.perf_counter() - begin_s
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    figures = {"tokens_per_s": tokens / seconds, "ready_s": ready_s, "tokens": tokens}
    if deterministic:
        (alone,) = llm.generate(batch[:1], params, progress=False)
        same = alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids
        figures["same_alone_and_in_the_batch"] = same
    return figures


def transformers(
    folder: str, count: int, length: int, output: int, vocab_size: int
) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, GenerationConfig  # pyright: ignore[reportMissingImports]

    begin_s = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=device, attn_implementation="sdpa_paged"
    )
    ready_s = time.perf_counter() - begin_s
    config = GenerationConfig(
        max_new_tokens=output, do_sample=False, eos_token_id=vocab_size - 1, pad_token_id=0,
        use_cuda_graph=device == "cuda",
    )  # fmt: skip
    model.generate_batch(inputs=prompts(4, length, vocab_size), generation_config=config)
    batch = prompts(count + 4, length, vocab_size)[4:]
    begin_s = time.perf_counter()
    outputs = model.generate_batch(inputs=batch, generation_config=config)
    seconds = time.perf_counter() - begin_s
    tokens = sum(len(o.generated_tokens) for o in outputs.values())
    return {"tokens_per_s": tokens / seconds, "ready_s": ready_s, "tokens": tokens}


if __name__ == "__main__":
    _, which, where, *numbers = sys.argv
    run = {
        "forge": forge,
        "forge_fp8": partial(forge, kv_dtype="fp8"),
        "forge_deterministic": partial(forge, deterministic=True),
        "transformers": transformers,
    }[which]
    print(json.dumps(run(where, *map(int, numbers))))
