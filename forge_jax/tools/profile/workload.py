"""The workloads of `forge-jax profile`: a trace of decodes only, and one of prompts only."""

from __future__ import annotations

import dataclasses
import random
import shlex
from pathlib import Path

import jax

from forge_jax.config import EngineConfig, flags_of
from forge_jax.engine.builder import assemble
from forge_jax.engine.parts import EngineParts, Steps
from forge_jax.errors import ConfigError
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.request import Request
from forge_jax.telemetry.trace_recorder import Recorder
from forge_jax.tools.profile.config import Workload


def record(config: EngineConfig, workload: Workload, folder: Path) -> list[Path]:
    """Load the model, trace both workloads, and return the folders "decode" and "prefill".

    Raises:
      ModelError: the model cannot be served.
      ConfigError: the configuration does not fit the model, the machine or the workload.
    """
    # Without metadata in the key, a cached executable may have an older version's scope names.
    metadata_in_key = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        parts = assemble(config)
        parts.finish_compiling()
        sections = [getattr(config, section.name) for section in dataclasses.fields(config)]
        ran = shlex.join([config.model.model, *flags_of(*sections, workload)])
        return record_engine(parts, workload, folder, ran)
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", metadata_in_key)


def record_engine(parts: EngineParts, workload: Workload, folder: Path, ran: str) -> list[Path]:
    """Trace an idle engine, and return the folders; `ran` is its description in the traces."""
    steps = parts.steps
    assert steps is not None, "a fake device has nothing to trace"
    runs = {"decode": _add_decodes, "prefill": _add_prompts}
    written = []
    for name, add in runs.items():
        _tick(parts, steps, add(parts, workload) + workload.warmup_steps)
        recorder = Recorder(steps.compiled, ran)
        recorder.start(folder / name)
        try:
            _tick(parts, steps, workload.steps)
        finally:
            written.append(recorder.stop())
        with parts.guard():
            parts.core.drain()
    if parts.core.grammars is not None:
        parts.core.grammars.close()
    return written


def _tick(parts: EngineParts, steps: Steps, number: int) -> None:
    """Run this many steps, and wait until the device has finished them."""
    core = parts.core
    with parts.guard():
        for _ in range(number):
            assert core.has_work, "the workload is too short"
            core.tick()
    steps.settle()


def _add_decodes(parts: EngineParts, workload: Workload) -> int:
    """Add sequences that decode for longer than the trace; return the steps of their prompts."""
    limits = parts.core.scheduler.config
    if workload.sequences > limits.max_num_seqs:
        raise ConfigError(
            f"--sequences {workload.sequences} exceeds --max-num-seqs, which is "
            f"{limits.max_num_seqs}"
        )
    prompts_take = -(-workload.sequences * workload.prompt_tokens // limits.max_num_batched_tokens)
    first = prompts_take + 1
    output = first + workload.warmup_steps + workload.steps + 2
    _check_room(parts, workload.sequences * (workload.prompt_tokens + output))
    for i in range(workload.sequences):
        _add(parts, f"decode-{i}", workload.prompt_tokens, output)
    return first


def _add_prompts(parts: EngineParts, workload: Workload) -> int:
    """Add prompts that fill every step, with one output token each; return 0."""
    limits = parts.core.scheduler.config
    _check_room(parts, workload.prompt_tokens)
    steps = workload.warmup_steps + workload.steps + 2
    # Short prompts reach the limit of sequences before the limit of tokens.
    per_step = min(limits.max_num_batched_tokens, limits.max_num_seqs * workload.prompt_tokens)
    for i in range(-(-steps * per_step // workload.prompt_tokens)):
        _add(parts, f"prefill-{i}", workload.prompt_tokens, 1)
    return 0


def _check_room(parts: EngineParts, tokens: int) -> None:
    room = parts.core.limits.kv_tokens
    if tokens > room:
        raise ConfigError(
            f"the workload needs a KV cache of {tokens} tokens, but it has {room}: lower --steps, "
            "--sequences or --prompt-tokens"
        )


def _add(parts: EngineParts, name: str, num_tokens: int, max_tokens: int) -> None:
    """Add a prompt of random tokens, which is not in the prefix cache."""
    draw = random.Random(name)
    tokens = [draw.randrange(parts.core.vocab_size) for _ in range(num_tokens)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = Request(request_id=name, prompt_token_ids=tokens, params=params, seed=0)
    parts.core.check(request)
    parts.core.add(request)
