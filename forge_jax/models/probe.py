"""Activations that a call returns or replaces, by name, for research.

The modules pass each activation with a name to `Ragged.tap`. A served step has no probe, and
`Ragged.tap` then returns its argument, so that the compiled program is the same as without it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

Edit = Callable[[jax.Array], jax.Array]

OUTSIDE = ("embed", "final_norm")  # points outside all layers
POINTS = (
    *("attn.q", "attn.k", "attn.v", "attn.latent", "attn.pattern", "attn.out"),
    *("mlp.router.logits", "mlp.router.chosen", "mlp.router.weights", "mlp.inner", "mlp.out"),
    "resid",
)  # points in a layer, in the order of computation
NEAREST = 5  # names in an error


@dataclass(frozen=True, eq=False)
class Probe:
    """The activations that one trace of a model returns or replaces.

    It records while JAX traces the model, so one probe serves one call.

    Attributes:
      taps: patterns of the names to return, as `fnmatch` matches them.
      edit: functions by pattern. Each replaces the activations that its pattern matches.
      inputs_embeds: float[T, d] in place of the embeddings of tokens, or None.
      full_attention: compute all scores of attention in every layer, which is differentiable.
      lead: the axes in place of T in activations, such as (B, T).
      layer: the layer that is being traced, or None outside of all layers.
      taken: the activations that `taps` match, by name.
      reached: the names of all activations of the model so far.
      read: the arguments that the decoder read: "inputs_embeds" or nothing.
    """

    taps: tuple[str, ...] = ()
    edit: Mapping[str, Edit] = field(default_factory=dict[str, Edit])
    inputs_embeds: jax.Array | None = None
    full_attention: bool = False
    lead: tuple[int, ...] | None = None
    layer: int | None = None
    taken: dict[str, jax.Array] = field(default_factory=dict[str, jax.Array])
    reached: set[str] = field(default_factory=set[str])
    read: set[str] = field(default_factory=set[str])

    def in_layer(self, layer: int) -> Probe:
        """Return the probe for the modules of a layer, with the same records."""
        return replace(self, layer=layer)

    def embeddings(self) -> jax.Array | None:
        """Return `inputs_embeds`, and record that the decoder read them."""
        self.read.add("inputs_embeds")
        return self.inputs_embeds

    def wants(self, point: str) -> bool:
        """Return True if this call returns or replaces the activation. `point`: e.g. "mlp.out"."""
        name = self._name(point)
        if name is None:
            return False
        self.reached.add(name)
        return any(fnmatchcase(name, pattern) for pattern in (*self.taps, *self.edit))

    def visit(self, point: str, x: jax.Array) -> jax.Array:
        """Return the activation, or what replaces it. x: [T, ...].

        Raises:
          ValueError: a function of `edit` returned another shape.
        """
        if not self.wants(point):
            return x
        name = self._name(point)
        assert name is not None
        shown = given = self._shown(point, x)
        for pattern, function in self.edit.items():
            if fnmatchcase(name, pattern):
                shown = jnp.asarray(function(shown)).astype(x.dtype)
                if shown.shape != given.shape:
                    raise ValueError(
                        f"edit[{pattern!r}] returned {shown.shape} for {name}: return the shape of "
                        f"its argument, {given.shape}"
                    )
        if any(fnmatchcase(name, pattern) for pattern in self.taps):
            self.taken[name] = shown
        return x if shown is given else self._rows(point, shown, x.shape)

    def finish(self, architecture: str) -> dict[str, jax.Array]:
        """Return the activations by name.

        Raises:
          ValueError: a pattern matches no activation, or the decoder did not read `inputs_embeds`.
        """
        if self.inputs_embeds is not None and "inputs_embeds" not in self.read:
            raise ValueError(
                f"inputs_embeds is not supported by {architecture}, whose decoder does not read "
                "Ragged.embeddings: pass token ids"
            )
        for argument, patterns in (("taps", self.taps), ("edit", self.edit)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in self.reached):
                    raise ValueError(f"{argument}: {self._unmatched(pattern, architecture)}")
        return dict(self.taken)

    def _name(self, point: str) -> str | None:
        if point in OUTSIDE:
            return point
        return None if self.layer is None else f"layers.{self.layer}.{point}"

    def _shown(self, point: str, x: jax.Array) -> jax.Array:
        """Return the activation with the axes `lead`. Patterns then have the heads before T."""
        if self.lead is None:
            return x
        x = x.reshape(*self.lead, *x.shape[1:])
        return jnp.swapaxes(x, -3, -2) if point == "attn.pattern" else x

    def _rows(self, point: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undo `_shown`."""
        if self.lead is not None and point == "attn.pattern":
            x = jnp.swapaxes(x, -3, -2)
        return x.reshape(shape)

    def _unmatched(self, pattern: str, architecture: str) -> str:
        """Return the message for a pattern that matches no activation."""
        own = sorted_names(self.reached)
        layer, _, point = pattern.removeprefix("layers.").partition(".")
        of_layer = [name for name in own if name.startswith(f"layers.{layer}.")]
        if point in POINTS and of_layer:
            has = ", ".join(name.removeprefix(f"layers.{layer}.") for name in of_layer)
            return f"layer {layer} of {architecture} has no {point}: it has {has}"
        nearest = difflib.get_close_matches(pattern, own, n=NEAREST, cutoff=0.3) or own[:NEAREST]
        return (
            f"{pattern!r} matches no activation of {architecture}: the nearest names are "
            f"{', '.join(nearest)}; LoadedModel.tap_names() returns all"
        )


def new_probe(
    taps: Sequence[str] | None = None,
    edit: Mapping[str, Edit] | None = None,
    *,
    inputs_embeds: jax.Array | None = None,
    full_attention: bool = False,
    lead: tuple[int, ...] | None = None,
) -> Probe | None:
    """Return the probe for these arguments, or None if the model needs none.

    Raises:
      ValueError: as in `tap_patterns` and `edit_functions`.
    """
    patterns, functions = tap_patterns(taps), edit_functions(edit)
    if not (patterns or functions or full_attention or inputs_embeds is not None):
        return None
    return Probe(patterns, functions, inputs_embeds, full_attention, lead)


def tap_patterns(taps: Any) -> tuple[str, ...]:
    """Return the patterns of `taps`: names, one name, or None.

    Raises:
      ValueError: `taps` has entries that are not names.
    """
    if taps is None or isinstance(taps, str):
        return () if taps is None else (taps,)
    if not isinstance(taps, Iterable):
        raise ValueError(f"taps must be names such as 'layers.*.resid', got {taps!r}")
    for each in taps:
        if not isinstance(each, str):
            raise ValueError(f"taps must be names such as 'layers.*.resid', got {each!r} in taps")
    return tuple(taps)


def edit_functions(edit: Any) -> dict[str, Edit]:
    """Return the functions of `edit` by pattern: a mapping, or None.

    Raises:
      ValueError: `edit` is not a mapping of names to functions.
    """
    if edit is None:
        return {}
    if not isinstance(edit, Mapping):
        raise ValueError(
            f"edit must have functions by name, got {type(edit).__name__}: pass "
            "{'layers.0.resid': lambda x: ...}"
        )
    for pattern, function in edit.items():
        if not isinstance(pattern, str):
            raise ValueError(
                f"edit must have functions by names such as 'layers.0.resid', got the name "
                f"{pattern!r}"
            )
        if not callable(function):
            raise ValueError(
                f"edit[{pattern!r}] must be a function of the activation, got "
                f"{type(function).__name__}: pass lambda x: ..."
            )
    return dict(edit)


def sorted_names(names: Iterable[str]) -> list[str]:
    """Return names of activations in the order of computation."""
    return sorted(names, key=_order)


def _order(name: str) -> tuple[float, int]:
    if name in OUTSIDE:
        return (-1, 0) if name == "embed" else (math.inf, 0)
    _, layer, point = name.split(".", 2)
    return int(layer), POINTS.index(point) if point in POINTS else len(POINTS)
