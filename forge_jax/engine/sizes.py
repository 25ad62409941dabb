"""Sizes that the configuration leaves to the model and machine: context, blocks, tokens."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax

from forge_jax.config import EngineConfig
from forge_jax.engine.core import max_rows
from forge_jax.errors import ConfigError
from forge_jax.models.kv import element_dtype
from forge_jax.models.lora import LoraShape
from forge_jax.models.steering import SteeringShape
from forge_jax.step.host_blocks import STAGED_BLOCKS
from forge_jax.step.kv_cache import (
    CPU_SEQUENCE_TOKENS,
    GIB,
    KVShape,
    coarse,
    cpu_kv_bytes,
    fit_num_blocks,
    kv_shape,
)
from forge_jax.step.mesh import cache_layouts
from forge_jax.telemetry.memory import available_host_bytes, device_bytes, share_of_device
from forge_jax.weights.partition import shard_spec

if TYPE_CHECKING:
    from forge_jax.engine.draft import Draft
    from forge_jax.models.activations import ServedActivations
    from forge_jax.models.decoder import Model
    from forge_jax.models.spec import ModelSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Residents:
    """The owners of a device's memory: the model, a draft model, adapters, steering vectors."""

    config: EngineConfig
    model: Model
    device: jax.Device
    draft: Draft | None = None
    lora: LoraShape | None = None
    steering: SteeringShape | None = None
    activations: ServedActivations | None = None

    @property
    def on_cpu(self) -> bool:
        return self.device.platform == "cpu"

    @property
    def models(self) -> list[Model]:
        return [self.model] if self.draft is None else [self.model, self.draft.model]

    @property
    def chunks(self) -> set[int]:
        """The sizes of the chunks of positions that layers of the models attend within."""
        return {chunk for model in self.models for chunk in model.spec.chunks if chunk is not None}

    def kv_shape(self, model: Model, num_blocks: int, block_size: int) -> KVShape:
        """Return the KV cache shape of one of the models, per shard."""
        # A draft model's cache is small and uses the model's own dtype.
        kv_dtype = self.config.cache.kv_dtype if model is self.model else "auto"
        drafts = max_drafts(self.config)
        whole = kv_shape(
            shard_spec(model.spec, model.shards),
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=element_dtype(kv_dtype, model.dtype),
            platform=self.device.platform,
            num_slots=self.config.batch.max_num_seqs,
            num_pending=drafts + 1 if drafts else 0,
        )
        return whole if model.stage is None else replace(whole, layouts=cache_layouts(model))

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block in the KV caches of all models."""
        return sum(self.kv_shape(each, 1, block_size).block_bytes for each in self.models)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of `--max-num-seqs` sequences, per shard."""
        return sum(self.kv_shape(each, 1, 1).state_bytes for each in self.models)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, adapters and steering vectors, per shard."""
        total = self.model.param_bytes + (0 if self.draft is None else self.draft.param_bytes)
        if self.lora is not None:
            of_shard = shard_spec(self.model.spec, self.model.shards)
            total += self.lora.num_bytes(of_shard, self.model.dtype)
        if self.steering is not None:
            total += self.steering.num_bytes
        return total

    def activation_bytes(self, max_tokens: int) -> int:
        """Return an upper bound on a step's memory, excluding weights and the KV cache."""
        num_rows = max_rows(self.config.batch.max_num_seqs)
        specs = [shard_spec(each.spec, each.shards) for each in self.models]
        bound = max(activation_bytes(spec, max_tokens, num_rows) for spec in specs)
        # A layer gathers the states of the step's sequences: again four copies.
        bound += 4 * max(self.kv_shape(each, 1, 1).layer_state_bytes for each in self.models)
        if self.activations is not None:  # activations of this step and of the previous one
            bound += 2 * max_tokens * self.activations.token_bytes
        if self.lora is None:
            return bound
        # Intermediate values between the two matrices of each adapter, and their sum.
        width = self.lora.places * self.lora.rank + 2 * specs[0].intermediate_size
        return bound + 4 * max_tokens * width

    def kv_bytes(self, max_tokens: int, wanted: int) -> int:
        """Return the bytes available for blocks, after weights, state and a bound on activations.

        Args:
          wanted: target size in bytes on a CPU.

        Raises:
          ConfigError: if the weights, state and activations leave no memory.
        """
        memory = device_bytes(self.device)
        shards, fixed = self.model.shards, self.weight_bytes + self.state_bytes
        if memory is None:
            available = available_host_bytes() - shards * fixed
            self.check_memory(available)
            return cpu_kv_bytes(shards * wanted, available) // shards
        limit, in_use = memory
        share = share_of_device(limit, self.config.cache.memory_fraction)
        available = share - in_use - fixed - self.activation_bytes(max_tokens)
        self.check_memory(available)
        return available

    def check_memory(self, available: int) -> None:
        """Raise ConfigError if `available`, the bytes left for blocks, is negative."""
        if available >= 0:
            return
        if -available <= self.state_bytes:
            raise ConfigError(
                f"the state of {self.config.batch.max_num_seqs} sequences needs "
                f"{self.state_bytes / GIB:.2f} GiB, which is {-available / GIB:.2f} more than the "
                "device has: lower --max-num-seqs"
            )
        raise ConfigError(
            f"the weights ({self.weight_bytes / GIB:.2f} GiB) and activations need "
            f"{-available / GIB:.2f} GiB more than the device has: serve a smaller or quantized "
            "model, or set --tensor-parallel"
        )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    max_model_len: int
    max_num_batched_tokens: int
    kv: KVShape
    draft_kv: KVShape | None  # the draft model's cache, with as many blocks
    draft_bytes: int  # the draft model's own weights, and `draft_kv`
    host_blocks: int = 0  # copies of evicted blocks in host memory

    @property
    def staging_bytes(self) -> int:
        """Bytes of a device for blocks on their way to or from the host."""
        return STAGED_BLOCKS * self.kv.block_bytes if self.host_blocks else 0

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.kv.block_size)

    @classmethod
    def choose(cls, residents: Residents) -> Sizes:
        """Choose the sizes that fit into the device's memory.

        Raises:
          ConfigError: if configured sizes do not fit the model or the memory.
        """
        config, spec = residents.config, residents.model.spec
        asked = config.model.max_model_len
        if asked is not None and asked > spec.max_context:
            raise ConfigError(
                f"--max-model-len {asked} is more than the model's own limit of {spec.max_context}"
            )
        context = asked or spec.max_context
        max_tokens = config.batch.max_num_batched_tokens or _step_tokens(config, residents.on_cpu)
        usual = math.gcd(16 if residents.on_cpu else 64, *residents.chunks)
        block_size = config.cache.block_size or usual
        if config.cache.kv_cache == "contiguous":
            block_size = -(-context // 8) * 8
        if config.cache.num_blocks is None:
            num_blocks, context = _fitting_blocks(residents, block_size, context, max_tokens)
        else:
            num_blocks = config.cache.num_blocks
            context = _fit_context(asked, context, num_blocks * block_size)
            _check_blocks(residents, num_blocks, block_size)
        _check_chunks(residents, block_size, context)
        kv = residents.kv_shape(residents.model, num_blocks, block_size)
        draft, draft_kv, draft_bytes = residents.draft, None, 0
        if draft is not None:
            draft_kv = residents.kv_shape(draft.model, num_blocks, block_size)
            draft_bytes = draft.param_bytes + draft_kv.total_bytes
        return cls(
            max_model_len=context,
            max_num_batched_tokens=max_tokens,
            kv=kv,
            host_blocks=_host_blocks(residents, kv),
            draft_kv=draft_kv,
            draft_bytes=draft_bytes,
        )

    def smaller(self, config: EngineConfig, excess: int) -> Sizes:
        """Return sizes with a KV cache that is smaller by at least `excess` bytes.

        Raises:
          ConfigError: if no cache fits, or `--num-blocks` was set.
        """
        block_bytes = self.kv.block_bytes + self._draft_block_bytes
        blocks = coarse((self.kv.num_blocks * block_bytes - excess) // block_bytes)
        what = f"the steps need {excess / GIB:.2f} GiB more than the device has"
        if config.cache.num_blocks is not None:
            raise ConfigError(
                f"--num-blocks {config.cache.num_blocks} is too large, because {what}: at most "
                f"{max(blocks, 0)} blocks fit"
            )
        least = 1 if config.model.max_model_len is None else self.blocks_per_sequence
        if blocks < least or config.cache.kv_cache == "contiguous":
            raise ConfigError(
                f"{what}: lower --max-model-len, --max-num-seqs or --max-num-batched-tokens"
            )
        log.warning("%s: the KV cache is reduced to %d blocks", what, blocks)
        return self.with_blocks(config, blocks)

    def with_blocks(self, config: EngineConfig, blocks: int) -> Sizes:
        """Return sizes with a KV cache of so many blocks, and a context that fits into it."""
        room = blocks * self.kv.block_size
        return replace(
            self,
            max_model_len=_fit_context(config.model.max_model_len, self.max_model_len, room),
            kv=replace(self.kv, num_blocks=blocks),
            draft_kv=self.draft_kv and replace(self.draft_kv, num_blocks=blocks),
            draft_bytes=self.draft_bytes - (self.kv.num_blocks - blocks) * self._draft_block_bytes,
        )

    @property
    def _draft_block_bytes(self) -> int:
        return 0 if self.draft_kv is None else self.draft_kv.block_bytes


def _check_blocks(residents: Residents, num_blocks: int, block_size: int) -> None:
    block_bytes = residents.block_bytes(block_size)
    free = _memory_bytes(residents.device, residents.model.shards) - residents.state_bytes
    residents.check_memory(free)
    needed = num_blocks * block_bytes
    if needed > free:
        raise ConfigError(
            f"--num-blocks {num_blocks} needs {needed / GIB:,.1f} GiB, but the device has "
            f"{free / GIB:,.1f}: at most {max(free // block_bytes, 0)} blocks fit"
        )


def _check_chunks(residents: Residents, block_size: int, context: int) -> None:
    """Raise ConfigError if a chunk of attention would start in the middle of a block."""
    padded = -(-context // block_size) * block_size
    for chunk in residents.chunks:
        if chunk >= padded or chunk % block_size == 0:
            continue
        name = f"attention_chunk_size ({chunk})"
        if residents.config.cache.kv_cache == "contiguous":
            raise ConfigError(
                f"--kv-cache contiguous does not support sequences longer than {name} of this "
                f"model: omit the option, or set --max-model-len to at most {chunk}"
            )
        raise ConfigError(
            f"--block-size {block_size} does not divide {name} of this model: use "
            f"--block-size {math.gcd(chunk, 64)}"
        )


def max_drafts(config: EngineConfig) -> int:
    """Return the largest number of drafts per sequence and step; 0 without speculation."""
    speculation = config.speculation
    return 0 if speculation.speculation == "off" else speculation.max_draft_tokens


def _fitting_blocks(
    residents: Residents, block_size: int, context: int, max_tokens: int
) -> tuple[int, int]:
    """Return the number of blocks that fit, and the context, reduced to fit unless it is set."""
    config = residents.config
    block_bytes, max_num_seqs = residents.block_bytes(block_size), config.batch.max_num_seqs
    wanted = max_num_seqs * CPU_SEQUENCE_TOKENS // block_size
    free = residents.kv_bytes(max_tokens, wanted * block_bytes)
    if config.cache.host_kv_gib:
        free -= STAGED_BLOCKS * block_bytes
        residents.check_memory(free)
    room = coarse(free // block_bytes) * block_size
    if config.model.max_model_len is None and config.cache.kv_cache == "paged" and room:
        context = _fit_context(None, context, room)
    num_blocks = fit_num_blocks(
        block_bytes=block_bytes,
        free_bytes=free,
        blocks_per_sequence=-(-context // block_size),
        max_num_seqs=max_num_seqs,
    )
    return num_blocks, context


def _host_blocks(residents: Residents, kv: KVShape) -> int:
    """Return how many blocks `--host-kv-gib` holds.

    Raises:
      ConfigError: if it holds none, or the host has less memory.
    """
    gib, shards = residents.config.cache.host_kv_gib, residents.model.shards
    if not gib:
        return 0
    block_bytes = shards * kv.block_bytes
    num_blocks = int(gib * GIB) // block_bytes
    if not num_blocks:
        raise ConfigError(
            f"--host-kv-gib {gib:g} is less than one KV cache block ({block_bytes / GIB:.3g} GiB): "
            "raise it, or set it to 0"
        )
    available = available_host_bytes()
    if residents.on_cpu:  # its memory is the host's
        available -= shards * (residents.weight_bytes + kv.total_bytes)
    if gib * GIB > available:
        raise ConfigError(
            f"--host-kv-gib {gib:g} is more than the available host memory of "
            f"{max(available, 0) / GIB:.1f} GiB: lower it"
        )
    return num_blocks


def log_if_small(config: EngineConfig, sizes: Sizes) -> None:
    """Log if sequences will wait for blocks long before `--max-num-seqs` of them run."""
    seqs = config.batch.max_num_seqs
    room = sizes.kv.num_blocks * sizes.kv.block_size
    if config.cache.num_blocks is None and room < seqs * min(512, sizes.max_model_len):
        log.info(
            "the KV cache holds %d tokens, or %d for each of %d sequences. If sequences are "
            "longer, fewer run at the same time. To fit more tokens, raise "
            "--num-blocks or set --kv-dtype int8",
            room,
            room // seqs,
            seqs,
        )


def _step_tokens(config: EngineConfig, on_cpu: bool) -> int:
    """Return the default tokens per step. The deterministic tier also computes unused rows."""
    if config.model.deterministic:
        return 64 if on_cpu else 256
    return 512 if on_cpu else 2048


def _fit_context(asked: int | None, max_model_len: int, room: int) -> int:
    """Return the context, reduced to the KV cache's capacity unless it was set."""
    if room >= max_model_len:
        return max_model_len
    if asked is not None:
        raise ConfigError(
            f"--max-model-len {asked} does not fit into the KV cache, which has room for {room} "
            "tokens: raise --num-blocks or lower --max-model-len"
        )
    log.warning(
        "the KV cache holds %d tokens: the context length is reduced to that from %d. To enlarge "
        "the cache, raise --num-blocks",
        room,
        max_model_len,
    )
    return room


def _memory_bytes(device: jax.Device, shards: int) -> int:
    """Return the bytes of the device that can be used at all."""
    memory = device_bytes(device)
    return _host_bytes(shards) if memory is None else memory[0]


def free_bytes(device: jax.Device, shards: int) -> int:
    """Return the bytes of the device that are not in use."""
    memory = device_bytes(device)
    return _host_bytes(shards) if memory is None else memory[0] - memory[1]


def _host_bytes(shards: int) -> int:
    """Return the memory of one shard whose device is part of the host."""
    return available_host_bytes() // shards


def activation_bytes(spec: ModelSpec, max_tokens: int, num_rows: int) -> int:
    """Return a bound on a step's memory without weights and KV: float32, four live copies."""
    layers = dict.fromkeys(spec.of_layer(layer) for layer in range(spec.num_hidden_layers))
    width = max(
        spec.hidden_size,
        *(max(2 * layer.intermediate_size, layer.attention_width) for layer in layers),
    )
    bound = 4 * 4 * (max_tokens * (width + 2 * spec.hidden_size) + num_rows * spec.vocab_size)
    if spec.experts is None:
        return bound
    # On a GPU, each expert computes each token: gates and ups, their products, and outputs.
    of_expert = 3 * spec.experts.intermediate_size + spec.hidden_size
    return bound + 4 * max_tokens * spec.experts.own * of_expert
