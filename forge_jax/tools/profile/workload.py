"""The workloads of `forge-jax profile`: a trace of decodes only, and one of prompts only."""

from __future__ import annotations

import dataclasses
import random
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from forge_jax.config import EngineConfig, flags_of
from forge_jax.engine.builder import assemble
from forge_jax.engine.parts import EngineParts, Steps
from forge_jax.errors import ConfigError
from forge_jax.host.progress import progress_bar
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.request import Request
from forge_jax.step.inputs import StepShape
from forge_jax.telemetry.trace_recorder import Recorder
from forge_jax.tools.profile.config import Workload


def record(config: EngineConfig, workload: Workload, folder: Path) -> list[Path]:
    """Load the model, trace both workloads, and return the folders "decode" and "prefill".

    Only the executables that the workloads run are compiled. A terminal shows progress bars.

    Raises:
      ModelError: the model cannot be served.
      ConfigError: the configuration does not fit the model, the machine or the workload.
    """
    # Without metadata in the key, a cached executable may have an older version's scope names.
    metadata_in_key = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        parts = _compiled(config, workload)
        sections = [getattr(config, section.name) for section in dataclasses.fields(config)]
        ran = shlex.join([config.model.model, *flags_of(*sections, workload)])
        return record_engine(parts, workload, folder, ran)
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", metadata_in_key)


def _compiled(config: EngineConfig, workload: Workload) -> EngineParts:
    """Return an engine with all executables that the workload runs."""
    _check_sequences(workload, config.batch.max_num_seqs)
    with progress_bar(desc="compile", unit="executable", disable=None, leave=False) as bar:

        def select(shapes: Sequence[StepShape]) -> Sequence[StepShape]:
            chosen = shapes_of(workload, shapes, config.batch.max_num_seqs)
            bar.reset(total=len(chosen))
            return chosen

        parts = assemble(config, select=select)
        late = parts.late

        def advance() -> None:
            bar.update(1)

        advance()
        if late is not None:
            late.on_compiled(advance)
            late.finish()
    return parts


def shapes_of(
    workload: Workload, shapes: Sequence[StepShape], max_num_seqs: int
) -> Sequence[StepShape]:
    """Return the shapes that the workloads run.

    Args:
      shapes: all shapes of the engine, smallest first.
    """
    if any(shape.max_drafts for shape in shapes):
        return shapes  # the shape of a step then depends on the drafts
    decode = [s for s in shapes if not s.prompts and s.num_seqs >= workload.sequences]
    mixed = [s for s in shapes if s.prompts]
    # Short prompts reach the limit of sequences before the limit of tokens.
    prompt_tokens = min(mixed[-1].num_tokens, max_num_seqs * workload.prompt_tokens)
    return decode[:1] + [s for s in mixed if s.num_tokens >= prompt_tokens][:1]


def record_engine(parts: EngineParts, workload: Workload, folder: Path, ran: str) -> list[Path]:
    """Trace an idle engine, and return the folders; `ran` is its description in the traces."""
    steps = parts.steps
    assert steps is not None, "a fake device has nothing to trace"
    runs = {"decode": _add_decodes, "prefill": _add_prompts}
    written = []
    for name, add in runs.items():
        before = add(parts, workload) + workload.warmup_steps
        total = before + workload.steps
        with progress_bar(desc=name, unit="step", total=total, disable=None, leave=False) as bar:
            _tick(parts, steps, before, bar)
            recorder = Recorder(steps.compiled, ran, command_buffers=steps.command_buffers)
            recorder.start(folder / name)
            try:
                _tick(parts, steps, workload.steps, bar)
            finally:
                written.append(recorder.stop())
            with parts.guard():
                parts.core.drain()
    if parts.core.grammars is not None:
        parts.core.grammars.close()
    return written


def _tick(parts: EngineParts, steps: Steps, number: int, bar: tqdm[Any]) -> None:
    """Run this many steps, and wait until the device has finished them."""
    core = parts.core
    with parts.guard():
        for _ in range(number):
            assert core.has_work, "the workload is too short"
            core.tick()
            bar.update()
    steps.settle()


def _add_decodes(parts: EngineParts, workload: Workload) -> int:
    """Add sequences that decode for longer than the trace; return the steps of their prompts."""
    limits = parts.core.scheduler.config
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


def _check_sequences(workload: Workload, max_num_seqs: int) -> None:
    if workload.sequences > max_num_seqs:
        raise ConfigError(
            f"--sequences {workload.sequences} exceeds --max-num-seqs, which is {max_num_seqs}"
        )


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
