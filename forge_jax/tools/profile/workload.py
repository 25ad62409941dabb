"""What `forge-jax profile` has an engine do: decodes only, then prompts only, a trace of each."""

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
    """Loads the model and traces both workloads, in folders "decode" and "prefill".

    Raises:
      ModelError: the model cannot be served.
      ConfigError: the configuration does not fit the model, the machine or the workload.
    """
    # An executable from the cache may have the names of an older version's scopes.
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
    """Traces an engine that is complete, and has nothing to do; `ran` is what traces tell of it."""
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
    """So many steps, and until the device has done them."""
    core = parts.core
    with parts.guard():
        for _ in range(number):
            assert core.has_work, "the workload is too short"
            core.tick()
    steps.settle()


def _add_decodes(parts: EngineParts, workload: Workload) -> int:
    """As many sequences as are to decode, each for longer than the trace; the steps until then."""
    limits = parts.core.scheduler.config
    if workload.sequences > limits.max_num_seqs:
        raise ConfigError(
            f"--sequences {workload.sequences}: the engine runs {limits.max_num_seqs} at most "
            "(--max-num-seqs)"
        )
    prompts_take = -(-workload.sequences * workload.prompt_tokens // limits.max_num_batched_tokens)
    first = prompts_take + 1
    output = first + workload.warmup_steps + workload.steps + 2
    _check_room(parts, workload.sequences * (workload.prompt_tokens + output))
    for i in range(workload.sequences):
        _add(parts, f"decode-{i}", workload.prompt_tokens, output)
    return first


def _add_prompts(parts: EngineParts, workload: Workload) -> int:
    """Prompts that fill every step, with one token of output each; from the first step on."""
    limits = parts.core.scheduler.config
    _check_room(parts, workload.prompt_tokens)
    steps = workload.warmup_steps + workload.steps + 2
    # Steps of short prompts end with the number of sequences, before the tokens are used up.
    per_step = min(limits.max_num_batched_tokens, limits.max_num_seqs * workload.prompt_tokens)
    for i in range(-(-steps * per_step // workload.prompt_tokens)):
        _add(parts, f"prefill-{i}", workload.prompt_tokens, 1)
    return 0


def _check_room(parts: EngineParts, tokens: int) -> None:
    room = parts.core.limits.kv_tokens
    if tokens > room:
        raise ConfigError(
            f"the workload needs a KV cache of {tokens} tokens, and it has {room}: lower --steps, "
            "--sequences or --prompt-tokens"
        )


def _add(parts: EngineParts, name: str, num_tokens: int, max_tokens: int) -> None:
    """A prompt of random tokens, which the prefix cache does not know."""
    draw = random.Random(name)
    tokens = [draw.randrange(parts.core.vocab_size) for _ in range(num_tokens)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = Request(request_id=name, prompt_token_ids=tokens, params=params, seed=0)
    parts.core.check(request)
    parts.core.add(request)
