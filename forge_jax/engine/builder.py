"""Puts an engine together from its configuration: the one place that knows all the parts.

Order: files are checked and executables start to compile from shapes alone; the weights are read
meanwhile. When the first executables are there, XLA's own figures are held against the memory, the
KV cache is made, and each of them runs once: the engine can serve. The others are adopted later.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.experimental.compilation_cache import compilation_cache

from forge_jax.checkpoint.adapter import check_adapter, read_adapter
from forge_jax.checkpoint.converted import Record, read_record
from forge_jax.checkpoint.gguf import is_gguf
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.load import check_weights, load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config import SELF, EngineConfig, split_lora
from forge_jax.engine.adapters import Adapters, LoadedAdapter, Run
from forge_jax.engine.compile_cache import (
    default_cache_folder,
    drop_broken_entries,
    foreign_entries_fault,
    is_url,
)
from forge_jax.engine.core import EngineCore, EngineParts, make_scheduler, max_rows
from forge_jax.engine.fingerprint import system_fingerprint
from forge_jax.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    RequestError,
    UnsupportedModelError,
)
from forge_jax.grammar import GrammarCompiler
from forge_jax.models.decoder import WeightForms
from forge_jax.models.kv import element_dtype
from forge_jax.models.lora import LoraShape
from forge_jax.models.registry import build_model, decoded, resolve_dtype
from forge_jax.schedule.request import LoraRef
from forge_jax.schedule.token_budget import TokenBudget
from forge_jax.speculate import make_speculator
from forge_jax.speculate.draft_model import DraftModel, draft_shapes
from forge_jax.step.draft_probs import DraftProbs
from forge_jax.step.kv_cache import (
    CPU_SEQUENCE_TOKENS,
    GIB,
    KVShape,
    coarse,
    cpu_kv_bytes,
    fit_num_blocks,
    kv_shape,
)
from forge_jax.step.mesh import TensorMesh, choose_mesh
from forge_jax.step.runner import Runner, compiler_options, first_shapes, step_shapes
from forge_jax.step.slots import MAX_END_TOKENS
from forge_jax.step.step import Sampler
from forge_jax.telemetry.compilations import SinceReady
from forge_jax.telemetry.memory import available_host_bytes, device_bytes, give_back_freed_memory
from forge_jax.telemetry.startup import StartupTimes
from forge_jax.telemetry.units import bytes_text
from forge_jax.text.load import load_text
from forge_jax.weights.partition import check_shards, shard_spec
from forge_kernels import cpu
from forge_kernels.attention import Implementation
from forge_kernels.attention.cpu_ffi import unsupported
from forge_kernels.linear import Format
from forge_kernels.private_files import private_folder_fault

if TYPE_CHECKING:
    from forge_jax.models.decoder import Leaves, Model
    from forge_jax.models.spec import ModelSpec
    from forge_jax.schedule.scheduler import Scheduler
    from forge_jax.text import Tokenizer

log = logging.getLogger(__name__)

CPU_ITL_TARGET_MS = 200.0


def assemble(  # noqa: PLR0915
    config: EngineConfig, startup: StartupTimes | None = None, folder: Path | None = None
) -> EngineParts:
    """Resolves, checks, compiles and loads; blocks until the engine can run.

    What is not compiled by then is `EngineParts.late`.

    Args:
      startup: where the phases are noted; default: from now on.
      folder: the model's, as `resolve` found it; default: it is looked for.

    Raises:
      ModelError: the model cannot be served.
      ConfigError: the configuration does not fit the model or the machine.
    """
    startup = startup or StartupTimes()
    with startup.phase("config"):
        folder = folder or resolve(config.model.model, config.model.revision)
        spec = read_model_spec(config, folder)
        device = choose_device(config)
        mesh = choose_mesh(config, device)
        shards = 1 if mesh is None else mesh.shards
        check_shards(spec, shards)
        if mesh is not None:  # what fits the one with the least memory fits all
            device = min(mesh.devices, key=lambda each: _free_bytes(each, shards))
        record = read_converted(config, folder)
    with startup.phase("kernels"):  # where they are C++, a compiler builds them the first time
        kernels = choose_kernels(config, spec, device, record)
    with startup.phase("config"):
        lora = _lora_shape(config)
        if lora is not None and record is not None and record.packed:
            raise ConfigError(
                f"LoRA adapters: {folder} was converted with gates and ups packed together, which "
                "adapters forbid; serve the model that it was made of"
            )
        forms = dataclasses.replace(kernels.forms, lora=lora is not None)
        model = build_model(spec, config.model.dtype, forms, shards)
        check_weights(model, folder)  # before anything that takes long
        if lora is not None:
            _check_adapters(config, model, lora)
        draft = _choose_draft(config, model, kernels, device)
        sizes = _Sizes.choose(config, model, device, draft, lora)
        use_compilation_cache(config)
    compilations = SinceReady()
    memory_limit = _free_bytes(device, shards)
    draft_probs = _make_proposals(config, draft, device if mesh is None else mesh.whole)
    runner = _make_runner(
        config, model, sizes, device, memory_limit, kernels, draft_probs, lora, mesh
    )
    runner.compile()
    with startup.phase("config"):  # what the shapes do not depend on
        tokenizer, template = load_text(folder, config.model.chat_template, spec.vocab_size)
    with startup.phase("weights"):
        mapped = may_map(config, device)
        leaves = load_weights(model, folder, device=device, mesh=mesh, mapped=mapped)
        place = device if mesh is None else mesh.whole
        draft_leaves = () if draft is None else draft.load(model, leaves, place)
    with startup.phase("compile"):  # what is left of it
        runner.allocate()
        needed = runner.memory_bytes() + sizes.draft_bytes
        if needed > memory_limit:
            runner.cancel()
            sizes = sizes.smaller(config, needed - memory_limit)
            runner = _make_runner(
                config, model, sizes, device, memory_limit, kernels, draft_probs, lora, mesh
            )
            runner.compile()
            still = runner.memory_bytes() + sizes.draft_bytes - memory_limit
            if still > 0:
                runner.cancel()
                raise ConfigError(
                    f"the steps need {still / GIB:.2f} GiB more than the device has, with "
                    f"{sizes.kv.num_blocks} KV blocks: set --num-blocks to less"
                )
    draft_model = None
    if draft is not None:
        draft_model = _make_draft_model(
            config, draft, sizes, runner, device, memory_limit, kernels, draft_probs, mesh
        )
        draft_model.compile()
    with startup.phase("warm-up"):
        runner.start(leaves)
        if draft_model is not None:
            draft_model.start(draft_leaves)
    adapters = None if lora is None else _load_adapters(config, model, lora, runner)
    log.info(
        "%s: %s of weights, KV cache of %d blocks x %d tokens in %s (%.2f GiB), context %d, "
        "on %s%s",
        config.model.model,
        bytes_text(model.param_bytes),
        sizes.kv.num_blocks,
        sizes.kv.block_size,
        element_dtype(config.cache.kv_dtype, model.dtype),
        sizes.kv.total_bytes / GIB,
        sizes.max_model_len,
        device,
        "" if mesh is None else f" and {shards - 1} more, as much on each",
    )
    _say_if_small(config, sizes)
    if draft is not None and sizes.draft_kv is not None:
        log.info(
            "draft model %s: %s of weights of its own, KV cache of %.2f GiB",
            config.speculation.draft_model,
            bytes_text(draft.param_bytes),
            sizes.draft_kv.total_bytes / GIB,
        )
    rng = random.Random(config.model.seed)
    scheduler = make_scheduler(
        config,
        num_blocks=sizes.kv.num_blocks,
        block_size=sizes.kv.block_size,
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        eos_token_ids=_eos_token_ids(spec, tokenizer),
        rng=rng,
        budget=choose_budget(config, model, runner, device),
    )
    core = EngineCore(
        scheduler=scheduler,
        device=runner,
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer, spec.vocab_size, scheduler.config.eos_token_ids),
        vocab_size=spec.vocab_size,
        one_step_ahead=config.batch.one_step_ahead,
        speculator=make_speculator(config, draft_model),
    )
    late = _Late(runner, draft_model, scheduler, compilations)
    ready = late.settle()
    fingerprint = None
    if config.model.deterministic:
        fingerprint = system_fingerprint(folder, device, runner.settings)
    return EngineParts(
        name=config.model.model,
        core=core,
        max_model_len=sizes.max_model_len,
        tokenizer=tokenizer,
        chat_template=template,
        rng=rng,
        guard=lambda: jax.no_tracing(True),
        compilations=compilations,
        late=None if ready else late,
        pooler=runner,
        adapters=adapters,
        steps=runner,
        startup=startup,
        system_fingerprint=fingerprint,
        architecture=spec.architecture,
        shards=shards,
        pooling=config.model.pooling,
    )


def choose_budget(
    config: EngineConfig, model: Model, runner: Runner, device: jax.Device
) -> TokenBudget | None:
    """The size of steps that have an inter-token latency to keep; None where they have none."""
    target_ms = config.batch.itl_target_ms
    if target_ms is None:
        on_cpu = device.platform == "cpu"
        one_size = config.model.deterministic or not config.batch.chunked_prefill
        target_ms = CPU_ITL_TARGET_MS if on_cpu and not one_size else 0.0
    if not target_ms:
        return None
    # The C++ kernels leave unused rows out.
    sizes = None if model.packings else runner.prompt_sizes
    log.info(
        "inter-token latency target of %g ms: while sequences decode, steps with prompts have "
        "fewer tokens where full ones would take longer (%s)",
        target_ms,
        "any number" if sizes is None else f"one of {', '.join(map(str, sizes))}",
    )
    return TokenBudget(target_ms / 1e3, sizes)


def _lora_shape(config: EngineConfig) -> LoraShape | None:
    """None where there can be no adapters: then nothing of them is compiled."""
    asked = config.model.max_loras
    places = len(config.model.lora) if asked is None else asked
    return LoraShape(places=places, rank=config.model.max_lora_rank) if places else None


def _check_adapters(config: EngineConfig, model: Model, shape: LoraShape) -> None:
    for option in config.model.lora:
        try:
            check_adapter(Path(split_lora(option)[1]), model, shape)
        except ModelError as error:
            raise type(error)(f"--lora {option}: {error}") from error


def _load_adapters(
    config: EngineConfig, model: Model, shape: LoraShape, runner: Runner
) -> Adapters:
    """Those that `--lora` names. Nothing runs yet: everything is between two steps."""

    def install(ref: LoraRef, path: str, run: Run) -> LoadedAdapter:
        adapter = read_adapter(Path(path), model, shape)
        run(lambda: runner.set_adapter(ref.place, adapter.arrays))
        return LoadedAdapter(ref=ref, path=path, digest=adapter.digest, rank=adapter.rank)

    adapters = Adapters(shape.places, install)
    for option in config.model.lora:
        name, folder = split_lora(option)
        try:
            adapters.load(name, folder)
        except RequestError as error:
            raise ModelError(f"--lora {option}: {error}") from error
    return adapters


class _Late:
    """`core.Late` of a runner: with the executables grow the limits of a step.

    And of a draft model, where there is one.
    """

    def __init__(
        self,
        runner: Runner,
        draft_model: DraftModel | None,
        scheduler: Scheduler,
        compilations: SinceReady,
    ):
        self._runner = runner
        self._parts = [runner] if draft_model is None else [runner, draft_model]
        self._scheduler = scheduler
        self._compilations = compilations

    def adopt(self) -> bool:
        for part in self._parts:
            part.adopt()
        return self.settle()

    def settle(self) -> bool:
        """Has plans keep to what can run now; True if that is everything."""
        limits = self._runner.limits
        self._scheduler.config = dataclasses.replace(self._scheduler.config, **limits._asdict())
        complete = all(part.complete for part in self._parts)
        if complete:
            self._compilations.ready()
            give_back_freed_memory()
        return complete

    def on_compiled(self, call: Callable[[], None]) -> None:
        for part in self._parts:
            part.on_compiled(call)

    def wait(self) -> None:
        for part in self._parts:
            part.wait()

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()


def _make_proposals(
    config: EngineConfig, draft: _Draft | None, device: jax.Device | jax.sharding.Sharding
) -> DraftProbs | None:
    """Where a draft model tells the steps what its drafts were drawn from; None if none must."""
    if draft is None or config.speculation.draft_verification == "coupled":
        return None
    return DraftProbs(
        num_slots=config.batch.max_num_seqs,
        max_drafts=config.speculation.max_draft_tokens,
        vocab_size=draft.model.spec.vocab_size,
        device=device,
    )


def _make_runner(
    config: EngineConfig,
    model: Model,
    sizes: _Sizes,
    device: jax.Device,
    memory_limit: int,
    kernels: Kernels,
    draft_probs: DraftProbs | None,
    lora: LoraShape | None,
    mesh: TensorMesh | None,
) -> Runner:
    speculation = config.speculation
    shapes = step_shapes(
        max_num_seqs=config.batch.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_rows=max_rows(config.batch.max_num_seqs),
        block_size=sizes.kv.block_size,
        max_drafts=speculation.max_draft_tokens if speculation.speculation != "off" else 0,
        deterministic=config.model.deterministic,
    )
    return Runner(
        model,
        shapes=shapes,
        first=first_shapes(shapes, device.platform),
        kv_shape=sizes.kv,
        num_slots=config.batch.max_num_seqs,
        max_blocks=sizes.blocks_per_sequence,
        device=device,
        implementation=kernels.attention,
        sampler=kernels.sampler,
        verification=speculation.draft_verification,
        draft_probs=draft_probs,
        deterministic=config.model.deterministic,
        command_buffers=config.parallel.command_buffers,
        lora=lora,
        memory_limit=memory_limit - sizes.draft_bytes,
        mesh=mesh,
    )


def _make_draft_model(
    config: EngineConfig,
    draft: _Draft,
    sizes: _Sizes,
    runner: Runner,
    device: jax.Device,
    memory_limit: int,
    kernels: Kernels,
    draft_probs: DraftProbs | None,
    mesh: TensorMesh | None,
) -> DraftModel:
    assert sizes.draft_kv is not None
    shared_bytes = draft.model.param_bytes - draft.param_bytes
    return DraftModel(
        draft.model,
        shapes=draft_shapes(
            max_num_seqs=config.batch.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_rows=max_rows(config.batch.max_num_seqs),
            max_blocks=sizes.blocks_per_sequence,
            deterministic=config.model.deterministic,
            proposes=draft_probs is not None,
        ),
        kv_shape=sizes.draft_kv,
        max_draft_tokens=config.speculation.max_draft_tokens,
        device=device,
        implementation=draft.implementation,
        sampler=kernels.sampler,
        draft_probs=draft_probs,
        uniform=config.model.deterministic,
        compiler_options=compiler_options(
            device.platform,
            command_buffers=config.parallel.command_buffers,
            deterministic=config.model.deterministic,
        ),
        memory_limit=memory_limit - runner.resident_bytes + shared_bytes,
        mesh=mesh,
    )


def choose_device(config: EngineConfig) -> jax.Device:
    """The device that `--backend` and `--device` name.

    Raises:
      ConfigError: there is none.
    """
    backend, index = config.parallel.backend, config.parallel.device
    try:
        devices = jax.devices() if backend == "auto" else jax.devices(backend)
    except RuntimeError as error:
        raise ConfigError(
            f"--backend {backend}: JAX finds no such device here"
            + (" (a CUDA host needs the extra cuda13 of this project)" if backend == "cuda" else "")
        ) from error
    if not 0 <= index < len(devices):
        raise ConfigError(f"--device {index}: there are {len(devices)} devices (0 is the first)")
    return devices[index]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """How matrices are kept, and what computes attention and samples."""

    forms: WeightForms = WeightForms()
    attention: Implementation = "auto"
    sampler: Sampler = "xla"


def read_converted(config: EngineConfig, folder: Path) -> Record | None:
    """The record of a converted folder; None of any other.

    Raises:
      CheckpointError: it is broken, or not of what `--dtype` and `--quantization` ask for.
    """
    record = read_record(folder)
    if record is not None:
        wanted = config.model
        record.check_options(dtype=wanted.dtype, quantization=wanted.quantization)
    return record


def read_model_spec(config: EngineConfig, folder: Path) -> ModelSpec:
    """The spec, without blocks where the matrices of a GGUF file are to be decoded.

    `--quantization` rounds what they decode to.

    Raises:
      ModelError: as `read_spec`.
      CheckpointError: a converted folder has them in blocks, which can only stay.
    """
    spec, wanted = read_spec(folder), config.model
    if spec.block_types is None or (
        wanted.gguf_weights != "decoded" and wanted.quantization == "none"
    ):
        return spec
    if not is_gguf(folder):
        option = "--gguf-weights decoded"
        if wanted.quantization != "none":
            option = f"--quantization {wanted.quantization}"
        raise CheckpointError(
            f"{option}: {folder} was converted with its matrices in blocks: leave it out, or "
            "convert the original model again with it"
        )
    return decoded(spec)


def may_map(config: EngineConfig, device: jax.Device) -> bool:
    """True if the device may compute with files of a converted folder as they lie in memory."""
    return config.model.mmap and device.platform == "cpu"


def choose_kernels(
    config: EngineConfig, spec: ModelSpec, device: jax.Device, record: Record | None = None
) -> Kernels:
    """The C++ kernels where they can be used, the plain XLA forms elsewhere.

    Args:
      record: of a converted folder, whose matrices stay in the form that they have there.

    Raises:
      ConfigError: quantised or packed weights where there are no kernels for them.
    """
    quantization = config.model.quantization if record is None else record.quantization
    if quantization != "none" and spec.quantization is not None:
        raise ConfigError(
            f"--quantization {quantization}: the checkpoint is quantised already "
            f"({spec.quantization.method}, by {spec.quantization.where}); leave the flag out"
        )
    dtype = resolve_dtype(spec, config.model.dtype)
    packed: Format = quantization if quantization in ("int8", "int4") else "bf16"
    if config.model.kernels == "xla":
        reason = "--kernels xla is set"
    elif device.platform != "cpu":
        reason = f"it is for CPUs, not {device.platform}"
    elif dtype != "bfloat16":
        reason = f"it is for bfloat16, not {dtype}: set --dtype bfloat16"
    elif not _has_cpu_kernels(config):
        reason = "the CPU kernels could not be built (see the log)"
    elif record is not None and not record.packed:
        reason = f"{record.folder} has plain matrices: convert the original model here to use them"
        log.warning("plain XLA, without the CPU kernels: %s", reason)
    else:
        # int4 is too coarse for the vocabulary. A plain embedding is the fastest to take rows from.
        forms = WeightForms(
            layers=packed,
            head="int8" if packed == "int4" else packed,
            embedding=None if packed == "bf16" else "int8",
            rounded="fp8" if quantization == "fp8" else None,
            block_rows="int8" if config.model.gguf_weights == "packed" else None,
        )
        if record is not None:
            forms = dataclasses.replace(forms, **dict(record.forms))
        cached = element_dtype(config.cache.kv_dtype, dtype)
        no_attention = unsupported(spec.head_dim, cached, device.platform)
        if no_attention is not None:
            log.warning("attention in plain XLA, without the CPU kernels: %s", no_attention)
        return Kernels(forms=forms, attention="auto" if no_attention else "cpu", sampler="cpu")
    if record is not None and record.packed:
        raise ConfigError(
            f"{record.folder} was converted for the CPU kernels, which cannot be used: "
            f"{reason}. Convert the original model here, or with --kernels xla for all machines"
        )
    if quantization == "none":
        return Kernels()
    log.info("--quantization %s in plain XLA: %s", quantization, reason)
    return Kernels(forms=WeightForms(rounded=quantization))


def _has_cpu_kernels(config: EngineConfig) -> bool:
    """Load the C++ kernels; False if they cannot be had.

    Raises:
      ConfigError: the instruction set that is asked for cannot be used.
    """
    isa = None if config.model.kernels == "auto" else config.model.kernels
    try:
        return cpu.available(isa)
    except cpu.BuildError as error:
        raise ConfigError(f"--kernels {isa}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """The draft model that is asked for.

    Several devices share one that is the target's first layers as they share that; any other is
    whole on each: it is small, and what they would tell each other takes longer than computing it.
    """

    model: Model
    folder: Path | None  # None: its weights are the first layers of the model's
    implementation: Implementation

    @property
    def param_bytes(self) -> int:
        """Of weights that are its own."""
        return 0 if self.folder is None else self.model.param_bytes

    def load(
        self, target: Model, leaves: Leaves, device: jax.Device | jax.sharding.Sharding
    ) -> Leaves:
        """The weights: read, or the very arrays of the model."""
        if self.folder is not None:
            return load_weights(self.model, self.folder, device=device)
        named = dict(zip(target.names, leaves, strict=True))
        return tuple(named[name] for name in self.model.names)


def _choose_draft(
    config: EngineConfig, target: Model, kernels: Kernels, device: jax.Device
) -> _Draft | None:
    """The model that `--draft-model` names; None without one.

    Raises:
      ModelError: it cannot be served.
      ConfigError: it does not fit the model.
    """
    name, layers = config.speculation.draft_model, config.speculation.draft_layers
    if name is None:
        return None
    if name == SELF:
        most = target.spec.num_hidden_layers
        if layers is None or layers > most:
            raise ConfigError(f"--draft-layers must be from 1 to the model's {most}, not {layers}")
        spec = dataclasses.replace(target.spec, num_hidden_layers=layers)
        forms = dataclasses.replace(kernels.forms, lora=_lora_shape(config) is not None)
        model = build_model(spec, config.model.dtype, forms, target.shards)
        return _Draft(model=model, folder=None, implementation=kernels.attention)
    folder = resolve(name)
    spec = read_model_spec(config, folder)
    if spec.vocab_size != target.spec.vocab_size:
        raise ConfigError(
            f"--draft-model {name} has a vocabulary of {spec.vocab_size} tokens, and "
            f"{config.model.model} one of {target.spec.vocab_size}: they must be the same"
        )
    record = read_converted(config, folder)
    if record is not None and record.shards > 1:
        raise ConfigError(
            f"--draft-model {name} was converted for {record.shards} devices, and a draft model of "
            "its own is whole on each: convert the original model without --tensor-parallel"
        )
    own = choose_kernels(config, spec, device, record)
    model = build_model(spec, config.model.dtype, own.forms)
    check_weights(model, folder)
    return _Draft(model=model, folder=folder, implementation=own.attention)


def use_compilation_cache(config: EngineConfig) -> None:
    """Turn JAX's persistent compilation cache on or off, for the whole process.

    Only the user may write to its folder: an executable that is read from it is run. A folder that
    JAX's own setting names is held to that too, unless it is a URL.

    Raises:
      ConfigError: `--compile-cache` or JAX's setting names a folder that cannot be used, or that
        others can write to.
    """
    parallel = config.parallel
    named, from_jax = parallel.compile_cache_dir, jax.config.jax_compilation_cache_dir
    enabled = parallel.compile_cache
    if enabled and (named is not None or not is_url(from_jax)):
        default = str(default_cache_folder())
        folder = Path(named or from_jax or default)
        fault = private_folder_fault(folder) or foreign_entries_fault(folder)
        if fault and named is not None:
            raise ConfigError(f"--compile-cache {named}: {fault}")
        if fault and from_jax not in (None, default):
            raise ConfigError(
                f"JAX_COMPILATION_CACHE_DIR {from_jax}: {fault}, or use --no-compile-cache"
            )
        if fault:
            log.warning("no compilation cache, every start compiles anew: %s: %s", folder, fault)
            enabled = False
        else:
            drop_broken_entries(folder)
            if from_jax != str(folder):
                jax.config.update("jax_compilation_cache_dir", str(folder))
                compilation_cache.reset_cache()
    if jax.config.jax_enable_compilation_cache != enabled:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The sizes that the configuration leaves to the model and the machine."""

    max_model_len: int
    max_num_batched_tokens: int
    kv: KVShape
    draft_kv: KVShape | None  # of the draft model: as many blocks
    draft_bytes: int  # of the draft model: its own weights, and `draft_kv`

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.kv.block_size)

    @classmethod
    def choose(
        cls,
        config: EngineConfig,
        model: Model,
        device: jax.Device,
        draft: _Draft | None = None,
        lora: LoraShape | None = None,
    ) -> _Sizes:
        spec, cache, batch = model.spec, config.cache, config.batch
        on_cpu = device.platform == "cpu"
        asked = config.model.max_model_len
        if asked is not None and asked > spec.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {asked} is more than the model's own limit of "
                f"{spec.max_position_embeddings}"
            )
        max_model_len = asked or spec.max_position_embeddings
        max_tokens = batch.max_num_batched_tokens or _step_tokens(config, on_cpu)

        def shape(of: Model, num_blocks: int, block_size: int) -> KVShape:
            # A draft model's cache is small, and in the model's own type.
            kv_dtype = cache.kv_dtype if of is model else "auto"
            return kv_shape(
                shard_spec(of.spec, of.shards),
                num_blocks=num_blocks,
                block_size=block_size,
                dtype=element_dtype(kv_dtype, of.dtype),
                platform=device.platform,
            )

        def block_bytes(block_size: int) -> int:
            models = [model] if draft is None else [model, draft.model]
            return sum(shape(each, 1, block_size).block_bytes for each in models)

        block_size = cache.block_size or (16 if on_cpu else 64)
        if cache.kv_cache == "contiguous":
            block_size = -(-max_model_len // 8) * 8
        if cache.num_blocks is not None:
            num_blocks, needed = cache.num_blocks, cache.num_blocks * block_bytes(block_size)
            max_model_len = _fit_context(asked, max_model_len, cache.num_blocks * block_size)
            free = _memory_bytes(device, model.shards)
            if needed > free:
                raise ConfigError(
                    f"--num-blocks {num_blocks} needs {needed / GIB:,.1f} GiB, and the device has "
                    f"{free / GIB:,.1f}: at most {free // block_bytes(block_size)} blocks fit"
                )
        else:
            wanted = batch.max_num_seqs * CPU_SEQUENCE_TOKENS // block_size
            free = _kv_bytes(
                config, model, draft, device, max_tokens, lora, wanted * block_bytes(block_size)
            )
            room = coarse(free // block_bytes(block_size)) * block_size
            if asked is None and cache.kv_cache == "paged" and room:
                max_model_len = _fit_context(None, max_model_len, room)
            per_sequence = -(-max_model_len // block_size)
            num_blocks = fit_num_blocks(
                block_bytes=block_bytes(block_size),
                free_bytes=free,
                blocks_per_sequence=per_sequence,
                max_num_seqs=batch.max_num_seqs,
            )
        draft_kv = None if draft is None else shape(draft.model, num_blocks, block_size)
        return cls(
            max_model_len=max_model_len,
            max_num_batched_tokens=max_tokens,
            kv=shape(model, num_blocks, block_size),
            draft_kv=draft_kv,
            draft_bytes=draft.param_bytes + draft_kv.total_bytes if draft and draft_kv else 0,
        )

    def smaller(self, config: EngineConfig, excess: int) -> _Sizes:
        """With a KV cache that is smaller by at least `excess` bytes.

        Raises:
          ConfigError: there is no room for one, or `--num-blocks` asked for this many.
        """
        draft_block_bytes = 0 if self.draft_kv is None else self.draft_kv.block_bytes
        block_bytes = self.kv.block_bytes + draft_block_bytes
        blocks = coarse((self.kv.num_blocks * block_bytes - excess) // block_bytes)
        room = blocks * self.kv.block_size
        what = f"the steps need {excess / GIB:.2f} GiB more than the device has"
        if config.cache.num_blocks is not None:
            raise ConfigError(
                f"--num-blocks {config.cache.num_blocks}: {what}: at most {max(blocks, 0)} fit"
            )
        least = 1 if config.model.max_model_len is None else self.blocks_per_sequence
        if blocks < least or config.cache.kv_cache == "contiguous":
            raise ConfigError(
                f"{what}: lower --max-model-len, --max-num-seqs or --max-num-batched-tokens"
            )
        log.warning("%s: the KV cache is cut to %d blocks", what, blocks)
        return dataclasses.replace(
            self,
            max_model_len=_fit_context(config.model.max_model_len, self.max_model_len, room),
            kv=dataclasses.replace(self.kv, num_blocks=blocks),
            draft_kv=self.draft_kv and dataclasses.replace(self.draft_kv, num_blocks=blocks),
            draft_bytes=self.draft_bytes - (self.kv.num_blocks - blocks) * draft_block_bytes,
        )


def _say_if_small(config: EngineConfig, sizes: _Sizes) -> None:
    """Logs that sequences will wait for blocks long before `--max-num-seqs` of them run."""
    seqs = config.batch.max_num_seqs
    room = sizes.kv.num_blocks * sizes.kv.block_size
    if config.cache.num_blocks is None and room < seqs * min(512, sizes.max_model_len):
        log.info(
            "the KV cache has room for %d tokens, %d for each of %d sequences: more of them wait "
            "(--num-blocks gives it more memory, --kv-dtype int8 takes half of it)",
            room,
            room // seqs,
            seqs,
        )


def _step_tokens(config: EngineConfig, on_cpu: bool) -> int:
    """Tokens of a step. In the deterministic tier XLA computes unused rows as well."""
    if config.model.deterministic:
        return 64 if on_cpu else 256
    return 512 if on_cpu else 2048


def _fit_context(asked: int | None, max_model_len: int, room: int) -> int:
    """The context, cut to what the KV cache has room for, unless it was asked for."""
    if room >= max_model_len:
        return max_model_len
    if asked is not None:
        raise ConfigError(
            f"--max-model-len {asked} does not fit into the KV cache, which has room for {room} "
            "tokens: raise --num-blocks or lower --max-model-len"
        )
    log.warning(
        "the KV cache has room for %d tokens: the context is cut from %d to that "
        "(--num-blocks gives it more)",
        room,
        max_model_len,
    )
    return room


def _memory_bytes(device: jax.Device, shards: int) -> int:
    """All that could be used on the device."""
    memory = device_bytes(device)
    return _host_bytes(shards) if memory is None else memory[0]


def _free_bytes(device: jax.Device, shards: int) -> int:
    """What nobody else uses of the device."""
    memory = device_bytes(device)
    return _host_bytes(shards) if memory is None else memory[0] - memory[1]


def _host_bytes(shards: int) -> int:
    """What a device has that is a part of the host."""
    return available_host_bytes() // shards


def _kv_bytes(
    config: EngineConfig,
    model: Model,
    draft: _Draft | None,
    device: jax.Device,
    max_tokens: int,
    lora: LoraShape | None,
    wanted: int,
) -> int:
    """Bytes for the KV caches, after weights and an analytic bound on activations.

    Args:
      wanted: bytes that they should have on a CPU.
    """
    memory = device_bytes(device)
    weights = model.param_bytes + (0 if draft is None else draft.param_bytes)
    if lora is not None:
        weights += lora.num_bytes(shard_spec(model.spec, model.shards), model.dtype)
    if memory is None:
        available = available_host_bytes() - model.shards * weights
        return cpu_kv_bytes(model.shards * wanted, available) // model.shards
    limit, in_use = memory
    num_rows = max_rows(config.batch.max_num_seqs)
    models = [model] if draft is None else [model, draft.model]
    specs = [shard_spec(each.spec, each.shards) for each in models]
    activations = max(activation_bytes(spec, max_tokens, num_rows) for spec in specs)
    if lora is not None:  # between the two matrices, and what they add
        width = lora.places * lora.rank + 2 * specs[0].intermediate_size
        activations += 4 * max_tokens * width
    return int(limit * config.cache.memory_fraction) - in_use - weights - activations


def activation_bytes(spec: ModelSpec, max_tokens: int, num_rows: int) -> int:
    """An upper bound on what one step holds besides weights and KV: float32, four live copies."""
    width = max(
        2 * spec.intermediate_size,
        (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim,
        spec.hidden_size,
    )
    bound = 4 * 4 * (max_tokens * (width + 2 * spec.hidden_size) + num_rows * spec.vocab_size)
    if spec.experts is None:
        return bound
    # On a GPU each expert computes each token: gates and ups, their products, and what comes out.
    of_expert = 3 * spec.experts.intermediate_size + spec.hidden_size
    return bound + 4 * max_tokens * spec.experts.count * of_expert


def _eos_token_ids(spec: ModelSpec, tokenizer: Tokenizer | None) -> frozenset[int]:
    if len(spec.eos_token_ids) > MAX_END_TOKENS:
        raise UnsupportedModelError(
            f"eos_token_id: {len(spec.eos_token_ids)} ids, and {MAX_END_TOKENS} are supported"
        )
    if spec.eos_token_ids:
        return frozenset(spec.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return frozenset((tokenizer.eos_token_id,))
    return frozenset()
