"""`RunnerOptions`: the sizes and choices that determine a runner's executables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import jax

from forge_jax.config import Verification
from forge_jax.step.mesh import cache_layouts
from forge_jax.step.placement import Placement
from forge_jax.step.step import Sampler
from forge_kernels.attention import Implementation

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.models.lora import LoraShape
    from forge_jax.models.steering import SteeringShape
    from forge_jax.step.draft_probs import DraftProbs
    from forge_jax.step.executables import Store
    from forge_jax.step.inputs import StepShape
    from forge_jax.step.kv_cache import KVShape
    from forge_jax.step.mesh import TensorMesh

type CompilerOptions = dict[str, str | bool | int]

# https://openxla.org/xla/determinism: some operations have fast forms without a fixed order of
# summation. Autotuning selects kernels by measured time, so two starts may differ.
# Triton matrix products have no configuration that is chosen without measuring.
DETERMINISTIC_GPU_OPTIONS: CompilerOptions = {
    "xla_gpu_exclude_nondeterministic_ops": True,
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
}
# Values of quantized matrices are converted and scaled inside matrix products (`linear`).
GPU_OPTIONS: CompilerOptions = {
    "xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True,
}


# XLA's default, and collectives. Without them, each sum over devices ends a command buffer.
SHARED_COMMAND_BUFFERS = ",".join(
    (
        *("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION"),
        *("CONDITIONAL", "COLLECTIVES"),
    )
)


def compiler_options(
    platform: str,
    *,
    command_buffers: bool,
    deterministic: bool,
    shards: int = 1,
    stages: int = 0,
) -> CompilerOptions:
    """Return XLA's options for executables that `shards` devices run together.

    Args:
      platform: JAX's name of it.
      command_buffers: as in `RunnerOptions`.
      deterministic: as in `RunnerOptions`.
      shards: number of devices.
      stages: number of stages, each with its own executables; 0 without stages.
    """
    if platform == "cpu":
        return {}
    options = dict(GPU_OPTIONS)
    if not command_buffers:
        options["xla_gpu_enable_command_buffer"] = ""  # an empty list of operations to include
    elif shards > 1:
        options["xla_gpu_enable_command_buffer"] = SHARED_COMMAND_BUFFERS
    if deterministic:
        options |= DETERMINISTIC_GPU_OPTIONS
    if stages:  # otherwise each process waits for the others' results of the same executable
        options["xla_gpu_shard_autotuning"] = False
    return options


@dataclass(frozen=True)
class PipelineStage:
    """A stage of pipeline parallelism, and its devices."""

    model: Model
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """The sizes and choices that determine a runner's executables.

    Args:
      shapes: shapes of all executables, smallest first; the last takes any plan.
      first: shapes that `Runner.start` waits for; one of them takes prompts. Default: all.
      kv_shape: the cache's shape; that of one shard, if a mesh divides the model.
      max_blocks: the most blocks of one sequence.
      mesh: the devices that share the model, of which `device` is one. None: only `device`.
      implementation: the attention implementation.
      sampler: the sampling implementation.
      verification: how drafts are verified.
      draft_probs: for verification by rejection, the draft model's distributions. None: draft
        tokens come from text.
      deterministic: compute every row in the same way. If there is one shape, the logits of a token
        then do not depend on batch composition.
      command_buffers: allow XLA:GPU to use command buffers (CUDA graphs).
      lora: shape of the LoRA adapters. None: LoRA is off.
      steering: shape of the steering vectors. None: steering is off.
      activations: names of the activations that each step returns.
      host_copies: copy blocks of the KV cache to host memory and back.
      memory_limit: bytes of the device that all of this may take. None: no limit.
      store: holds executables that are loaded instead of compiled, if they have these shapes.
      stages: all stages of the model. `kv_shape`, `device` and `mesh` then belong to one stage of
        this process. Empty: the devices share all layers.
    """

    shapes: Sequence[StepShape]
    first: Sequence[StepShape] | None = None
    kv_shape: KVShape
    num_slots: int
    max_blocks: int
    device: jax.Device
    mesh: TensorMesh | None = None
    implementation: Implementation = "auto"
    sampler: Sampler = "xla"
    verification: Verification = "coupled"
    draft_probs: DraftProbs | None = None
    deterministic: bool = False
    command_buffers: bool = True
    lora: LoraShape | None = None
    steering: SteeringShape | None = None
    activations: tuple[str, ...] = ()
    host_copies: bool = False
    memory_limit: int | None = None
    store: Store | None = None
    stages: tuple[PipelineStage, ...] = ()

    def of_stage(self, stage: PipelineStage) -> RunnerOptions:
        """Return the options of one of the stages."""
        return replace(
            self,
            kv_shape=replace(self.kv_shape, layouts=cache_layouts(stage.model)),
            device=stage.placement.device,
            mesh=stage.placement.mesh,
            stages=(),
        )

    @property
    def first_shapes(self) -> list[StepShape]:
        return list(self.shapes if self.first is None else self.first)

    @property
    def late_shapes(self) -> list[StepShape]:
        return [shape for shape in self.shapes if shape not in self.first_shapes]

    @property
    def prompt_sizes(self) -> list[int]:
        """Token counts of the executables that take prompts and also compute unused rows."""
        return [shape.num_tokens for shape in self.shapes if shape.prompts]

    @cached_property
    def placement(self) -> Placement:
        return Placement(self.device, self.mesh)

    @property
    def compiler_options(self) -> CompilerOptions:
        return compiler_options(
            self.device.platform,
            command_buffers=self.command_buffers,
            deterministic=self.deterministic,
            shards=1 if self.mesh is None else self.mesh.shards,
            stages=len(self.stages),
        )
