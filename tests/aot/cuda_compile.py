"""Compiles the GPU kernels and whole steps for five GPUs: part of `make test-cuda-compile`.

Most programs are for an H200. The others get attention, and steps with and without quantization.

    python tests/aot/cuda_compile.py [--only TEXT] [--target TARGET] [--part N] [--layers N]
                                     [--quick] [--output FILE]

Prints a table. The exit code is 1 if a program fails a check: spilled registers, shared memory,
copies of caches or matrices, command buffers, unrequested values. Each GPU has its own process,
because Mosaic compiles for only one GPU per process. An H200 has two, because it has most programs.

`--quick` compiles the programs in QUICK.
"""

from benchmarks.aot import deviceless  # first, because jax reads its settings at import  # isort: skip

import argparse
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from each_target import run_each_target
from experts import KERNELS, bytes_read, compile_experts, expert_calls, expert_faults

from benchmarks.aot.hlo import large_results
from benchmarks.aot.steps import (
    BLOCKS,
    MAX_BLOCKS,
    Q4_K_M,
    QUANTIZED,
    SEQS,
    Cache,
    StepOptions,
    compile_link,
    compile_shared_step,
    compile_stage,
    compile_step,
    llama,
)
from forge_jax.config.hf_config import HFConfig
from forge_jax.models.plugins import find_architecture
from forge_jax.models.spec import ModelSpec
from forge_jax.models.stages import Stage
from forge_jax.step.inputs import StepShape
from forge_jax.step.links import STAGE
from forge_jax.step.options import compiler_options
from forge_jax.step.targets import TARGETS
from forge_jax.weights.partition import AXIS, shard_spec, with_whole_experts
from forge_kernels.attention.mosaic_gpu import PRODUCT_DTYPES, mosaic_attention, unsupported
from forge_kernels.attention.quantized import QuantizedKV
from forge_kernels.attention.shapes import GEMMA_2_9B, LLAMA_3_1_8B, SHAPES, AttentionShape
from forge_kernels.devices import Gpu
from forge_kernels.experts.xla import FUSED_BYTES, all_experts

# One of each head size, and one with sinks.
OF_8_BITS = ("llama-3.2-1b", "phi-2", "phi-3-mini", "llama-3.1-8b", "gemma-2-9b", "gpt-oss-20b")
MATRIX_BYTES = 4096 * 4096 * 2  # the smallest of a layer of Llama 3.1 8B
# A step costs 30 to 40 CPU seconds with 1 or 32 layers. The steps here cover decode and mixed, both
# caches, float and quantized matrices, and each kind of parallelism. Kernels that they contain are
# not compiled alone too.
QUICK = {
    "h200": (
        "llama-3.1-8b, mixed",
        "gemma-2-9b, mixed",
        "gpt-oss-20b, mixed, int8",
        "gemma-2-9b, mixed, float8_e4m3fn",
        "the check",
        "step mixed[512] of llama-3.1-8b, 2 layers, fp8 cache",
        "quantized (Q4_K_M): step decode[64] of llama-3.1-8b, 1 layer",
        "deterministic step mixed[512] of llama-3.1-8b, 1 layer, on 8 devices",
        "step decode[64] of llama-3.1-8b, stage 0 of 2, on 2 devices",
        "expert parallel: step decode[64] of qwen-3-30b-a3b, 1 layer, on 2 devices",
    ),
    "a100": ("a100: deterministic step mixed[512] of llama-3.1-8b, 1 layer",),
    "l4": ("l4: llama-3.1-8b, decode",),  # a prediction compiles a step for it
    "b200": ("b200: step decode[64] of llama-3.1-8b, 1 layer",),
    "rtx5090": ("rtx5090: step decode[64] of llama-3.1-8b (gptq), 1 layer",),
}
QUICK_LAYERS = 2
PARTS = {"h200": 2}  # processes of a target; others have one
QUANTIZED_TEMP_BYTES = (
    300e6  # 165e6 for a step without quantization; the largest matrix is 117e6 in bfloat16
)
EXPERTS_TEMP_BYTES = 250e6  # gates and ups of all experts are 302e6 in 4 bits
SHARDS, SHARED_LAYERS = (2, 8), 2
PUBLISHED_CONFIGS = Path(__file__).parents[1] / "fixtures/published_configs"
# The collective before a sum, for a matrix in this format that is cut by its inputs.
BEFORE_SUMS = {"fp8": "all-reduce", "gptq": "all-gather"}


@dataclass
class Result:
    name: str
    program: deviceless.Program
    seconds: float
    faults: list[str] = field(default_factory=list)

    @property
    def row(self) -> list[str]:
        program = self.program
        registers = {
            kernel.name.removesuffix("_mosaic_gpu_kernel"): kernel.registers
            for kernel in program.kernels
            if kernel.name.startswith("forge_")
        }
        return [
            self.name,
            " / ".join(str(registers[name]) for name in sorted(registers)),
            str(sum(kernel.spilled for kernel in program.kernels)),
            str(max(program.shared_bytes, default=0)),
            " + ".join((str(program.command_buffers), *program.outside)),
            f"{program.temp_bytes / 1e6:.1f}",
            f"{self.seconds:.1f}",
        ]


HEADER = ["program", "registers", "spilled", "shared", "command buffers", "temp MB", "s"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention."""

    shape: AttentionShape
    tokens: int
    max_q_len: int
    block_size: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str | None = None  # None: the dtype of the queries
    seqs: int = SEQS
    uniform: bool = False


def cases() -> Iterator[tuple[str, Case]]:
    for name, shape in SHAPES.items():
        yield f"{name}, decode", Case(shape=shape, tokens=SEQS, max_q_len=1)
        yield f"{name}, mixed", Case(shape=shape, tokens=512, max_q_len=512)
    llama = partial(Case, shape=LLAMA_3_1_8B)
    for kv_dtype in (None, *map(str, PRODUCT_DTYPES)):
        name = "gemma-2-9b, without a window" + (f", {kv_dtype}" if kv_dtype else "")
        shape = replace(GEMMA_2_9B, window=None)
        yield name, Case(shape=shape, tokens=512, max_q_len=512, kv_dtype=kv_dtype)
    yield "llama-3.1-8b, verify", llama(tokens=5 * SEQS, max_q_len=5)
    yield "llama-3.1-8b, uniform", llama(tokens=256, max_q_len=256, seqs=256, uniform=True)
    yield "llama-3.1-8b, float16", llama(tokens=SEQS, max_q_len=1, dtype="float16")
    for block_size in (16, 32, 128):
        yield (
            f"llama-3.1-8b, blocks of {block_size}",
            llama(tokens=SEQS, max_q_len=1, block_size=block_size),
        )
    for kv_dtype in map(str, PRODUCT_DTYPES):
        of_8_bits = partial(Case, kv_dtype=kv_dtype)
        for name in OF_8_BITS:
            shape = SHAPES[name]
            decode = of_8_bits(shape=shape, tokens=SEQS, max_q_len=1)
            yield f"{name}, decode, {kv_dtype}", decode
            yield f"{name}, mixed, {kv_dtype}", replace(decode, tokens=512, max_q_len=512)
        llama = partial(of_8_bits, shape=LLAMA_3_1_8B)
        verify = llama(tokens=5 * SEQS, max_q_len=5)
        yield f"llama-3.1-8b, verify, {kv_dtype}", verify
        uniform = llama(tokens=256, max_q_len=256, seqs=256, uniform=True)
        yield f"llama-3.1-8b, uniform, {kv_dtype}", uniform
        for block_size in (8, 16):
            yield (
                f"llama-3.1-8b, blocks of {block_size}, {kv_dtype}",
                llama(tokens=SEQS, max_q_len=1, block_size=block_size),
            )


def compile_case(compiler: deviceless.Compiler, case: Case) -> deviceless.Program:
    shape, dtype = case.shape, jnp.dtype(case.dtype)
    K, D = shape.kv_heads, shape.head_dim
    attention = partial(
        mosaic_attention,
        sm_scale=D**-0.5,
        max_q_len=case.max_q_len,
        uniform=case.uniform,
        window=shape.window,
        soft_cap=shape.soft_cap,
        device=compiler.target.gpu,
    )
    i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    places = (BLOCKS, 2, K, case.block_size)
    kv: Any = jax.ShapeDtypeStruct((*places, D), dtype)
    if case.kv_dtype is not None:
        data: Any = jax.ShapeDtypeStruct((*places, D), jnp.dtype(case.kv_dtype))
        scale: Any = jax.ShapeDtypeStruct(places, jnp.float32)
        kv = QuantizedKV(data, scale)
    sinks = jax.ShapeDtypeStruct((shape.heads,), jnp.float32) if shape.sinks else None
    return compiler(
        lambda sinks, *arrays: attention(*arrays, sinks=sinks),
        sinks,
        jax.ShapeDtypeStruct((case.tokens, shape.heads, D), dtype),
        kv,
        i32((case.seqs, MAX_BLOCKS)),
        i32((case.seqs,)),
        i32((case.seqs + 1,)),
        i32(()),
    )


def supported(case: Case, device: Gpu) -> bool:
    shape, dtype = case.shape, jnp.dtype(case.dtype)
    kv_dtype = jnp.dtype(case.kv_dtype or case.dtype)
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    return unsupported(*heads, case.block_size, dtype, kv_dtype, device) is None


def qwen_3_30b_a3b(layers: int, quantized: str | None) -> ModelSpec:
    """Return Qwen3 30B A3B with this many layers, quantized as in one of QUANTIZED."""
    config = {
        **{"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "vocab_size": 151936},
        **{"num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768},
        **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        **{"bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16"},
        **{"tie_word_embeddings": False, "quantization_config": QUANTIZED.get(quantized or "")},
    }
    return find_architecture("Qwen3MoeForCausalLM").read(HFConfig(config), HFConfig({}))


def qwen_3_5_27b(layers: int) -> ModelSpec:
    """Return Qwen3.5 27B, three of whose four layers have linear attention."""
    config = json.loads((PUBLISHED_CONFIGS / "qwen3_5_27b.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
    architecture = find_architecture(config["architectures"][0])
    return architecture.read(HFConfig(config), HFConfig({}))


def shared_step_faults(
    program: deviceless.Program,
    spec: ModelSpec,
    shards: int,
    quantized: str | None = None,
    stage: Stage | None = None,
    *,
    in_order: bool = False,
) -> Iterator[str]:
    """Return one device's faults. With `in_order`, sums must not be XLA's."""
    layers = spec.num_hidden_layers if stage is None else len(stage.layers)
    yield from kernel_faults(program)
    yield from command_buffer_faults(program)
    kv_bytes = Cache().shape(shard_spec(spec, shards)).total_bytes
    kv_bytes = kv_bytes * layers // spec.num_hidden_layers
    if program.alias_bytes < kv_bytes:
        yield f"only {program.alias_bytes} bytes are written in place; the cache has {kv_bytes}"
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    found = Counter(re.findall(rf" ({kinds})(?:-start)?\(", program.hlo))
    embeds, samples = (True, True) if stage is None else (stage.is_first, stage.is_last)
    expected = Counter({"all-gather": int(samples)})
    for kind in ("all-to-all", "all-gather") if in_order else ("all-reduce",):
        expected[kind] += 2 * layers + embeds
    if quantized in BEFORE_SUMS:
        expected[BEFORE_SUMS[quantized]] += 2 * layers
    if found != +expected:
        yield f"in {layers} layers the devices say to each other: {dict(found)}"
    of_experts = len(expert_calls(program))
    attention = attention_calls(program)
    if attention != 2 * layers:
        yield f"{attention} calls of the kernels in {layers} layers"
    if spec.experts is not None:
        yield from shared_expert_faults(program, spec, of_experts, shards)


def shared_expert_faults(
    program: deviceless.Program, spec: ModelSpec, calls: int, shards: int
) -> Iterator[str]:
    """Return the faults of the kernels that multiply one device's experts."""
    experts = shard_spec(spec, shards).experts
    assert experts is not None
    if calls != KERNELS * spec.num_hidden_layers:
        yield f"{calls} calls of the experts' kernels in {spec.num_hidden_layers} layers"
    inner, width = experts.intermediate_size, spec.hidden_size
    matrices = ((experts.own, 2 * inner, width), (experts.own, width, inner))
    sizes = {2 * math.prod(shape) for shape in matrices}
    if not all(f"bf16[{','.join(map(str, shape))}]" in program.hlo for shape in matrices):
        yield f"the device does not have {experts.own} experts"
    made = large_results(program.hlo, sys.maxsize, matrices)
    yield from (f"copies the experts' matrices: {line}" for line in made)
    if read := bytes_read(program.hlo, sizes):
        yield f"{read} bytes of experts' matrices are read outside the kernel"


def attention_calls(program: deviceless.Program) -> int:
    return len(re.findall(r'custom_call_target="mosaic_gpu.*/forge_attention', program.hlo))


def command_buffer_faults(program: deviceless.Program) -> Iterator[str]:
    if (program.command_buffers, program.outside) != (1, ()):
        outside = " and ".join(program.outside) or "nothing"
        yield f"{program.command_buffers} command buffers, and {outside} outside of them"


def spill_bytes(case: Case, target: str) -> int:
    """Return the most that a thread may spill: addresses, not products."""
    wide = case.shape.head_dim == 256
    if target == "rtx5090":
        return 320 if wide and case.kv_dtype is not None else 24
    return 24 if wide and target != "h200" else 0


def kernel_faults(program: deviceless.Program, spill_bytes: int = 0) -> Iterator[str]:
    """Return the faults of kernels, which may spill `spill_bytes` of a thread's registers."""
    for kernel in program.kernels:
        if kernel.spilled > spill_bytes:
            yield f"{kernel.name} spills {kernel.spilled} bytes of registers"
    for shared in program.shared_bytes:
        if shared > program.target.shared_limit:
            yield f"{shared} bytes of shared memory"


def step_faults(
    program: deviceless.Program,
    layers: int,
    kv_dtype: str = "auto",
    *,
    quantized: bool = False,
    spec: ModelSpec | None = None,
) -> Iterator[str]:
    """Return the faults of a step; a quantized one with `spec` has experts."""
    yield from kernel_faults(program)
    kv = Cache(dtype=kv_dtype).shape(spec or llama(layers))
    kv_bytes, arrays = kv.total_bytes, jax.tree.leaves(kv.layers[0])
    if program.alias_bytes < kv_bytes:
        yield f"only {program.alias_bytes} bytes are written in place; the cache has {kv_bytes}"
    limit = MATRIX_BYTES if spec is None else 4 * SEQS * spec.vocab_size + 1  # more than the logits
    if quantized and spec is not None:
        limit = FUSED_BYTES  # more than the results of all experts
    made = list(large_results(program.hlo, limit, [array.shape for array in arrays]))
    if quantized:
        if spec is None:
            made = [line for line in made if "convert_fusion" not in line]
        if program.temp_bytes > (QUANTIZED_TEMP_BYTES if spec is None else EXPERTS_TEMP_BYTES):
            yield f"{program.temp_bytes} temporary bytes"
    writes = [line for line in made if "scatter" in line]
    yield from (
        f"makes an array as large as a matrix: {line}" for line in made if line not in writes
    )
    if len(writes) != layers * len(arrays):
        yield f"{len(writes)} writes into the {len(arrays)} arrays of {layers} layers"
    yield from command_buffer_faults(program)
    if program.compiled_conditions != program.written_conditions:
        yield (
            f"{program.compiled_conditions} of {program.written_conditions} conditions are left: "
            "of the others both sides are computed in each step"
        )
    attention = attention_calls(program)
    if attention != 2 * layers:
        yield f"{attention} calls of the kernels in {layers} layers"


def nondeterministic_faults(program: deviceless.Program) -> Iterator[str]:
    """Return operations without a fixed order of summation, and slow ways to fix it.

    The configurations of Triton's matrix products are selected by measuring. Scatters of floats to
    places that may be equal add by atomics, or, in the deterministic tier, after a sort of all
    their elements. A minimum does not depend on the order.
    """
    if "gemm_fusion" in program.hlo or "__triton_gemm" in program.hlo:
        yield "a Triton matrix product"
    for line in re.findall(r"%\S+ = (?:bf16|f16|f32)\[\S* scatter\(.*", program.hlo):
        if "unique_indices=true" not in line and not line.startswith("%scatter-min"):
            yield f"adds in any order: {line[:120]}"
    for line in re.findall(r"%\S+ = .* sort\(.*to_apply=%sorting_computation.*", program.hlo):
        yield f"sorts the elements of a scatter: {line[:120]}"
    if "__cublas" not in program.hlo:
        yield "no cuBLAS matrix products"


@dataclass
class Selection:
    """The programs of one process.

    Attributes:
      only: text that the names contain.
      part: this process' number, of PARTS. Programs are dealt to the parts in turn.
      named: the names of all programs of the target.
      selected: number of selected programs in all parts.
    """

    target: str
    only: str
    quick: bool
    part: int = 0
    named: set[str] = field(default_factory=set)
    selected: int = 0

    def __call__(self, name: str) -> bool:
        """Return True if this process compiles the program. Call this once per program."""
        self.named.add(name)
        if self.only not in name or (self.quick and name not in QUICK[self.target]):
            return False
        self.selected += 1
        return (self.selected - 1) % PARTS.get(self.target, 1) == self.part


def run(wanted: Selection, layers: int) -> Iterator[Result]:
    compiler = deviceless.Compiler()
    for name, case in cases():
        if wanted(name):
            start = time.perf_counter()
            program = compile_case(compiler, case)
            result = Result(name, program, time.perf_counter() - start)
            result.faults += kernel_faults(program)
            yield result
    if wanted("the check"):
        check_the_check(compiler)
    options = StepOptions(
        compiler=compiler_options("gpu", command_buffers=True, deterministic=False)
    )
    decode, mixed = StepShape.decode(SEQS), StepShape.mixed(512, SEQS, SEQS, 64)
    for shape, kv_dtype, note in (
        (decode, "auto", ""),
        (mixed, "auto", ""),
        (decode, "fp8", ", fp8 cache"),
        (mixed, "fp8", ", fp8 cache"),
    ):
        name = f"step {shape.name} of llama-3.1-8b, {layers} layers{note}"
        if wanted(name):
            start = time.perf_counter()
            of_cache = replace(options, cache=Cache(dtype=kv_dtype))
            program = compile_step(compiler, shape, llama(layers), of_cache)
            result = Result(name, program, time.perf_counter() - start)
            result.faults += step_faults(program, layers, kv_dtype)
            yield result
    name = f"deterministic step {mixed.name} of llama-3.1-8b, 1 layer"
    if wanted(name):
        start = time.perf_counter()
        exact = StepOptions(
            compiler=compiler_options("gpu", command_buffers=True, deterministic=True), uniform=True
        )
        program = compile_step(compiler, mixed, llama(1), exact)
        result = Result(name, program, time.perf_counter() - start)
        result.faults += step_faults(program, 1)
        result.faults += nondeterministic_faults(program)
        yield result
    for quantized in (*QUANTIZED, Q4_K_M):
        name = f"quantized ({quantized}): step {decode.name} of llama-3.1-8b, 1 layer"
        if wanted(name):
            start = time.perf_counter()
            program = compile_step(compiler, decode, llama(1, quantized), options)
            result = Result(name, program, time.perf_counter() - start)
            result.faults += step_faults(program, 1, quantized=True)
            yield result
    name = f"experts: step {decode.name} of qwen-3-30b-a3b, 1 layer"
    if wanted(name):
        start = time.perf_counter()
        spec = qwen_3_30b_a3b(1, None)
        program = compile_step(compiler, decode, spec, options)
        result = Result(name, program, time.perf_counter() - start)
        result.faults += step_faults(program, 1, spec=spec)
        result.faults += expert_faults(program, SEQS)
        yield result
    for quantized in QUANTIZED:
        name = f"experts ({quantized}): step {decode.name} of qwen-3-30b-a3b, 1 layer"
        if wanted(name):
            start = time.perf_counter()
            spec = qwen_3_30b_a3b(1, quantized)
            program = compile_step(compiler, decode, spec, options)
            result = Result(name, program, time.perf_counter() - start)
            result.faults += step_faults(program, 1, quantized=True, spec=spec)
            yield result
    shared_options = StepOptions(
        compiler=compiler_options("gpu", command_buffers=True, deterministic=False, shards=2)
    )
    for shards in SHARDS:
        name = f"step {decode.name} of llama-3.1-8b, {SHARED_LAYERS} layers, on {shards} devices"
        if wanted(name):
            start = time.perf_counter()
            several = deviceless.Compiler(shards, AXIS)
            program = compile_shared_step(several, decode, llama(SHARED_LAYERS), shared_options)
            result = Result(name, program, time.perf_counter() - start)
            result.faults += shared_step_faults(program, llama(SHARED_LAYERS), shards)
            yield result
    for shape in (decode, mixed):
        name = f"step {shape.name} of llama-3.1-8b, 1 layer, 2 hosts with 8 devices"
        if wanted(name):
            start = time.perf_counter()
            several = deviceless.Compiler(16, AXIS, hosts=2)
            program = compile_shared_step(several, shape, llama(1), shared_options)
            result = Result(name, program, time.perf_counter() - start)
            result.faults += shared_step_faults(program, llama(1), 16)
            yield result
    name = f"deterministic step {mixed.name} of llama-3.1-8b, 1 layer, on 8 devices"
    if wanted(name):
        start = time.perf_counter()
        several = deviceless.Compiler(8, AXIS)
        exact = compiler_options("gpu", command_buffers=True, deterministic=True, shards=8)
        in_order = StepOptions(compiler=exact, uniform=True)
        program = compile_shared_step(several, mixed, llama(1), in_order)
        result = Result(name, program, time.perf_counter() - start)
        result.faults += shared_step_faults(program, llama(1), 8, in_order=True)
        result.faults += nondeterministic_faults(program)
        yield result
    for index, shards in product((0, 1), SHARDS):
        name = f"step {decode.name} of llama-3.1-8b, stage {index} of 2, on {shards} devices"
        if wanted(name):
            start = time.perf_counter()
            several = deviceless.Compiler(shards, AXIS)
            layers = range(index, index + 1)
            stage = Stage(index=index, count=2, layers=layers, tied=False)
            program = compile_stage(several, decode, llama(2), shared_options, stage)
            result = Result(name, program, time.perf_counter() - start)
            result.faults += shared_step_faults(program, llama(2), shards, stage=stage)
            yield result
    name = "stream of llama-3.1-8b between stages on 2 hosts"
    if wanted(name):
        start = time.perf_counter()
        program = compile_link(deviceless.Compiler(2, STAGE, hosts=2), mixed, llama(1))
        result = Result(name, program, time.perf_counter() - start)
        permutes = len(re.findall(r" collective-permute(?:-start)?\(", program.hlo))
        if permutes != 1:
            result.faults.append(f"{permutes} collective-permutes")
        yield result
    for quantized in QUANTIZED:
        name = f"quantized ({quantized}): step {decode.name}, 1 layer, on 2 devices"
        if wanted(name):
            start = time.perf_counter()
            several = deviceless.Compiler(2, AXIS)
            program = compile_shared_step(several, decode, llama(1, quantized), shared_options)
            result = Result(name, program, time.perf_counter() - start)
            result.faults += shared_step_faults(program, llama(1), 2, quantized)
            yield result
    for shape, shards in product((decode, mixed), SHARDS):
        name = f"expert parallel: step {shape.name} of qwen-3-30b-a3b, 1 layer, on {shards} devices"
        if wanted(name):
            start = time.perf_counter()
            several = deviceless.Compiler(shards, AXIS)
            spec = with_whole_experts(qwen_3_30b_a3b(1, None))
            program = compile_shared_step(several, shape, spec, shared_options)
            result = Result(name, program, time.perf_counter() - start)
            result.faults += shared_step_faults(program, spec, shards)
            yield result


def run_on(target: str, wanted: Selection) -> Iterator[Result]:
    """Compile attention and steps of one layer for a GPU other than an H200."""
    compiler, decode = deviceless.Compiler(target=target), StepShape.decode(SEQS)

    def result(name: str, make: Callable[[], deviceless.Program]) -> Iterator[Result]:
        name = f"{target}: {name}"
        if wanted(name):
            start = time.perf_counter()
            program = make()
            yield Result(name, program, time.perf_counter() - start)

    for name, case in cases():
        if supported(case, compiler.target.gpu):
            for done in result(name, partial(compile_case, compiler, case)):
                done.faults += kernel_faults(done.program, spill_bytes(case, target))
                yield done
    options = StepOptions(
        compiler=compiler_options("gpu", command_buffers=True, deterministic=False)
    )
    for quantized in (None, "gptq", Q4_K_M):
        note = "" if quantized is None else f" ({quantized})"
        make = partial(compile_step, compiler, decode, llama(1, quantized), options)
        for done in result(f"step {decode.name} of llama-3.1-8b{note}, 1 layer", make):
            done.faults += step_faults(done.program, 1, quantized=quantized is not None)
            yield done
    exact = StepOptions(
        compiler=compiler_options("gpu", command_buffers=True, deterministic=True), uniform=True
    )
    mixed = StepShape.mixed(512, SEQS, SEQS, 64)
    make = partial(compile_step, compiler, mixed, llama(1), exact)
    for done in result(f"deterministic step {mixed.name} of llama-3.1-8b, 1 layer", make):
        done.faults += step_faults(done.program, 1)
        done.faults += nondeterministic_faults(done.program)
        yield done
    make = partial(compile_step, compiler, decode, qwen_3_5_27b(4), exact)
    for done in result(f"deterministic step {decode.name} of qwen-3.5-27b, 4 layers", make):
        done.faults += kernel_faults(done.program, 24)
        done.faults += nondeterministic_faults(done.program)
        yield done


def check_the_check(compiler: deviceless.Compiler) -> None:
    """Check that copies, loops outside command buffers and unchosen experts are detected."""
    options = StepOptions(donated=())
    stage = Stage(index=0, count=2, layers=range(1), tied=False)  # without the sampler: 20 s less
    one = deviceless.Compiler(1, AXIS)
    program = compile_stage(one, StepShape.decode(SEQS), llama(2), options, stage)
    faults = list(step_faults(program, 1))
    noticed = ("written in place", "makes an array as large as a matrix")
    assert all(any(text in fault for fault in faults) for text in noticed), faults
    program = compiler(_loop_and_lost_condition, jax.ShapeDtypeStruct((64, 4096), jnp.float32))
    faults = list(step_faults(program, 0))
    noticed = ("kWhile", "0 of 1 conditions are left")
    assert all(any(text in fault for fault in faults) for text in noticed), faults
    for deterministic, noticed in (
        (False, ("Triton", "adds in any order", "no cuBLAS")),
        (True, ("sorts the elements of a scatter",)),
    ):
        exact = compiler_options("gpu", command_buffers=True, deterministic=deterministic)
        matrices = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 2
        program = compiler(_added_in_any_order, *matrices, options=exact)
        faults = list(nondeterministic_faults(program))
        assert all(any(text in fault for fault in faults) for text in noticed), faults
    for tokens, mix, noticed in (
        (64, _all_experts, "no experts' kernels"),
        (4, _all_experts, "bytes of experts' matrices are read"),
        (4, _copied_experts, "makes an array as large as a matrix"),
    ):
        faults = list(expert_faults(compile_experts(compiler, tokens, mix), tokens))
        assert any(noticed in fault for fault in faults), faults


def _all_experts(*arrays: jax.Array) -> jax.Array:
    return all_experts(*arrays, jnp.int32(len(arrays[0])))


def _copied_experts(x, gate_up, down, experts, weights):
    chosen = jax.lax.optimization_barrier((gate_up[experts], down[experts]))  # [T, k, N, K]
    both = jnp.einsum("td,tknd->tkn", x, chosen[0])
    gate, up = jnp.split(jax.nn.silu(both), 2, axis=-1)
    return jnp.einsum("tki,tkdi,tk->td", gate * up, chosen[1], weights.astype(x.dtype))


def _loop_and_lost_condition(x: jax.Array) -> jax.Array:
    total = jax.lax.cond(x[0, 0] > 0, lambda: x.sum(axis=1), lambda: jnp.zeros(x.shape[0]))
    return jax.lax.fori_loop(0, x.shape[1], lambda i, y: jnp.sin(y) + x[:, i].max(), total)


def _added_in_any_order(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x @ w
    return jnp.zeros((64, 64), jnp.float32).at[y[:, 0].astype(jnp.int32)].add(y.astype(jnp.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--target", choices=TARGETS, help="default: all")
    parser.add_argument(
        "--part", type=int, choices=range(PARTS["h200"]), help="of the programs of an H200"
    )
    parser.add_argument(
        "--layers",
        type=int,
        help=f"layers of the longest steps (default: 32, with --quick {QUICK_LAYERS})",
    )
    parser.add_argument("--quick", action="store_true", help="one program of each kind")
    parser.add_argument("--output", type=Path, help="write the table of all targets there too")
    args = parser.parse_args()
    if args.target is None or (args.target in PARTS and args.part is None):
        targets = TARGETS if args.target is None else (args.target,)
        sys.exit(run_each_target(HEADER, args.output, tuple(targets), PARTS))
    wanted = Selection(args.target, args.only, args.quick, args.part or 0)
    if args.target == "h200":
        found = run(wanted, args.layers or (QUICK_LAYERS if args.quick else LLAMA_3_1_8B.layers))
    else:
        found = run_on(args.target, wanted)
    failed = False
    for result in found:
        print(f"| {' | '.join(result.row)} |", flush=True)
        for fault in result.faults:
            print(f"    FAULT: {fault}", flush=True)
            failed = True
    if args.quick and args.layers is None:
        for name in sorted(set(QUICK[args.target]) - wanted.named):
            print(f"    FAULT: no program is named {name}", flush=True)
            failed = True
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
