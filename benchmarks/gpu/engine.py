"""The whole engine on an 8B model, and transformers' continuous batching on the same weights."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.model import write_folder

REQUESTS, PROMPT, OUTPUT = 128, 256, 128
PEER_S, ALL_S = 100.0, 200.0


def engine(tiny: bool) -> dict[str, Any]:
    """Return both output tokens/s, prompts included, and their ratio; also with an fp8 cache."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin_s = time.perf_counter()
        spec = write_folder(folder, tiny)
        figures: dict[str, Any] = {"write_s": time.perf_counter() - begin_s}
        sizes = (4, 16, 8) if tiny else (REQUESTS, PROMPT, OUTPUT)
        for peer in ("forge", "transformers", "forge_fp8"):
            left_s = ALL_S - (time.perf_counter() - begin_s)
            command = [sys.executable, "-m", "benchmarks.gpu.engine", peer, name, *map(str, sizes)]
            if peer == "transformers" and (missing := _missing("torch", "transformers")):
                figures[peer] = {"skipped": f"{missing} is not installed"}
                continue
            figures[peer] = _run([*command, str(spec.vocab_size)], min(PEER_S, left_s))
        ours, theirs = (figures[p].get("tokens_per_s") for p in ("forge", "transformers"))
        figures["ratio"] = ours / theirs if ours and theirs else None
        return {"requests": sizes[0], "prompt": sizes[1], "output": sizes[2], **figures}


def _missing(*packages: str) -> str | None:
    return next((name for name in packages if importlib.util.find_spec(name) is None), None)


def _run(command: list[str], limit_s: float) -> dict[str, Any]:
    if limit_s < 1:
        return {"skipped": "no time left"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {limit_s:.0f} s"}
    if done.returncode:
        return {"failed": "\n".join(done.stderr.strip().splitlines()[-4:])}
    return json.loads(done.stdout.strip().splitlines()[-1])


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return token ids with nothing in common and without special tokens."""
    return [
        [(7919 * i + 31 * j) % (vocab_size - 10) + 5 for j in range(length)] for i in range(count)
    ]


def forge(
    folder: str, count: int, length: int, output: int, vocab_size: int, kv_dtype: str = "auto"
) -> dict[str, Any]:
    from forge_jax import LLM, SamplingParams

    begin_s = time.perf_counter()
    llm = LLM(
        folder, kv_dtype=kv_dtype, max_model_len=length + output + 64, max_num_seqs=max(count, 4)
    )
    ready_s = time.perf_counter() - begin_s
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    llm.generate(prompts(4, length, vocab_size)[1:], params, progress=False)
    batch = prompts(count + 4, length, vocab_size)[4:]
    begin_s = time.perf_counter()
    outputs = llm.generate(batch, params, progress=False)
    seconds = time.perf_counter() - begin_s
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    return {"tokens_per_s": tokens / seconds, "ready_s": ready_s, "tokens": tokens}


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
        "forge_fp8": functools.partial(forge, kv_dtype="fp8"),
        "transformers": transformers,
    }[which]
    print(json.dumps(run(where, *map(int, numbers))))
