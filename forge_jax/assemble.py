"""Puts an engine together from its configuration: the one place that knows all the parts.

Order: files are checked and executables start to compile from shapes alone; the weights are read
meanwhile; then the KV cache is made and every executable runs once.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from forge_jax.cache.kv import GIB, KVShape, coarse, cpu_kv_bytes, fit_num_blocks
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.load import check_weights, load_weights
from forge_jax.config import EngineConfig
from forge_jax.core import EngineCore, EngineParts, make_scheduler, max_rows
from forge_jax.errors import ConfigError, UnsupportedModelError
from forge_jax.fingerprint import system_fingerprint
from forge_jax.models.decoder import WeightForms
from forge_jax.models.registry import build_model, read_spec
from forge_jax.observe import compilations
from forge_jax.observe.memory import available_host_bytes, device_bytes
from forge_jax.step.runner import Runner, step_shapes
from forge_jax.step.slots import MAX_END_TOKENS
from forge_jax.text import ChatTemplate, Tokenizer
from forge_kernels import cpu
from forge_kernels.attention import Implementation, kv_storage_dtype
from forge_kernels.attention.cpu_ffi import unsupported
from forge_kernels.linear import Format

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.models.spec import ModelSpec

log = logging.getLogger(__name__)


class _Phases:
    """Times the phases of the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def assemble(config: EngineConfig) -> EngineParts:
    """Resolves, checks, compiles and loads; blocks until the engine can run.

    Raises:
      ModelError: the model cannot be served.
      ConfigError: the configuration does not fit the model or the machine.
    """
    phase = _Phases()
    with phase("config"):
        folder = resolve(config.model.model, config.model.revision)
        spec = read_spec(folder)
        device = choose_device(config)
        kernels = _choose_kernels(config, build_model(spec, config.model.dtype), device)
        model = build_model(spec, config.model.dtype, kernels.forms)
        check_weights(model, folder)  # before anything that takes long
        tokenizer = Tokenizer.from_folder(folder)
        template = _chat_template(folder, tokenizer, config)
        sizes = _Sizes.choose(config, model, device)
    use_compilation_cache()
    compilations.total()
    deterministic = config.model.deterministic
    runner = Runner(
        model,
        shapes=step_shapes(
            max_num_seqs=config.batch.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_rows=max_rows(config.batch.max_num_seqs),
            block_size=sizes.kv.block_size,
            deterministic=deterministic,
        ),
        kv_shape=sizes.kv,
        num_slots=config.batch.max_num_seqs,
        max_blocks=sizes.blocks_per_sequence,
        device=device,
        implementation=kernels.attention,
        deterministic=deterministic,
    )
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="forge-compile") as pool:
        runner.compile(pool)
        with phase("weights"):
            leaves = load_weights(model, folder, device=device)
        with phase("compile"):
            runner.start(leaves)
    log.info(
        "%s: %.2f GB of weights, KV cache of %d blocks x %d tokens (%.2f GiB), context %d, on %s",
        config.model.model,
        model.param_bytes / 1e9,
        sizes.kv.num_blocks,
        sizes.kv.block_size,
        sizes.kv.total_bytes / GIB,
        sizes.max_model_len,
        device,
    )
    seconds = ", ".join(f"{name} {s:.1f}" for name, s in phase.seconds.items())
    log.info("ready; seconds by phase: %s", seconds)
    rng = random.Random(config.model.seed)
    scheduler = make_scheduler(
        config,
        num_blocks=sizes.kv.num_blocks,
        block_size=sizes.kv.block_size,
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        eos_token_ids=_eos_token_ids(spec, tokenizer),
        rng=rng,
    )
    core = EngineCore(
        scheduler=scheduler,
        device=runner,
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        one_step_ahead=config.batch.one_step_ahead,
    )
    fingerprint = None
    if deterministic:
        fingerprint = system_fingerprint(folder, device, runner.settings)
    ready = compilations.total()
    return EngineParts(
        name=config.model.model,
        core=core,
        max_model_len=sizes.max_model_len,
        tokenizer=tokenizer,
        chat_template=template,
        rng=rng,
        guard=lambda: jax.no_tracing(True),
        compilations=lambda: compilations.total() - ready,
        startup_s=phase.seconds,
        system_fingerprint=fingerprint,
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
class _Kernels:
    """How matrices are kept, and what computes attention."""

    forms: WeightForms = WeightForms()
    attention: Implementation = "auto"


def _choose_kernels(config: EngineConfig, plain: Model, device: jax.Device) -> _Kernels:
    """The C++ kernels where they can be used, the plain XLA forms elsewhere.

    Raises:
      ConfigError: quantised weights are asked for where there are no kernels for them.
    """
    quantization = config.model.quantization
    packed: Format = "bf16" if quantization == "none" else quantization
    if config.model.kernels == "xla":
        reason = "--kernels xla is set"
    elif device.platform != "cpu":
        reason = f"it is for CPUs, not {device.platform}"
    elif plain.dtype != jnp.bfloat16:
        reason = f"it is for bfloat16, not {plain.dtype}: set --dtype bfloat16"
    elif not cpu.available():
        reason = "the CPU kernels could not be built (see the log)"
    else:
        # int4 is too coarse for the vocabulary. A plain embedding is the fastest to take rows from.
        forms = WeightForms(
            layers=packed,
            head="int8" if packed == "int4" else packed,
            embedding=None if packed == "bf16" else "int8",
        )
        no_attention = unsupported(plain.spec.head_dim, plain.dtype, device.platform)
        if no_attention is not None:
            log.warning("attention without the CPU kernels: %s", no_attention)
        return _Kernels(forms=forms, attention="auto" if no_attention else "cpu")
    if quantization != "none":
        raise ConfigError(f"--quantization {quantization}: {reason}")
    return _Kernels()


def use_compilation_cache() -> None:
    """Turns JAX's persistent compilation cache on, in the user's cache folder unless JAX has one.

    Only the user may write there: an executable that is read from it is run.
    """
    if jax.config.jax_compilation_cache_dir is None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "forge-jax" / "xla"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            log.warning("no compilation cache, every start compiles anew: %s", error)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The sizes that the configuration leaves to the model and the machine."""

    max_model_len: int
    max_num_batched_tokens: int
    kv: KVShape

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.kv.block_size)

    @classmethod
    def choose(cls, config: EngineConfig, model: Model, device: jax.Device) -> _Sizes:
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

        def kv_shape(num_blocks: int, block_size: int) -> KVShape:
            return KVShape(
                num_layers=spec.num_hidden_layers,
                num_blocks=num_blocks,
                num_kv_heads=spec.num_key_value_heads,
                block_size=block_size,
                head_dim=spec.head_dim,
                storage=kv_storage_dtype(model.dtype, device.platform),
            )

        block_size = cache.block_size or (16 if on_cpu else 64)
        if cache.kv_cache == "contiguous":
            block_size = -(-max_model_len // 8) * 8
        if cache.num_blocks is not None:
            kv = kv_shape(cache.num_blocks, block_size)
            max_model_len = _fit_context(asked, max_model_len, cache.num_blocks * block_size)
            free = _memory_bytes(device)
            if kv.total_bytes > free:
                raise ConfigError(
                    f"--num-blocks {cache.num_blocks} needs {kv.total_bytes / GIB:,.1f} GiB, and "
                    f"the device has {free / GIB:,.1f}: at most {free // kv.block_bytes} blocks fit"
                )
        else:
            free = _free_bytes(config, model, device, max_tokens)
            block_bytes = kv_shape(1, block_size).block_bytes
            room = coarse(free // block_bytes) * block_size
            if asked is None and cache.kv_cache == "paged" and room:
                max_model_len = _fit_context(None, max_model_len, room)
            per_sequence = -(-max_model_len // block_size)
            num_blocks = fit_num_blocks(
                block_bytes=block_bytes,
                free_bytes=free,
                blocks_per_sequence=per_sequence,
                max_num_seqs=batch.max_num_seqs,
            )
            kv = kv_shape(num_blocks, block_size)
        return cls(
            max_model_len=max_model_len,
            max_num_batched_tokens=max_tokens,
            kv=kv,
        )


def _step_tokens(config: EngineConfig, on_cpu: bool) -> int:
    """Tokens of a step. In the deterministic tier each step costs as much as a full one."""
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


def _memory_bytes(device: jax.Device) -> int:
    """All that could be used on the device."""
    memory = device_bytes(device)
    return available_host_bytes() if memory is None else memory[0]


def _free_bytes(config: EngineConfig, model: Model, device: jax.Device, max_tokens: int) -> int:
    """Bytes for the KV cache, after weights and an analytic bound on activations."""
    memory = device_bytes(device)
    if memory is None:
        return cpu_kv_bytes(available_host_bytes() - model.param_bytes)
    limit, in_use = memory
    activations = activation_bytes(model.spec, max_tokens, max_rows(config.batch.max_num_seqs))
    return int(limit * config.cache.memory_fraction) - in_use - model.param_bytes - activations


def activation_bytes(spec: ModelSpec, max_tokens: int, num_rows: int) -> int:
    """An upper bound on what one step holds besides weights and KV: float32, four live copies."""
    width = max(
        2 * spec.intermediate_size,
        (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim,
        spec.hidden_size,
    )
    return 4 * 4 * (max_tokens * (width + 2 * spec.hidden_size) + num_rows * spec.vocab_size)


def _chat_template(
    folder: Path, tokenizer: Tokenizer | None, config: EngineConfig
) -> ChatTemplate | None:
    if tokenizer is None:
        if config.model.chat_template is not None:
            raise ConfigError("--chat-template needs a tokenizer, and the model folder has none")
        return None
    template = ChatTemplate.from_folder(folder, tokenizer, config.model.chat_template)
    return template if template.available else None


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
