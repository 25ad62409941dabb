"""Assembly of an engine from its configuration. Only this module imports all parts.

The files are checked first. Executables then compile from shapes alone while the weights are read.
When the first executables are ready, their memory needs, as XLA reports them, are compared with the
available memory. The KV cache is then allocated, each executable runs once, and the engine can
serve. The other executables are activated later.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
from collections.abc import Callable, Sequence
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
from forge_jax.checkpoint.steering import SteeringVectors, read_steering
from forge_jax.config import SELF, EngineConfig, split_lora, split_steering
from forge_jax.engine.adapters import Adapters, LoadedAdapter, Run
from forge_jax.engine.bundle import bundle_folder, identity, open_bundle, open_saved
from forge_jax.engine.compile_cache import (
    default_cache_folder,
    drop_broken_entries,
    foreign_entries_fault,
    is_url,
)
from forge_jax.engine.core import EngineCore, make_scheduler, max_rows
from forge_jax.engine.draft import Draft
from forge_jax.engine.fingerprint import system_fingerprint
from forge_jax.engine.offload import Offload
from forge_jax.engine.parts import EngineParts
from forge_jax.engine.sizes import Residents, Sizes, free_bytes, log_if_small, max_drafts
from forge_jax.engine.validation import ActivationLimits, ResearchLimits, Steering
from forge_jax.engine.weights import EngineWeights
from forge_jax.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    RequestError,
    UnsupportedModelError,
)
from forge_jax.grammar import GrammarCompiler
from forge_jax.host.progress import kernels_bar
from forge_jax.models.activations import ServedActivations, served_activations
from forge_jax.models.kv import element_dtype
from forge_jax.models.lora import LoraShape
from forge_jax.models.registry import build_model, decoded, resolve_dtype
from forge_jax.models.stages import split_stages
from forge_jax.schedule.host_tier import HostTier
from forge_jax.schedule.request import LoraRef
from forge_jax.schedule.token_budget import TokenBudget
from forge_jax.speculate import make_speculator
from forge_jax.speculate.draft_model import DraftModel, DraftModelOptions
from forge_jax.speculate.draft_step import draft_shapes
from forge_jax.step.draft_probs import DraftProbs
from forge_jax.step.host_blocks import BATCH, SAVING
from forge_jax.step.kv_cache import GIB, keeps_state, kv_shape
from forge_jax.step.mesh import cache_layouts
from forge_jax.step.options import PipelineStage, RunnerOptions
from forge_jax.step.placement import choose_placements
from forge_jax.step.runner import Runner
from forge_jax.step.slots import MAX_END_TOKENS
from forge_jax.step.step import Sampler
from forge_jax.step.step_shapes import first_shapes, step_shapes
from forge_jax.telemetry.compilations import SinceReady
from forge_jax.telemetry.memory import (
    give_back_freed_memory,
    reserve_device_memory,
    reserve_pinned_memory,
)
from forge_jax.telemetry.startup import StartupTimes
from forge_jax.telemetry.units import bytes_text
from forge_jax.text.load import load_text
from forge_jax.weights.formats import WeightFormats, fused_values
from forge_jax.weights.partition import check_shards, with_whole_experts
from forge_kernels import cpu
from forge_kernels.attention import Implementation
from forge_kernels.attention.cpu_ffi import unsupported
from forge_kernels.linear import Format
from forge_kernels.private_files import private_folder_fault

if TYPE_CHECKING:
    from forge_jax.engine.hosts.group import HostGroup
    from forge_jax.models.decoder import Leaves, Model
    from forge_jax.models.spec import ModelSpec
    from forge_jax.schedule.scheduler import Scheduler
    from forge_jax.step.bundle import Bundle
    from forge_jax.step.executables import BackgroundCompile
    from forge_jax.step.inputs import StepShape
    from forge_jax.step.mesh import TensorMesh
    from forge_jax.step.placement import Placement
    from forge_jax.step.saved import SavedExecutables
    from forge_jax.text import Tokenizer

log = logging.getLogger(__name__)

CPU_ITL_TARGET_MS = 200.0

type Select = Callable[[Sequence[StepShape]], Sequence[StepShape]]


@dataclass(frozen=True, kw_only=True)
class Design:
    """All choices and checks before the first executable compiles.

    Attributes:
      model: one shard of all layers.
      stages: the stages of pipeline parallelism; empty without them.
      device: the device of this process with the least memory.
      mesh: the mesh of `device`; None: there is no other device.
      bundle: holds executables that are loaded instead of compiled.
      saved: executables that earlier starts saved, if there is no bundle.
      select: returns the shapes of steps to compile. None: all.
    """

    config: EngineConfig
    folder: Path
    spec: ModelSpec
    model: Model
    kernels: Kernels
    device: jax.Device
    mesh: TensorMesh | None
    lora: LoraShape | None
    steering: SteeringVectors | None
    activations: ServedActivations | None
    draft: Draft | None
    draft_probs: DraftProbs | None
    memory_limit: int
    sizes: Sizes
    stages: tuple[PipelineStage, ...] = ()
    bundle: Bundle | None = None
    saved: SavedExecutables | None = None
    select: Select | None = None

    @property
    def shards(self) -> int:
        return 1 if self.mesh is None else self.mesh.shards

    @property
    def own_stages(self) -> list[PipelineStage]:
        """The stages of pipeline parallelism that this process has devices of."""
        return [stage for stage in self.stages if stage.placement.own_devices]

    @property
    def place(self) -> jax.Device | jax.sharding.Sharding:
        """The placement of arrays that are replicated on every device."""
        return self.device if self.mesh is None else self.mesh.whole

    def missing_bytes(self, memory_bytes: int) -> int:
        """Return the bytes by which executables that need `memory_bytes` exceed the memory."""
        sizes = self.sizes
        return memory_bytes + sizes.draft_bytes + sizes.staging_bytes - self.memory_limit


def assemble(
    config: EngineConfig,
    startup: StartupTimes | None = None,
    folder: Path | None = None,
    group: HostGroup | None = None,
    select: Select | None = None,
) -> EngineParts:
    """Resolve, check, compile and load. Block until the engine can run.

    Executables that are not ready by then are in `EngineParts.late`.

    Args:
      startup: records the phases. Default: a new one, from now on.
      folder: the model's folder, as `resolve` returned it. Default: resolved here.
      group: the hosts of `--num-hosts`. This is host 0, and this process ends if one is lost.
      select: returns the shapes of steps to compile, given all, smallest first. One of them must
        take prompts. Default: all.

    Raises:
      ModelError: if the model cannot be served.
      ConfigError: if the configuration does not fit the model or the machine.
    """
    startup = startup or StartupTimes()
    design = _with_bundle(make_design(config, startup, folder))
    design = _with_saved(_same_on_all(design, group))
    design = dataclasses.replace(design, select=select)
    compilations = SinceReady()
    runner = _make_runner(design)
    with startup.phase("config"):  # the part that shapes do not depend on
        tokenizer, template = load_text(
            design.folder, config.model.chat_template, design.spec.vocab_size
        )
    with startup.phase("weights"):
        leaves, draft_leaves = _load_weights(design)
    with startup.phase("compile"):  # the rest of it
        design, runner = _fit_memory(design, runner, group)
    draft_model = None if design.draft is None else _make_draft_model(design, design.draft, runner)
    with startup.phase("warm-up"):
        _start(design, runner, leaves)
        if draft_model is not None:
            draft_model.start(draft_leaves)
    if group is not None:
        group.lead(runner, _end_process)
    adapters = None if design.lora is None else _load_adapters(design, design.lora, runner)
    _log_sizes(design)
    rng = random.Random(config.model.seed)
    weights = EngineWeights(runner, design.draft, draft_model)
    core = _make_core(design, runner, draft_model, tokenizer, rng)
    return EngineParts(
        name=config.model.model,
        core=core,
        max_model_len=design.sizes.max_model_len,
        tokenizer=tokenizer,
        chat_template=template,
        rng=rng,
        guard=lambda: jax.no_tracing(True),
        compilations=compilations,
        late=_finish_later(runner, core.scheduler, compilations),
        pooler=runner,
        adapters=adapters,
        steps=runner,
        weights=weights,
        offload=Offload(runner, weights, design.draft, draft_model),
        startup=startup,
        system_fingerprint=_fingerprint(design, runner),
        architecture=design.spec.architecture,
        shards=design.shards,
        pooling=config.model.pooling,
    )


def load_follower(config: EngineConfig, group: HostGroup) -> Runner:
    """Return a runner that has started, for a host other than host 0.

    Raises:
      ModelError: if the model cannot be served.
      ConfigError: if the configuration does not fit the model, the machine or host 0.
      EngineError: if host 0 is lost.
    """
    design = _same_on_all(make_design(config, StartupTimes()), group)
    runner = _make_runner(design)
    leaves, _ = _load_weights(design)
    design, runner = _fit_memory(design, runner, group)
    _start(design, runner, leaves)
    _log_sizes(design)
    return runner


def _start(design: Design, runner: Runner, leaves: Leaves) -> None:
    runner.start(leaves)
    if design.steering is not None:
        runner.set_steering(design.steering.stack)


def _same_on_all(design: Design, group: HostGroup | None) -> Design:
    """Return the design with the KV cache of the host with the least memory.

    Raises:
      ConfigError: if the hosts' models, versions or options differ.
    """
    if group is None:
        return design
    blocks = group.smallest(design.sizes.kv.num_blocks)
    sizes = design.sizes.with_blocks(design.config, blocks)
    design = dataclasses.replace(design, sizes=sizes)
    group.check_same(identity(design, runner_options(design)))
    return design


def _end_process(error: BaseException) -> None:
    """End the engine process, because JAX cannot replace a lost host. A successor can."""
    log.error("the connection to another host is lost: this engine process ends")
    os._exit(1)


def make_design(
    config: EngineConfig,
    startup: StartupTimes,
    folder: Path | None = None,
    device: jax.Device | None = None,
) -> Design:
    """Make all choices, and check them and the model's files.

    Args:
      startup: records the phases.
      folder: the model's folder. Default: resolved here.
      device: default: the one that the configuration selects.

    Raises:
      ModelError: if the model cannot be served.
      ConfigError: if the configuration does not fit the model or the machine.
    """
    with startup.phase("config"):
        folder = folder or resolve(config.model.model, config.model.revision)
        spec = read_model_spec(config, folder)
        device = device or choose_device(config)
        placements = choose_placements(config, device)
        shards = len(placements[0].devices)
        if config.parallel.expert_parallel:
            spec = with_whole_experts(spec)
        check_shards(spec, shards)
        placement, device = _least_memory(placements, shards)
        record = read_converted(config, folder)
    with startup.phase("kernels"):  # C++ kernels are compiled at the first start
        kernels = choose_kernels(config, spec, device, record)
    with startup.phase("config"):
        lora = _lora_shape(config, kernels if placement.mesh is None else None)
        _check_lora(lora, record)
        formats = dataclasses.replace(kernels.formats, lora=lora is not None)
        model = build_model(spec, config.model.dtype, formats, shards)
        check_weights(model, folder)  # before anything slow
        config = _without_prefix_cache(config, model)
        stages = _stages(model, placements)
        if lora is not None:
            _check_adapters(config, model, lora)
        steering = _read_steering(config, spec)
        draft = _choose_draft(config, model, kernels, device)
        activations = _served_activations(config, spec, formats, shards)
        residents = Residents(
            config=config,
            model=model,
            device=device,
            draft=draft,
            lora=lora,
            steering=None if steering is None else steering.shape,
            activations=activations,
        )
        sizes = _choose_sizes(residents, stages)
        use_compilation_cache(config)
    return Design(
        config=config,
        folder=folder,
        spec=spec,
        model=model,
        kernels=kernels,
        device=device,
        mesh=placement.mesh,
        stages=stages,
        lora=lora,
        steering=steering,
        activations=activations,
        draft=draft,
        memory_limit=free_bytes(device, shards),  # before the arrays below use some of it
        draft_probs=_make_draft_probs(config, draft, device, placement.mesh),
        sizes=sizes,
    )


def _least_memory(placements: Sequence[Placement], shards: int) -> tuple[Placement, jax.Device]:
    """Return this process's device with the least free memory, and its placement.

    Sizes that fit this device fit all.
    """
    own = [(each, device) for each in placements for device in each.own_devices]
    return min(own, key=lambda pair: free_bytes(pair[1], shards)) if len(own) > 1 else own[0]


def _stages(model: Model, placements: Sequence[Placement]) -> tuple[PipelineStage, ...]:
    """Divide the model among the placements; nothing if there is only one."""
    if len(placements) == 1:
        return ()
    stages = split_stages(model, cache_layouts(model), len(placements))
    models = map(model.of_stage, stages)
    return tuple(map(PipelineStage, models, placements))


def _choose_sizes(residents: Residents, stages: Sequence[PipelineStage]) -> Sizes:
    """Return sizes that fit each stage of this process.

    The memory of CPU devices is the host's, which all stages share.
    """
    own = [stage.model for stage in stages if stage.placement.own_devices]
    if not own or residents.on_cpu:
        return Sizes.choose(residents)
    sizes = [Sizes.choose(dataclasses.replace(residents, model=model)) for model in own]
    return min(sizes, key=lambda each: each.kv.num_blocks)


def _without_prefix_cache(config: EngineConfig, model: Model) -> EngineConfig:
    """Return the configuration without prefix caching if a layer has state per sequence.

    Blocks hold no state, so a sequence cannot start after a cached prefix.
    """
    if not keeps_state(model.spec) or not config.cache.prefix_cache:
        return config
    log.info("%s keeps state per sequence: prefix caching is off", model.spec.architecture)
    if config.cache.host_kv_gib:
        log.info("--host-kv-gib has no effect without prefix caching: it is off")
    cache = dataclasses.replace(config.cache, prefix_cache=False, host_kv_gib=0.0)
    return dataclasses.replace(config, cache=cache)


def _with_bundle(design: Design) -> Design:
    """Return the design with the bundle of `--compile-cache`, if its executables fit.

    The default KV cache depends on the free memory. If the bundle's is smaller, it is used.
    """
    bundle = open_bundle(design.config, design.device)
    if bundle is None:
        return design
    sizes, blocks = design.sizes, bundle.num_blocks
    least = 1 if design.config.model.max_model_len is None else sizes.blocks_per_sequence
    if design.config.cache.num_blocks is None and least <= blocks < sizes.kv.num_blocks:
        sizes = sizes.with_blocks(design.config, blocks)
    fitting = dataclasses.replace(design, sizes=sizes)
    difference = bundle.difference(identity(fitting, runner_options(fitting)))
    if difference is None:
        log.info("loading the executables of the bundle %s", bundle.folder)
        return dataclasses.replace(fitting, bundle=bundle)
    bundle.warn(f"not used, so this start compiles: {difference}")
    return design


def _with_saved(design: Design) -> Design:
    """Return the design with the executables that earlier starts with the same sizes saved."""
    saved = None if design.bundle else open_saved(design, runner_options(design))
    if saved is not None and saved.folder.is_dir():
        log.info("loading executables that an earlier start saved in %s", saved.folder)
    return dataclasses.replace(design, saved=saved)


def _load_weights(design: Design) -> tuple[Leaves, Leaves]:
    mapped = may_map(design.config, design.device)
    if design.stages:
        parts = [
            load_weights(
                stage.model,
                design.folder,
                device=stage.placement.device,
                mesh=stage.placement.mesh,
                mapped=mapped,
            )
            for stage in design.own_stages
        ]
        return tuple(leaf for part in parts for leaf in part), ()
    leaves = load_weights(
        design.model, design.folder, device=design.device, mesh=design.mesh, mapped=mapped
    )
    if design.draft is None:
        return leaves, ()
    return leaves, design.draft.load(design.model, leaves, design.place)


def _fit_memory(
    design: Design, runner: Runner, group: HostGroup | None = None
) -> tuple[Design, Runner]:
    """Compare XLA's memory needs with the memory. Return a smaller design if there is too little.

    Raises:
      ConfigError: if even a smaller KV cache does not fit.
    """
    runner.allocate()
    missing = design.missing_bytes(runner.memory_bytes())
    if group is not None:
        missing = -group.smallest(-missing)  # bytes missing on the host with the least memory
    if missing <= 0:
        return design, runner
    runner.background.cancel()
    runner.release()  # the caller still references it, and the next KV cache needs its memory
    sizes = design.sizes.smaller(design.config, missing)
    design = _with_saved(dataclasses.replace(design, sizes=sizes))
    runner = _make_runner(design)
    missing = design.missing_bytes(runner.memory_bytes())
    if group is not None:
        missing = -group.smallest(-missing)
    if missing > 0:
        runner.background.cancel()
        raise ConfigError(
            f"the steps need {missing / GIB:.2f} GiB more than the device has, with "
            f"{design.sizes.kv.num_blocks} KV cache blocks: lower --num-blocks"
        )
    return design, runner


def _log_sizes(design: Design) -> None:
    config, sizes, model, draft = design.config, design.sizes, design.model, design.draft
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
        design.device,
        "" if design.mesh is None else f" and {design.shards - 1} more with the same sizes on each",
    )
    for stage in design.own_stages:
        assert stage.model.stage is not None
        layers, count = stage.model.stage.layers, stage.model.stage.count
        log.info(
            "stage %d of %d: layers %d to %d, %s of weights, on %s",
            stage.model.stage.index,
            count,
            layers[0],
            layers[-1],
            bytes_text(stage.model.param_bytes),
            ", ".join(map(str, stage.placement.devices)),
        )
    log_if_small(config, sizes)
    if sizes.host_blocks:
        log.info(
            "host memory for %d evicted KV cache blocks (%.2f GiB)",
            sizes.host_blocks,
            sizes.host_blocks * sizes.kv.block_bytes * model.shards / GIB,
        )
    if draft is not None and sizes.draft_kv is not None:
        log.info(
            "draft model %s: %s of additional weights, KV cache of %.2f GiB",
            config.speculation.draft_model,
            bytes_text(draft.param_bytes),
            sizes.draft_kv.total_bytes / GIB,
        )


def _make_core(
    design: Design,
    runner: Runner,
    draft_model: DraftModel | None,
    tokenizer: Tokenizer | None,
    rng: random.Random,
) -> EngineCore:
    config, sizes, spec = design.config, design.sizes, design.spec
    eos_token_ids = _eos_token_ids(spec, tokenizer)
    # The C++ kernels skip unused rows.
    step_sizes = None if design.model.packings else runner.options.prompt_sizes
    scheduler = make_scheduler(
        config,
        num_blocks=sizes.kv.num_blocks,
        block_size=sizes.kv.block_size,
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        eos_token_ids=eos_token_ids,
        rng=rng,
        budget=choose_budget(config, step_sizes, design.device),
        host=_host_tier(sizes),
    )
    core = EngineCore(
        scheduler=scheduler,
        device=runner,
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer, spec.vocab_size, eos_token_ids),
        vocab_size=spec.vocab_size,
        one_step_ahead=config.batch.one_step_ahead,
        speculator=make_speculator(config, draft_model),
        # Other hosts may have failed at another point, or not at all.
        unrecoverable=() if runner.mirror is None else (Exception,),
        research=ResearchLimits(_steering(design), _activations(design), pools=not design.stages),
    )
    if runner.host is not None:
        core.keep_evicted(runner.host)
    return core


def _host_tier(sizes: Sizes) -> HostTier | None:
    if not sizes.host_blocks:
        return None
    return HostTier(sizes.host_blocks, sizes.kv.block_size, BATCH * SAVING)


def _fingerprint(design: Design, runner: Runner) -> str | None:
    """Return the fingerprint of the deterministic tier; None outside it."""
    if not design.config.model.deterministic:
        return None
    return system_fingerprint(design.folder, design.device, runner.settings)


def _steering(design: Design) -> Steering | None:
    vectors = design.steering
    if vectors is None:
        return None
    return Steering(vectors.shape.layers, vectors.one_vector, vectors.shape.digest)


def _activations(design: Design) -> ActivationLimits | None:
    served = design.activations
    if served is None:
        return None
    return ActivationLimits(served.row_bytes, design.config.model.max_activation_mib << 20)


def choose_budget(
    config: EngineConfig, step_sizes: list[int] | None, device: jax.Device
) -> TokenBudget | None:
    """Return the token budget for the inter-token latency target; None without a target.

    Args:
      step_sizes: possible token counts of a step with prompts; None: any.
    """
    target_ms = config.batch.itl_target_ms
    if target_ms is None:
        on_cpu = device.platform == "cpu"
        one_size = config.model.deterministic or not config.batch.chunked_prefill
        target_ms = CPU_ITL_TARGET_MS if on_cpu and not one_size else 0.0
    if not target_ms:
        return None
    log.info(
        "inter-token latency target of %g ms: while sequences decode, prefill steps are shortened "
        "to reach it (tokens per step: %s)",
        target_ms,
        "any number" if step_sizes is None else f"one of {', '.join(map(str, step_sizes))}",
    )
    return TokenBudget(target_ms / 1e3, step_sizes)


def _finish_later(
    runner: Runner, scheduler: Scheduler, compilations: SinceReady
) -> BackgroundCompile | None:
    """Raise the scheduler's limits as executables become active. None if all of them are."""
    background = runner.background

    def keep_to_limits() -> None:
        limits = runner.limits
        scheduler.config = dataclasses.replace(scheduler.config, **limits._asdict())
        if background.complete:
            compilations.ready()
            give_back_freed_memory()

    background.after_activation(keep_to_limits)
    keep_to_limits()
    return None if background.complete else background


def _lora_shape(config: EngineConfig, kernels: Kernels | None = None) -> LoraShape | None:
    """Return the adapters' shape; None without adapters, for which nothing is compiled then.

    Args:
      config: the configuration.
      kernels: the kernels of one device; None for several.
    """
    asked = config.model.max_loras
    places = len(config.model.lora) if asked is None else asked
    if not places:
        return None
    packed = kernels is not None and kernels.formats.layers is not None  # for the C++ kernels
    return LoraShape(places=places, rank=config.model.max_lora_rank, packed=packed)


def _check_lora(shape: LoraShape | None, record: Record | None) -> None:
    """Reject adapters for a converted folder whose layout does not support them."""
    if shape is not None and record is not None and record.packed:
        raise ConfigError(
            f"{record.folder} was converted with gate and up projections packed together, which "
            "LoRA adapters do not support: serve the original model"
        )


def _check_adapters(config: EngineConfig, model: Model, shape: LoraShape) -> None:
    for option in config.model.lora:
        try:
            check_adapter(Path(split_lora(option)[1]), model, shape)
        except ModelError as error:
            raise type(error)(f"--lora {option}: {error}") from error


def _read_steering(config: EngineConfig, spec: ModelSpec) -> SteeringVectors | None:
    """Return the vectors of `--steering-vectors`; None without them."""
    options = [split_steering(option) for option in config.model.steering_vectors]
    if not options:
        return None
    try:
        return read_steering([(name, Path(file)) for name, file in options], spec)
    except ModelError as error:
        raise type(error)(f"--steering-vectors: {error}") from error


def _served_activations(
    config: EngineConfig, spec: ModelSpec, formats: WeightFormats, shards: int
) -> ServedActivations | None:
    """Return the activations of `--activations`; None without them."""
    patterns = config.model.activations
    if not patterns:
        return None
    model = build_model(spec, config.model.dtype, formats, 1)
    kv = kv_shape(
        spec, num_blocks=1, block_size=1, dtype=model.dtype, platform="cpu", num_slots=1
    ).layers
    try:
        return served_activations(model, kv, patterns, shards)
    except ValueError as error:
        raise ConfigError(f"--activations: {error}") from error


def _load_adapters(design: Design, shape: LoraShape, runner: Runner) -> Adapters:
    """Load the adapters of `--lora`. No step is running yet."""

    def install(ref: LoraRef, path: str, run: Run) -> LoadedAdapter:
        adapter = read_adapter(Path(path), design.model, shape)
        run(lambda: runner.set_adapter(ref.place, adapter.arrays))
        return LoadedAdapter(ref=ref, path=path, digest=adapter.digest, rank=adapter.rank)

    adapters = Adapters(shape.places, install)
    for option in design.config.model.lora:
        name, folder = split_lora(option)
        try:
            adapters.load(name, folder)
        except RequestError as error:
            raise ModelError(f"--lora {option}: {error}") from error
    return adapters


def _make_draft_probs(
    config: EngineConfig, draft: Draft | None, device: jax.Device, mesh: TensorMesh | None
) -> DraftProbs | None:
    """Return the buffer for a draft model's distributions; None if no step needs them."""
    if draft is None or config.speculation.draft_verification == "coupled":
        return None
    return DraftProbs(
        num_slots=config.batch.max_num_seqs,
        max_drafts=config.speculation.max_draft_tokens,
        vocab_size=draft.model.spec.vocab_size,
        device=device if mesh is None else mesh.whole,
    )


def _make_runner(design: Design) -> Runner:
    """Return a runner whose executables have begun to compile."""
    options = runner_options(design)
    if design.select is not None:
        shapes = design.select(options.shapes)
        first = first_shapes(shapes, design.device.platform)
        options = dataclasses.replace(
            options, shapes=shapes, first=None if options.stages else first
        )
    runner = Runner(design.model, options)
    runner.compile()
    return runner


def runner_options(design: Design) -> RunnerOptions:
    config, sizes, speculation = design.config, design.sizes, design.config.speculation
    shapes = step_shapes(
        max_num_seqs=config.batch.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_rows=max_rows(config.batch.max_num_seqs),
        block_size=sizes.kv.block_size,
        max_drafts=max_drafts(config),
        deterministic=config.model.deterministic,
        platform=design.device.platform,
    )
    return RunnerOptions(
        shapes=shapes,
        # The stages have several executables for each shape, which are activated together.
        first=None if design.stages else first_shapes(shapes, design.device.platform),
        kv_shape=sizes.kv,
        num_slots=config.batch.max_num_seqs,
        max_blocks=sizes.blocks_per_sequence,
        device=design.device,
        implementation=design.kernels.attention,
        sampler=design.kernels.sampler,
        verification=speculation.draft_verification,
        draft_probs=design.draft_probs,
        deterministic=config.model.deterministic,
        command_buffers=config.parallel.command_buffers,
        lora=design.lora,
        steering=None if design.steering is None else design.steering.shape,
        activations=() if design.activations is None else design.activations.names,
        host_copies=bool(sizes.host_blocks),
        memory_limit=design.memory_limit - sizes.draft_bytes - sizes.staging_bytes,
        mesh=design.mesh,
        store=design.bundle or design.saved,
        stages=design.stages,
    )


def _make_draft_model(design: Design, draft: Draft, runner: Runner) -> DraftModel:
    """Return a draft model whose executables compile with the runner's."""
    options = draft_options(design, draft, runner.options, runner.resident_bytes)
    draft_model = DraftModel(draft.model, options, runner.background)
    draft_model.compile()
    return draft_model


def draft_options(
    design: Design, draft: Draft, of_runner: RunnerOptions, resident_bytes: int
) -> DraftModelOptions:
    """Return the options of a draft model next to a runner, which holds `resident_bytes`."""
    config, sizes = design.config, design.sizes
    assert sizes.draft_kv is not None
    shared_bytes = draft.model.param_bytes - draft.param_bytes
    shapes = draft_shapes(
        max_num_seqs=config.batch.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_rows=max_rows(config.batch.max_num_seqs),
        max_blocks=sizes.blocks_per_sequence,
        deterministic=config.model.deterministic,
        proposes=design.draft_probs is not None,
        platform=design.device.platform,
    )
    return DraftModelOptions(
        shapes=shapes,
        kv_shape=sizes.draft_kv,
        max_draft_tokens=config.speculation.max_draft_tokens,
        device=design.device,
        implementation=draft.implementation,
        sampler=design.kernels.sampler,
        draft_probs=design.draft_probs,
        uniform=config.model.deterministic,
        compiler_options=of_runner.compiler_options,
        memory_limit=design.memory_limit - resident_bytes + shared_bytes,
        mesh=design.mesh,
        store=design.bundle or design.saved,
    )


def choose_device(config: EngineConfig) -> jax.Device:
    """Return the device that `--backend` and `--device` select.

    Raises:
      ConfigError: if it does not exist.
    """
    backend, index = config.parallel.backend, config.parallel.device
    reserve_device_memory(config.cache.memory_fraction)
    reserve_pinned_memory(config.cache.host_kv_gib)
    try:
        devices = jax.local_devices(backend=None if backend == "auto" else backend)
    except RuntimeError as error:
        raise ConfigError(
            f"--backend {backend}: JAX finds no such device here"
            + (" (CUDA needs this project's extra cuda13)" if backend == "cuda" else "")
        ) from error
    if not 0 <= index < len(devices):
        raise ConfigError(f"--device {index}: there are {len(devices)} devices (0 is the first)")
    return devices[index]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The formats of matrices, and the implementations of attention and sampling."""

    formats: WeightFormats = WeightFormats()
    attention: Implementation = "auto"
    sampler: Sampler = "xla"


def read_converted(config: EngineConfig, folder: Path) -> Record | None:
    """Return the record of a converted folder; None for any other.

    Raises:
      CheckpointError: if it is corrupt, or does not match `--dtype` and `--quantization`.
    """
    record = read_record(folder)
    if record is not None:
        wanted = config.model
        record.check_options(dtype=wanted.dtype, quantization=wanted.quantization)
    return record


def read_model_spec(config: EngineConfig, folder: Path) -> ModelSpec:
    """Return the spec. If a GGUF file's matrices must be decoded, it has no blocks.

    `--quantization` then rounds the decoded values.

    Raises:
      ModelError: as `read_spec`.
      CheckpointError: if a converted folder has them in blocks, which cannot be decoded.
    """
    spec, wanted = read_spec(folder), config.model
    if spec.ggml_types is None or (
        wanted.gguf_weights != "decoded" and wanted.quantization == "none"
    ):
        return spec
    if not is_gguf(folder):
        option = "--gguf-weights decoded"
        if wanted.quantization != "none":
            option = f"--quantization {wanted.quantization}"
        raise CheckpointError(
            f"{option}: {folder} was converted with its matrices in GGUF blocks: omit the option, "
            "or convert the original model again with the option"
        )
    return decoded(spec)


def may_map(config: EngineConfig, device: jax.Device) -> bool:
    """Return True if the device may use the files of a converted folder by memory mapping."""
    return config.model.mmap and device.platform == "cpu"


def choose_kernels(
    config: EngineConfig, spec: ModelSpec, device: jax.Device, record: Record | None = None
) -> Kernels:
    """Return the C++ kernels if they can be used, and plain XLA otherwise.

    The C++ sampler does not depend on the formats of weights, so every model on a CPU uses it.

    Args:
      record: the record of a converted folder, whose matrices keep their formats.

    Raises:
      ConfigError: if weights are quantized or packed but no kernel supports them.
    """
    quantization = config.model.quantization if record is None else record.quantization
    if quantization != "none" and spec.quantization is not None:
        raise ConfigError(
            f"--quantization {quantization}: the checkpoint is already quantized "
            f"({spec.quantization.method}, by {spec.quantization.where}): omit the flag"
        )
    dtype = resolve_dtype(spec, config.model.dtype)
    packed: Format = quantization if quantization in ("int8", "int4") else "bf16"
    reason = _no_cpu_kernels(config, device)
    sampler: Sampler = "cpu" if reason is None else "xla"
    if reason is None and dtype != "bfloat16":
        reason = f"the CPU kernels require bfloat16, not {dtype}: set --dtype bfloat16"
    elif reason is None and record is not None and not record.packed:
        reason = (
            f"{record.folder} is not packed for the CPU kernels. To use them, convert the original "
            "model on this machine"
        )
        log.warning("using plain XLA: %s", reason)
    if reason is None:
        # int4 is too coarse for the vocabulary. A plain embedding has the fastest row lookup.
        formats = WeightFormats(
            layers=packed,
            head="int8" if packed == "int4" else packed,
            embedding=None if packed == "bf16" else "int8",
            rounded="fp8" if quantization == "fp8" else None,
            ggml_activations="int8" if config.model.gguf_weights == "packed" else None,
        )
        if record is not None:
            formats = dataclasses.replace(formats, **dict(record.formats))
        cached = element_dtype(config.cache.kv_dtype, dtype)
        layers = map(spec.of_layer, range(spec.num_hidden_layers))
        reasons = (unsupported(layer.head_dim, cached, device.platform) for layer in layers)
        no_attention = next((reason for reason in reasons if reason is not None), None)
        if no_attention is not None:
            log.warning("attention uses plain XLA, not the CPU kernels: %s", no_attention)
        return Kernels(formats=formats, attention="xla" if no_attention else "cpu", sampler=sampler)
    if record is not None and record.packed:
        raise ConfigError(
            f"{record.folder} was converted for the CPU kernels, which cannot be used: "
            f"{reason}. Convert the original model here, or with --kernels xla for all machines"
        )
    formats = WeightFormats(fused=fused_values(device))
    if quantization != "none":
        log.info("--quantization %s uses plain XLA: %s", quantization, reason)
        formats = dataclasses.replace(formats, rounded=quantization)
    # `auto` follows JAX's first device, which may be a GPU although a CPU was chosen.
    attention: Implementation = "xla" if device.platform == "cpu" else "auto"
    return Kernels(formats=formats, attention=attention, sampler=sampler)


def _no_cpu_kernels(config: EngineConfig, device: jax.Device) -> str | None:
    """Load the C++ kernels. Return None, or the reason if they are not available.

    Raises:
      ConfigError: if the requested instruction set cannot be used.
    """
    if config.model.kernels == "xla":
        return "--kernels xla is set"
    if device.platform != "cpu":
        return f"the CPU kernels do not run on {device.platform}"
    isa = None if config.model.kernels == "auto" else config.model.kernels
    try:
        available = cpu.available(isa, kernels_bar)
    except cpu.BuildError as error:
        raise ConfigError(f"--kernels {isa}: {error}") from error
    return None if available else "the CPU kernels could not be built (see the log)"


def _choose_draft(
    config: EngineConfig, target: Model, kernels: Kernels, device: jax.Device
) -> Draft | None:
    """Return the model that `--draft-model` names; None without one.

    Raises:
      ModelError: if it cannot be served.
      ConfigError: if it does not fit the model.
    """
    name, layers = config.speculation.draft_model, config.speculation.draft_layers
    if name is None:
        return None
    if name == SELF:
        most = target.spec.num_hidden_layers
        if layers is None or layers > most:
            raise ConfigError(f"--draft-layers must be from 1 to the model's {most}, not {layers}")
        spec = dataclasses.replace(target.spec, num_hidden_layers=layers)
        _check_draft_cache(name, spec)
        formats = dataclasses.replace(kernels.formats, lora=_lora_shape(config) is not None)
        model = build_model(spec, config.model.dtype, formats, target.shards)
        return Draft(model=model, folder=None, implementation=kernels.attention)
    folder = resolve(name)
    spec = read_model_spec(config, folder)
    if spec.vocab_size != target.spec.vocab_size:
        raise ConfigError(
            f"--draft-model {name} has a vocabulary of {spec.vocab_size} tokens, but "
            f"{config.model.model} has {target.spec.vocab_size}: both sizes must be the same"
        )
    _check_draft_cache(name, spec)
    record = read_converted(config, folder)
    if record is not None and record.shards > 1:
        raise ConfigError(
            f"--draft-model {name} was converted for {record.shards} devices, but a separate draft "
            "model is replicated on each: convert the original model without --tensor-parallel"
        )
    own = choose_kernels(config, spec, device, record)
    model = build_model(spec, config.model.dtype, own.formats)
    check_weights(model, folder)
    return Draft(model=model, folder=folder, implementation=own.attention)


def _check_draft_cache(name: str, spec: ModelSpec) -> None:
    """Reject a draft model whose layers have state: rejected drafts could not be undone."""
    if keeps_state(spec):
        raise ConfigError(
            f"--draft-model {name} keeps state per sequence, which is not supported for draft "
            "models: use a model with attention in every layer, or --speculation ngram"
        )


def use_compilation_cache(config: EngineConfig) -> None:
    """Turn JAX's persistent compilation cache on or off, for the whole process.

    Only the user may write to its folder, because JAX runs the executables in it. This also
    applies to a folder of JAX's own setting, unless it is a URL. A bundle is no cache: with it,
    the default folder is used.

    Raises:
      ConfigError: if `--compile-cache` or JAX's setting names a folder that cannot be used, or that
        others can write to.
    """
    parallel = config.parallel
    named, from_jax = parallel.compile_cache_dir, jax.config.jax_compilation_cache_dir
    if bundle_folder(config) is not None:
        named = None
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
            log.warning("no compilation cache, every start recompiles: %s: %s", folder, fault)
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


def _eos_token_ids(spec: ModelSpec, tokenizer: Tokenizer | None) -> frozenset[int]:
    if len(spec.eos_token_ids) > MAX_END_TOKENS:
        raise UnsupportedModelError(
            f"eos_token_id: {len(spec.eos_token_ids)} ids; at most {MAX_END_TOKENS} are supported"
        )
    if spec.eos_token_ids:
        return frozenset(spec.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return frozenset((tokenizer.eos_token_id,))
    return frozenset()
