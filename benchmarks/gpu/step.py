"""A whole decode step of an 8B model, compared with the bytes it must read and with its launch."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu import predicted
from benchmarks.gpu.device import copy_bytes_per_s
from benchmarks.gpu.model import config, random_leaves
from benchmarks.gpu.parts import Case
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models.decoder import Leaves, Model
from forge_jax.models.kv import element_dtype
from forge_jax.models.registry import build_model
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.plan import FED_BACK, Admission, Decodes, StepPlan
from forge_jax.step.inputs import StepShape
from forge_jax.step.kv_cache import kv_shape
from forge_jax.step.options import RunnerOptions
from forge_jax.step.runner import Runner

# (batch, type of the cache, command buffers), the most important first
KINDS = (
    (64, "auto", True), (64, "auto", False), (64, "fp8", True), (1, "auto", True),
    (256, "auto", True), (256, "fp8", True), (16, "auto", True), (128, "auto", True),
)  # fmt: skip
CONTEXT = 1024
STEPS = 40


def step(tiny: bool) -> Iterator[Case]:
    """Yield the time of a step, its floor, dispatch and compilation for each of KINDS."""
    folder = tempfile.mkdtemp(prefix="forge-gpu-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    for batch, kv_dtype, command_buffers in KINDS[:2] if tiny else KINDS:
        batch = 4 if tiny else batch
        name = f"decode[{batch}], {kv_dtype} cache" + ("" if command_buffers else ", no graphs")
        yield Case(name, partial(_decode, batch, kv_dtype, command_buffers, tiny), 120.0)


@cache
def _model(tiny: bool) -> tuple[Model, Leaves]:
    """Return a model of Llama 3.1 8B's shape with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config(tiny)))
        model = build_model(read_spec(Path(folder)))
    return model, random_leaves(model.leaves)


@cache
def _ceiling(tiny: bool) -> float:
    return copy_bytes_per_s(tiny)


def _runner(
    model: Model, batch: int, kv_dtype: str, context: int, *, command_buffers: bool
) -> Runner:
    platform = jax.devices()[0].platform
    block_size = 16 if platform == "cpu" else 64
    per_sequence = -(-(context + STEPS * 4) // block_size)
    kv = kv_shape(
        model.spec,
        num_blocks=batch * per_sequence,
        block_size=block_size,
        dtype=element_dtype(kv_dtype, model.dtype),
        platform=platform,
    )
    return Runner(
        model,
        RunnerOptions(
            shapes=[StepShape.decode(batch)],
            kv_shape=kv,
            num_slots=batch,
            max_blocks=per_sequence,
            device=jax.devices()[0],
            command_buffers=command_buffers,
        ),
    )


def _decode(batch: int, kv_dtype: str, command_buffers: bool, tiny: bool) -> dict[str, Any]:
    (model, leaves), context = _model(tiny), 128 if tiny else CONTEXT
    compile_s = []
    for _ in range(2):  # cold, and from the cache
        runner = _runner(model, batch, kv_dtype, context, command_buffers=command_buffers)
        begin_s = time.perf_counter()
        runner.compile()
        runner.memory_bytes()
        compile_s.append(time.perf_counter() - begin_s)
    runner.start(leaves)
    per_sequence = runner.options.max_blocks
    admissions = tuple(
        Admission(
            slot=slot,
            seed=slot,
            params=SamplingParams(temperature=0.0),
            stop_ids=(),
            prompt_len=context,
            block_table=tuple(range(slot * per_sequence, (slot + 1) * per_sequence)),
            tokens=(),
            seq_key=(str(slot), 0),
        )
        for slot in range(batch)
    )

    def plan(number: int) -> StepPlan:
        decodes = Decodes(
            slots=range(batch),
            starts=[context + number] * batch,
            tokens=[FED_BACK if number else 5] * batch,
            num_outputs=[number + 1] * batch,
        )
        return StepPlan(number, admissions if not number else (), (), decodes)

    runner.read(runner.dispatch(plan(0)))
    dispatch_s, wall_s, number = [], [], 1
    for _ in range(3):
        begin_s = time.perf_counter()
        pending: Any = None
        for _ in range(STEPS):
            dispatched_s = time.perf_counter()
            pending = runner.dispatch(plan(number))
            dispatch_s.append(time.perf_counter() - dispatched_s)
            number += 1
        runner.read(pending)
        wall_s.append((time.perf_counter() - begin_s) / STEPS)
    spec = model.spec
    table = spec.vocab_size * spec.hidden_size * 2  # only a few rows of the embedding are read
    kv = runner.options.kv_shape
    kv_bytes = kv.block_bytes * context * batch // kv.block_size
    floor = model.param_bytes - table + kv_bytes
    floor_s = floor / _ceiling(tiny)
    step_s = statistics.median(wall_s)
    text = runner.compiled()[f"decode[{batch}]"].as_text() or ""
    memory = runner.compiled()[f"decode[{batch}]"].memory_analysis()
    # The predicted steps are CUDA graphs of the 8B model.
    expected = predicted.step(batch, kv_dtype, context) if command_buffers and not tiny else {}
    return {
        "ms": 1e3 * step_s,
        **expected,
        "floor_ms": 1e3 * floor_s,
        "of_floor": step_s / floor_s,
        "tokens_per_s": batch / step_s,
        "dispatch_us": 1e6 * statistics.median(dispatch_s),
        "compile_cold_s": compile_s[0],
        "compile_warm_s": compile_s[1],
        "command_buffers": len(re.findall(r"^%?command_buffer[\w.]* ", text, re.MULTILINE)),
        "temp_bytes": None if memory is None else memory.temp_size_in_bytes,
    }
