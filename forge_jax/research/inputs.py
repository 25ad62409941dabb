"""Checks of the arguments of the research functions.

Shapes and types are checked in every call. Values are checked if they are known: in a call outside
of `jax.jit`. In a compiled function they are not, unless `checks` adds them as
`jax.experimental.checkify` checks.

Letters: S sequences, T tokens, N blocks, bs tokens per block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

from forge_jax.models import KV, Model, ModelSpec
from forge_jax.models.kv import first_paged

NUMBERS = {"i": "an integer", "f": "a float"}


class Values:
    """Requirements on values: a ValueError now, a check of the compiled function, or nothing.

    Attributes:
      xp: numpy if all values are known, else jax.numpy.
      skipped: True if values are unknown and nothing checks them.
    """

    def __init__(self, values: Mapping[str, Any], *, checks: bool):
        traced = any(isinstance(each, Tracer) for each in values.values())
        self.skipped = traced and not checks
        self.xp: Any = jnp if traced else np
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self.xp.asarray(self._values[name])

    def require(self, ok: Any, message: str, **found: Any) -> None:
        """Require that all of `ok` is True.

        Args:
          ok: bool[...].
          message: the error for the first element that is False, with `found` in braces.
          found: arrays that broadcast to the shape of `ok`.

        Raises:
          ValueError: `ok` is known, and an element of it is False.
        """
        xp, ok = self.xp, self.xp.asarray(ok)
        if not ok.size:
            return
        first = xp.argmin(ok.reshape(-1))
        found = {
            name: xp.broadcast_to(xp.asarray(each), ok.shape).reshape(-1)[first]
            for name, each in found.items()
        }
        if xp is np:
            if not ok.all():
                raise ValueError(message.format(**found))
        else:
            checkify.check(jnp.all(ok), message, **found)


def integers(name: str, x: Any) -> Any:
    """Return i32[...] for integers of any type: a JAX array, or numpy's if `x` is not one.

    Raises:
      ValueError: lists of different lengths, or values that are not integers.
    """
    try:
        found = x if isinstance(x, jax.Array) else np.asarray(x)
    except ValueError as error:
        raise ValueError(
            f"{name} has sequences of different lengths: pad them, and pass lengths"
        ) from error
    if not jnp.issubdtype(found.dtype, jnp.integer) and found.size:
        raise ValueError(f"{name} must be integers, got {found.dtype}")
    if isinstance(found, np.ndarray) and found.size and np.abs(found).max() >= 2**31:
        raise ValueError(f"{name} must be 32-bit integers, got {np.abs(found).max()}")
    return found.astype(np.int32)


def floats(name: str, x: Any) -> jax.Array:
    """Return an array of `x`, which may be a NumPy array or nested lists.

    Raises:
      ValueError: lists of different lengths, or values that are not numbers.
    """
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of floats: {error}") from error


def require_shape(name: str, x: Any, shape: tuple[Any, ...], kind: str) -> None:
    """Require an array of this shape and kind of number. Letters in the shape match any size.

    Raises:
      ValueError: the shape or type is wrong.
    """
    dtype = jnp.result_type(x)
    is_kind = jnp.issubdtype(dtype, jnp.integer if kind == "i" else jnp.floating)
    fits = len(np.shape(x)) == len(shape) and all(
        isinstance(want, str) or want == got for want, got in zip(shape, np.shape(x), strict=True)
    )
    if not (is_kind and fits):
        wanted = ", ".join(map(str, shape))
        raise ValueError(
            f"{name} must be {NUMBERS[kind]} array [{wanted}], got {dtype}{list(np.shape(x))}"
        )


def require_one(tokens: Any, inputs_embeds: Any, name: str) -> None:
    """Require either tokens or embeddings.

    Raises:
      ValueError: both or neither.
    """
    if (tokens is None) == (inputs_embeds is None):
        which = "neither" if tokens is None else "both"
        raise ValueError(f"pass either {name} or inputs_embeds, got {which}")


def require_leaves(model: Model, leaves: Sequence[jax.Array]) -> None:
    """Require leaves with the model's shapes.

    Raises:
      ValueError: the number of leaves or a shape is wrong.
    """
    if len(leaves) != len(model.leaves):
        raise ValueError(
            f"leaves must be the {len(model.leaves)} arrays of model.leaves, got {len(leaves)}"
        )
    for name, ours, theirs in zip(model.names, model.leaves, leaves, strict=True):
        if np.shape(theirs) != ours.shape:
            raise ValueError(f"leaves: {name} must be {ours.shape}, got {np.shape(theirs)}")


def check_dense(
    model: Model, tokens: Any, inputs_embeds: Any, lengths: Any, *, checks: bool
) -> None:
    """Check the arguments of `LoadedModel.__call__`.

    Raises:
      ValueError: an argument is wrong, see the module.
    """
    spec = model.spec
    require_one(tokens, inputs_embeds, "token_ids")
    if tokens is None:
        name, kind, shape, width = (
            "inputs_embeds",
            "f",
            np.shape(inputs_embeds),
            (spec.hidden_size,),
        )
    else:
        name, kind, shape, width = "token_ids", "i", np.shape(tokens), ()
    batched = len(shape) == 2 + len(width)
    x = inputs_embeds if tokens is None else tokens
    require_shape(name, x, (*(("B",) if batched else ()), "T", *width), kind)
    if batched and not shape[0]:
        raise ValueError(f"{name} has 0 sequences: pass at least 1")
    length, most = shape[1 if batched else 0], spec.max_position_embeddings
    if not 1 <= length <= most:
        raise ValueError(
            f"{name} has {length} tokens: pass 1 to {most}, the positions that the model supports"
        )
    if lengths is not None:
        if not batched:
            raise ValueError(f"lengths requires a batch, [B, T], but {name} is one sequence")
        require_shape("lengths", lengths, shape[:1], "i")
    given = {"ids": tokens, "lengths": lengths}
    of = Values({key: each for key, each in given.items() if each is not None}, checks=checks)
    if of.skipped:
        return
    used: Any = np.ones((1,) * (1 + batched), bool)
    if lengths is not None:
        count = of["lengths"]
        of.require(
            (count >= 1) & (count <= length),
            f"lengths: sequence {{s}} has {{n}} tokens: pass 1 to {length}, the size of {name}",
            n=count,
            s=np.arange(len(count)),
        )
        used = np.arange(length)[None] < count[:, None]
    if tokens is not None:
        _require_ids(of, "token_ids", of["ids"], used, spec)


def check_ids(model: Model, name: str, ids: Any, *, checks: bool) -> None:
    """Check token ids i32[...] of any shape.

    Raises:
      ValueError: an id is known, and is not one of the model's.
    """
    of = Values({"ids": ids}, checks=checks)
    if not of.skipped:
        _require_ids(of, name, of["ids"], np.ones((1,) * len(np.shape(ids)), bool), model.spec)


def check_rows(model: Model, name: str, rows: Any, shape: tuple[str, ...]) -> None:
    """Require float[..., d] with the hidden size of the model. `shape`: the letters before d.

    Raises:
      ValueError: the shape or type is wrong.
    """
    require_shape(name, rows, (*shape, model.spec.hidden_size), "f")


def check_step(
    model: Model,
    leaves: Sequence[jax.Array],
    kv: KV,
    arrays: Mapping[str, Any],
    *,
    least: int,
    most: int | None = None,
    checks: bool,
) -> None:
    """Check the arguments of a step.

    Args:
      model: the model.
      leaves: its weights.
      kv: its cache.
      arrays: the other arguments by name, or None.
      least: the fewest new tokens of a sequence.
      most: `max_q_len`, the maximum number of new tokens of a sequence, or None.
      checks: True to check unknown values in the compiled function.

    Raises:
      ValueError: an argument is wrong, see the module.
    """
    require_leaves(model, leaves)
    if arrays.get("state_slots") is not None and not any(isinstance(each, dict) for each in kv):
        raise ValueError(
            f"state_slots: {model.spec.architecture} has no layers with state: omit it"
        )
    if most is not None and most < 1:
        raise ValueError(f"max_q_len must be at least 1, got {most}")
    if len(kv) != model.spec.num_hidden_layers:
        raise ValueError(
            f"kv must have {model.spec.num_hidden_layers} layers, got {len(kv)}: create it with "
            "new_kv"
        )
    tokens, embeds = arrays.get("tokens"), arrays.get("inputs_embeds")
    require_one(tokens, embeds, "tokens")
    if tokens is None:
        require_shape("inputs_embeds", embeds, ("T", model.spec.hidden_size), "f")
    else:
        require_shape("tokens", tokens, ("T",), "i")
    require_shape("block_tables", arrays["block_tables"], ("S", "max_blocks"), "i")
    rows, seqs = _rows(arrays), np.shape(arrays["block_tables"])[0]
    if not rows:
        name = "inputs_embeds" if tokens is None else "tokens"
        raise ValueError(f"{name} has 0 tokens: pass at least 1")
    if not seqs:
        raise ValueError("block_tables has 0 sequences: pass at least 1 row")
    shapes: dict[str, tuple[int, ...]] = {
        "positions": (rows,),
        "slot_mapping": (rows,),
        "kv_lens": (seqs,),
        "cu_q_lens": (seqs + 1,),
        "num_seqs": (),
        "state_slots": (seqs,),
    }
    for name, shape in shapes.items():
        if arrays.get(name) is not None:
            require_shape(name, arrays[name], shape, "i")
    _check_values(model, kv, arrays, least=least, most=most, checks=checks)


def _check_values(
    model: Model,
    kv: KV,
    arrays: Mapping[str, Any],
    *,
    least: int,
    most: int | None,
    checks: bool,
) -> None:
    """Check the values of a step, after its shapes."""
    given = {key: x for key, x in arrays.items() if x is not None and key != "inputs_embeds"}
    of = Values(given, checks=checks)
    if of.skipped:
        return
    seqs, rows = len(given["kv_lens"]), _rows(arrays)
    count = of["num_seqs"] if "num_seqs" in given else seqs
    of.require(
        (of.xp.asarray(count) >= 0) & (of.xp.asarray(count) <= seqs),
        f"num_seqs is {{n}}: pass 0 to {seqs}, the rows of block_tables",
        n=count,
    )
    _check_lengths(of, np.arange(seqs) < count, rows, least, most)
    _check_blocks(of, np.arange(seqs) < count, model.spec, kv)
    _check_rows(of, given, np.arange(rows) < of["cu_q_lens"][count], model.spec, kv)
    if "state_slots" in given:
        slots, most = of["state_slots"], _num_slots(kv)
        of.require(
            ~(np.arange(seqs) < count) | ((slots >= 0) & (slots < most)),
            f"state_slots: {{n}} is not from 0 to {most - 1}: pass more num_slots to new_kv",
            n=slots,
        )


def _check_lengths(of: Values, used: Any, rows: int, least: int, most: int | None) -> None:
    """Check `cu_q_lens` and `kv_lens`. `used` is bool[S], the sequences of the step."""
    offsets, lengths = of["cu_q_lens"], of["kv_lens"]
    new, s = offsets[1:] - offsets[:-1], np.arange(len(lengths))
    of.require(offsets[0] == 0, "cu_q_lens starts with {n}: it must start with 0", n=offsets[0])
    of.require(
        ~used | (new >= least),
        f"cu_q_lens: sequence {{s}} has {{n}} new tokens, but needs at least {least}: pass the "
        "offset of each sequence's first token, then the total",
        s=s,
        n=new,
    )
    if most is not None:
        of.require(
            ~used | (new <= most),
            f"max_q_len is {most}, but sequence {{s}} has {{n}} new tokens: pass at least the most "
            "new tokens of a sequence, or None",
            s=s,
            n=new,
        )
    of.require(
        ~used | (offsets[1:] <= rows),
        f"cu_q_lens has the offset {{n}}, beyond the {rows} tokens of the step",
        n=offsets[1:],
    )
    of.require(
        ~used | (new <= lengths),
        "kv_lens: sequence {s} has {n} tokens, fewer than its {new} new ones: kv_lens includes "
        "the new tokens",
        s=s,
        n=lengths,
        new=new,
    )


def _check_blocks(of: Values, used: Any, spec: ModelSpec, kv: KV) -> None:
    """Check `block_tables`, and `kv_lens` against them and the model."""
    lengths, tables, s = of["kv_lens"], of["block_tables"], np.arange(len(used))
    blocks, block_size = _cache_size(kv)
    width, most = tables.shape[1], spec.max_position_embeddings
    of.require(
        ~used | (lengths <= width * block_size),
        f"block_tables: sequence {{s}} has {{n}} tokens in kv_lens, but its {width} blocks of "
        f"{block_size} tokens have room for {width * block_size}: pass more blocks",
        s=s,
        n=lengths,
    )
    of.require(
        ~used | (lengths <= most),
        f"kv_lens: sequence {{s}} has {{n}} tokens, but the model supports {most} positions",
        s=s,
        n=lengths,
    )
    needed = used[:, None] & (np.arange(width)[None] * block_size < lengths[:, None])
    of.require(
        ~needed | ((tables >= 0) & (tables < blocks)),
        f"block_tables: sequence {{s}} has the block {{n}}, but the cache has the blocks 0 to "
        f"{blocks - 1}: pass one of them, or more num_blocks to new_kv",
        s=s[:, None],
        n=tables,
    )


def _check_rows(of: Values, given: Mapping[str, Any], used: Any, spec: ModelSpec, kv: KV) -> None:
    """Check what each token has. `used` is bool[T], the rows that are not padding."""
    blocks, block_size = _cache_size(kv)
    if "tokens" in given:
        _require_ids(of, "tokens", of["tokens"], used, spec)
    if "positions" in given:
        positions, most = of["positions"], spec.max_position_embeddings
        of.require(
            ~used | ((positions >= 0) & (positions < most)),
            f"positions: {{n}} is out of range: the model supports 0 to {most - 1}",
            n=positions,
        )
    if "slot_mapping" in given:
        slots, most = of["slot_mapping"], blocks * block_size
        of.require(
            (slots >= 0) & (slots <= most),
            f"slot_mapping: {{n}} is not a slot of the cache: pass 0 to {most - 1}, or {most} to "
            "write nothing",
            n=slots,
        )


def _require_ids(of: Values, name: str, ids: Any, used: Any, spec: ModelSpec) -> None:
    of.require(
        ~used | ((ids >= 0) & (ids < spec.vocab_size)),
        f"{name}: {{n}} is not a token id of this model: ids are 0 to {spec.vocab_size - 1}",
        n=ids,
    )


def _rows(arrays: Mapping[str, Any]) -> int:
    """Return T."""
    tokens = arrays.get("tokens")
    return np.shape(arrays["inputs_embeds"] if tokens is None else tokens)[0]


def _cache_size(kv: KV) -> tuple[int, int]:
    """Return (N, bs)."""
    blocks, _, _, block_size, _ = first_paged(kv).shape
    return blocks, block_size


def _num_slots(kv: KV) -> int:
    """Return the sequences that the layers with state have room for; 0 without such layers."""
    state = next((layer for layer in kv if isinstance(layer, dict)), None)
    return 0 if state is None else len(next(iter(state.values()))) - 1
