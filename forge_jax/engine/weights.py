"""The weights of a running engine, for a trainer: read them, score with them, replace them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from forge_jax.checkpoint.load import load_floats, load_tensors, load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.engine.validation import new_version
from forge_jax.errors import ModelError
from forge_jax.models.registry import build_model
from forge_jax.scoring import ChunkedLogits, ScoreOptions
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.stored import FLOATS

if TYPE_CHECKING:
    from forge_jax.engine.core import EngineCore
    from forge_jax.engine.draft import Draft
    from forge_jax.engine.validation import InFlightRequests
    from forge_jax.models import Leaves, Model
    from forge_jax.models.spec import ExpertSpec, ModelSpec
    from forge_jax.speculate.draft_model import DraftModel
    from forge_jax.step.runner import Runner

# The leaves in the order of `Model.names`, arrays by name (the model's or the checkpoint's), or the
# path of a model folder or GGUF file.
NewWeights = Sequence[Any] | Mapping[str, Any] | str | Path


class EngineWeights:
    """The weights of one engine, and of its draft model if that is a part of the model."""

    def __init__(self, runner: Runner, draft: Draft | None, draft_model: DraftModel | None):
        self._runner = runner
        self._draft = draft
        self._draft_model = draft_model

    @property
    def model(self) -> Model:
        return self._runner.model

    @property
    def leaves(self) -> Leaves:
        """The current weights, in the order of `model.names`; of stages, one after another."""
        return self._runner.leaves

    def chunked_logits(self, max_len: int, place: int = 0) -> ChunkedLogits:
        """Return a source of logits with this engine's bits.

        Args:
          max_len: tokens of the longest sequence.
          place: the slot of a LoRA adapter; 0: none.

        Raises:
          ModelError: if the engine is not deterministic, or has stages.
          ValueError: if `max_len` exceeds the context length.
        """
        self._reject_stages("score texts")
        adapters = self._runner.adapters if place else ()
        options = self.score_options
        return ChunkedLogits(self.model, self.leaves, options, max_len, adapters, place)

    @property
    def score_options(self) -> ScoreOptions:
        """The options with which `score` returns the bits of this engine.

        Raises:
          ModelError: if the engine is not deterministic, or has stages.
        """
        self._reject_stages("score texts")
        return ScoreOptions.of_engine(self._runner.options)

    def prepare(self, weights: NewWeights) -> Leaves:
        """Return copies of new weights in the layout and placement of the current ones.

        Blocks until they are on the device. Thread-safe.

        Raises:
          ModelError: if a leaf or tensor is missing or unknown, or has the wrong shape or type. The
            message names it. Also if the weights do not fit into the memory of the device.
        """
        self._reject_stages("update weights")
        if isinstance(weights, str | Path):
            return self._fitting(lambda: self._loaded(Path(weights)))
        if not isinstance(weights, Mapping | Sequence):
            raise ModelError(
                "the new weights must be a sequence of arrays, a mapping of arrays by name, or the "
                f"path of a folder, not {type(weights).__name__}"
            )
        if isinstance(weights, Mapping):
            weights = {name: _array(name, array) for name, array in weights.items()}
            self._reject_floats(weights)
        return self._fitting(lambda: self._prepared(weights))

    def _reject_stages(self, purpose: str) -> None:
        if self._runner.options.stages:
            raise ModelError(
                f"an engine with pipeline_parallel cannot {purpose}: use tensor_parallel instead"
            )

    def _fitting(self, prepare: Callable[[], Leaves]) -> Leaves:
        try:
            return prepare()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            size = self.model.param_bytes / 2**30
            raise ModelError(
                f"the new weights need {size:.1f} GiB of free memory on each device: load the "
                "engine with a lower memory_fraction or num_blocks"
            ) from error

    def _prepared(self, weights: Sequence[Any] | Mapping[str, Any]) -> Leaves:
        if not isinstance(weights, Mapping):
            names = self.model.names
            if len(weights) != len(names):
                raise ModelError(
                    f"the new weights have {len(weights)} leaves, but the model has {len(names)}"
                )
            return self._copies(dict(zip(names, weights, strict=True)))
        given = set(weights)
        own, plain = set(self.model.names), self._plain_shapes
        if given == own and not self._differing(weights):
            return self._copies(weights)
        options = self._runner.options
        place: dict[str, Any] = {"device": options.device, "mesh": options.mesh}
        if not given & (own | set(plain)):
            self._reject_other_layout()
            self._reject_blocks("by checkpoint name")
            return load_tensors(self.model, _on_host(weights), **place)
        self._reject_blocks("as floats")
        _check_names(given, set(plain))
        for name, shape in plain.items():
            if np.shape(weights[name]) != shape:
                raise ModelError(
                    f"leaf {name} of the new weights has shape {np.shape(weights[name])}, "
                    f"but the model's has {shape}"
                )
        return load_floats(self.model, _on_host(weights), **place)

    def _loaded(self, folder: Path) -> Leaves:
        """Read the weights of a folder whose other files describe the same model.

        Raises:
          ModelError: if they describe another one, or the files do not have its weights.
        """
        if not folder.exists():
            raise ModelError(f"{folder} does not exist")
        differing = _differing_fields(read_spec(folder), self.model.spec)
        if differing:
            raise ModelError(
                f"{folder} describes another model ({', '.join(differing)} differ): start an "
                "engine with it instead"
            )
        options = self._runner.options
        return load_weights(
            self.model, folder, device=options.device, mesh=options.mesh, progress=False
        )

    def install(self, leaves: Leaves) -> None:
        """Use prepared weights from the next step on. Call it while no step is in flight."""
        self._runner.replace_weights(leaves)
        if self._draft is not None and self._draft_model is not None and self._draft.folder is None:
            named = dict(zip(self.model.names, leaves, strict=True))
            self._draft_model.replace_weights(tuple(named[n] for n in self._draft.model.names))

    def update(
        self,
        core: EngineCore,
        leaves: Leaves,
        version: int | None,
        in_flight: InFlightRequests,
    ) -> None:
        """Install prepared weights between two ticks of `core`, as `LLM.update_weights`."""
        version = new_version(version, core.weight_version)  # another update may have come first
        core.update_weights(lambda: self.install(leaves), version, in_flight)

    @cached_property
    def _plain_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the leaves of an unpacked model on one device, by name."""
        spec = self.model.spec
        if spec.ggml_types is not None or spec.quantization is not None:
            return {}
        plain = build_model(spec, str(self.model.dtype), WeightFormats())
        return {n: leaf.shape for n, leaf in zip(plain.names, plain.leaves, strict=True)}

    def _reject_other_layout(self) -> None:
        if not self.model.spec.has_checkpoint_layout:
            raise ModelError(
                "this GGUF file's rows have a different order than the checkpoint's: "
                "pass leaves by the model's names, or load the original checkpoint"
            )

    def _reject_blocks(self, how: str) -> None:
        if self.model.spec.ggml_types is not None:
            raise ModelError(
                f"GGUF matrices in blocks cannot be updated {how}: pass all leaves in their own "
                'layout, or load the model with gguf_weights="decoded"'
            )

    def _reject_floats(self, weights: Mapping[str, Any]) -> None:
        """Reject floats for a quantized checkpoint, because only its own method can round them."""
        if self.model.spec.quantization is None:
            return
        own, reason = set(self.model.names), "the model's matrices are quantized"
        if weights.keys() == own:
            differing = self._differing(weights)
            if differing is None:
                return
            reason = f"{reason}, and {differing}"
        elif not own & weights.keys() and any(a.dtype not in FLOATS for a in weights.values()):
            return
        raise ModelError(
            f"{reason}: pass all leaves in their own layout, or the checkpoint's quantized tensors"
        )

    def _differing(self, weights: Mapping[str, Any]) -> str | None:
        """Return why an array cannot replace its leaf as it is; None if all can."""
        for name, leaf in zip(self.model.names, self.leaves, strict=True):
            new = weights[name]
            found = np.shape(new), getattr(new, "dtype", None)
            if found != (leaf.shape, leaf.dtype):
                return (
                    f"leaf {name} of the new weights is {found[1]}{list(found[0])}, "
                    f"but the model's is {leaf.dtype}{list(leaf.shape)}"
                )
        return None

    def _copies(self, weights: Mapping[str, Any]) -> Leaves:
        """Return copies, because a trainer may donate its arrays to its next step."""
        differing = self._differing(weights)
        if differing is not None:
            raise ModelError(differing)
        return tuple(
            jax.block_until_ready(jax.device_put(weights[name], leaf.sharding, may_alias=False))
            for name, leaf in zip(self.model.names, self.leaves, strict=True)
        )


# Fields that the choice of formats changes. The leaves' own shapes and types depend on them.
_CHOSEN = frozenset({"experts", "ggml_types", "dtype"})


def _differing_fields(new: ModelSpec, current: ModelSpec) -> list[str]:
    """Return the fields in which the models differ, as in `config.json`.

    `dtype` may differ, because weights are cast during loading.
    """
    names = [field.name for field in fields(new) if field.name not in _CHOSEN]
    differing = [name for name in names if getattr(new, name) != getattr(current, name)]
    if _plain(new.experts) != _plain(current.experts):
        differing.append("experts")
    return differing


def _plain(experts: ExpertSpec | None) -> ExpertSpec | None:
    """Return experts as a checkpoint describes them, without expert parallelism."""
    return None if experts is None else replace(experts, whole=False)


def _check_names(given: set[str], wanted: set[str]) -> None:
    for what, names in (("lack", wanted - given), ("have the unknown", given - wanted)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"the new weights {what} leaf {min(names)}{more}")


def _array(name: str, array: Any) -> Any:
    """Return a JAX array unchanged, and any other array as a NumPy array."""
    if isinstance(array, jax.Array):
        return array
    try:
        return np.asarray(array)
    except Exception as error:  # another library's error, such as PyTorch's
        raise ModelError(
            f"{name} of the new weights cannot be converted to a NumPy array: {error}"
        ) from error


def _on_host(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in weights.items()}
