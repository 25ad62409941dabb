"""Bundles: a folder of compiled executables, which starts load instead of compiling.

A bundle has one file per executable, as XLA serializes it, and a manifest in JSON. The manifest
holds the identity of everything that shapes the executables, and the types of their arguments and
results. Loading therefore neither traces nor unpickles.

An executable is machine code, so a bundle must be as trustworthy as this program. Only root and
this user may write to it, which is checked before anything is read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from forge_jax.step.draft_probs import Proposed
from forge_jax.step.slots import Slots
from forge_jax.step.step import Pooled, StepOut
from forge_kernels.attention import QuantizedKV
from forge_kernels.private_files import foreign_write_fault, open_private

MANIFEST = "bundle.json"
FORMAT = 1  # version of the manifest
SHOWN = 60  # characters of a value in a message

# The types of arguments and results that are tuples, by their names in a manifest.
NODES: dict[str, Callable[..., Any]] = {
    "tuple": lambda *children: children,
    **{node.__name__: node for node in (Slots, StepOut, Pooled, Proposed, QuantizedKV)},
}

log = logging.getLogger(__name__)

# A leaf such as "bfloat16[4,8]", None, or a node with its children: {"Slots": [...]}. The children
# of a dict have their keys: {"dict": [["base", "int32[4]"]]}.
type Tree = str | dict[str, list[Any]] | None


class BundleError(Exception):
    """A bundle that cannot be read or used. The message is the reason."""


class Entry(msgspec.Struct, frozen=True):
    """One executable in a manifest.

    Attributes:
      file: name of the file.
      sha256: checksum of the file.
      function: name of the compiled function, which traces show.
      arguments: a tuple of all arguments.
      kept: indices of the leaves that the executable takes. XLA drops unused ones.
    """

    file: str
    sha256: str
    function: str
    arguments: Tree
    results: Tree
    kept: list[int]


class Manifest(msgspec.Struct, frozen=True):
    """The content of `bundle.json`.

    Attributes:
      identity: everything that determines the executables, by a name that messages show.
      num_blocks: blocks of the KV cache.
      executables: executables by name.
    """

    format: int
    identity: dict[str, Any]
    num_blocks: int
    executables: dict[str, Entry]


def is_bundle(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


class Bundle:
    """A bundle whose folder and manifest have been checked.

    Args:
      device: the device that loads the executables.

    Raises:
      PermissionError: if another user can write to the folder or its manifest.
      BundleError: if the manifest is damaged.
    """

    def __init__(self, folder: Path, device: jax.Device):
        fault = foreign_write_fault(folder)
        if fault is not None:
            raise PermissionError(fault)
        self.folder = folder
        self._device = device
        self._manifest = _read_manifest(folder)
        self._lock = threading.Lock()
        self._warned = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache of its executables."""
        return self._manifest.num_blocks

    def difference(self, identity: Mapping[str, Any]) -> str | None:
        """Return how the identity of an engine differs from the bundle's, or None."""
        own, here = self._manifest.identity, _plain(identity)
        names = [name for name in {**here, **own} if own.get(name) != here.get(name)]
        if not names:
            return None
        first, *others = names
        also = f" (also different: {', '.join(others)})" if others else ""
        values = f"{_shown(here.get(first))}, but {_shown(own.get(first))} in the bundle"
        return f"{first} is {values}{also}"

    def find(self, name: str, args: tuple[Any, ...]) -> Stored | None:
        """Return an executable for the shapes `args`; None if it is not in the bundle."""
        entry = self._manifest.executables.get(name)
        if entry is None:
            self.warn(f"{name} is compiled, because it is missing")
        elif entry.arguments != tree_of(args):
            self.warn(f"{name} is compiled, because its arguments have other shapes here")
        else:
            return Stored(self, entry, args, self._device)
        return None

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Do nothing, because a bundle does not change."""

    def read(self, entry: Entry) -> bytes:
        return read_private(self.folder / entry.file)

    def failed(self, entry: Entry, reason: str) -> None:
        self.warn(f"{entry.file} is compiled again, because it cannot be loaded: {reason}")

    def warn(self, reason: str) -> None:
        """Log why something is compiled. Only the first reason is logged."""
        with self._lock:
            if not self._warned:
                log.warning("bundle %s: %s", self.folder, reason)
            self._warned = True


class Source(Protocol):
    """The place of stored executables."""

    def read(self, entry: Entry) -> bytes:
        """Return an executable as XLA serialized it. Raise an error if that fails."""
        ...

    def failed(self, entry: Entry, reason: str) -> None:
        """Report that an executable was not loaded, so it is compiled."""
        ...


@dataclass(frozen=True)
class Stored:
    """One executable of a bundle, or of an earlier start."""

    source: Source
    entry: Entry
    args: tuple[Any, ...]
    device: jax.Device

    def load(self, compiler_options: Mapping[str, Any]) -> jax.stages.Compiled | None:
        """Load it onto the device. Return None, after a warning, if that fails. Thread-safe."""
        try:
            data = self.source.read(self.entry)
            if hashlib.sha256(data).hexdigest() != self.entry.sha256:
                raise BundleError("its checksum differs")
            return _deserialize(data, self.entry, self.args, self.device, compiler_options)
        except Exception as error:  # XLA or JAX rejected it
            self.source.failed(self.entry, str(error) or type(error).__name__)
            return None


def write_bundle(
    folder: Path,
    identity: Mapping[str, Any],
    num_blocks: int,
    executables: Mapping[str, jax.stages.Compiled],
) -> int:
    """Write a bundle, and return its size in bytes.

    It is written next to its destination under a hidden name and then renamed, so it is never
    incomplete.

    Args:
      folder: a folder that is empty or does not exist.

    Raises:
      OSError: if it cannot be written.
      BundleError: if XLA cannot serialize an executable.
    """
    partial = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
    entries: dict[str, Entry] = {}
    size = 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir(mode=0o755)
    try:
        for name, compiled in executables.items():
            data, entries[name] = serialize(name, compiled)
            size += write_private(partial / entries[name].file, data)
        manifest = Manifest(FORMAT, _plain(identity), num_blocks, entries)
        text = msgspec.json.format(msgspec.json.encode(manifest))
        size += write_private(partial / MANIFEST, text)
        partial.rename(folder)  # replaces only an empty folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return size


def file_name(name: str) -> str:
    """Return the name of the file with the executable `name`."""
    return re.sub(r"\W+", "-", name).strip("-") + ".xla"


def tree_of(tree: Any) -> Tree:
    """Describe the nodes and leaves of arguments or results.

    Raises:
      BundleError: if a node has a type that a manifest cannot name.
    """
    if tree is None:
        return None
    if isinstance(tree, tuple):
        name = type(tree).__name__
        if name in NODES:
            return {name: [tree_of(child) for child in tree]}
    elif isinstance(tree, dict):
        return {"dict": [[key, tree_of(tree[key])] for key in sorted(tree)]}
    elif hasattr(tree, "dtype"):
        return f"{np.dtype(tree.dtype).name}[{','.join(map(str, tree.shape))}]"
    raise BundleError(f"a bundle cannot describe {type(tree).__name__}")


def _built(tree: Tree) -> Any:
    """Return the tree that a manifest describes, with shapes as its leaves."""
    match tree:
        case None:
            return None
        case str():
            return _leaf(tree)
        case {"dict": items}:
            return {key: _built(child) for key, child in items}
        case _:
            [(name, children)] = tree.items()
            return NODES[name](*map(_built, children))


def _leaf(text: str) -> jax.ShapeDtypeStruct:
    dtype, _, shape = text.removesuffix("]").partition("[")
    return jax.ShapeDtypeStruct([int(size) for size in shape.split(",") if size], jnp.dtype(dtype))


def _read_manifest(folder: Path) -> Manifest:
    try:
        data = msgspec.json.decode(read_private(folder / MANIFEST))
        found = data.get("format") if isinstance(data, dict) else None
        if found != FORMAT:
            raise BundleError(f"{MANIFEST} has format {_shown(found)}, not {FORMAT}")
        return msgspec.convert(data, Manifest)
    except msgspec.MsgspecError as error:
        raise BundleError(f"{MANIFEST} is damaged: {error}") from error
    except PermissionError:
        raise
    except OSError as error:
        raise BundleError(f"{MANIFEST}: {error.strerror or error}") from error


def read_private(file: Path) -> bytes:
    with open(open_private(file), "rb") as stream:
        return stream.read()


def write_private(file: Path, data: bytes) -> int:
    """Write a file that others may read, but not write."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with open(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return len(data)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON returns them: with lists in place of tuples."""
    return msgspec.json.decode(msgspec.json.encode(values))


def _shown(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# ---- JAX's private parts -------------------------------------------------------------------------
# `jax.experimental.serialize_executable` pickles these objects. A bundle stores their fields, which
# need no more than shapes because there is one device. If a release of JAX changes them, loading
# fails, and executables are compiled as without a bundle.


def serialize(name: str, compiled: jax.stages.Compiled) -> tuple[bytes, Entry]:
    """Return an executable's serialized form, and its entry.

    Raises:
      BundleError: if it depends on more than its arguments, or XLA cannot serialize it.
    """
    private: Any = compiled
    unloaded = private._executable._unloaded_executable
    depends = {
        "arrays of the function": private._params.const_args,
        "callbacks": unloaded.host_callbacks or unloaded.keepalive,
        # Unordered ones of C++ kernels only keep XLA from removing a call.
        "effects": unloaded.ordered_effects,
        "mutable arrays": unloaded.mut,
    }
    for what, found in depends.items():
        if found:
            raise BundleError(f"{name} cannot be stored, because it depends on {what}")
    executable = unloaded.xla_executable
    try:
        client = getattr(executable, "client", None)  # None: compiled for an absent device
        data = executable.serialize() if client is None else client.serialize_executable(executable)
    except jax.errors.JaxRuntimeError as error:
        raise BundleError(f"XLA cannot serialize {name}: {error}") from error
    args, _ = compiled.args_info
    return data, Entry(
        file=file_name(name),
        sha256=hashlib.sha256(data).hexdigest(),
        function=unloaded.name,
        arguments=tree_of(args),
        results=tree_of(jax.tree.unflatten(compiled.out_tree, unloaded.output_avals)),
        kept=sorted(unloaded.kept_var_idx),
    )


def _deserialize(
    data: bytes,
    entry: Entry,
    args: tuple[Any, ...],
    device: jax.Device,
    compiler_options: Mapping[str, Any],
) -> jax.stages.Compiled:
    from jax._src import compiler, core
    from jax._src.interpreters import pxla
    from jaxlib import xla_client

    if device.platform != "cpu":
        # XLA finds Mosaic's runtime library by a setting of this module.
        from jax.experimental.mosaic import gpu  # noqa: F401

    client: Any = device.client
    devices = xla_client.DeviceList((device,))
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[device.id]]),
        env_options_overrides=dict(compiler_options),
        backend=client,
    )
    executable = client.deserialize_executable(
        data, executable_devices=devices, compile_options=options
    )

    def aval(leaf: Any) -> core.ShapedArray:
        return core.ShapedArray(leaf.shape, jnp.dtype(leaf.dtype))

    leaves = jax.tree.leaves(args)
    inputs = [aval(leaves[index]) for index in entry.kept]
    results, out_tree = jax.tree.flatten(_built(entry.results))
    sharding = jax.sharding.SingleDeviceSharding(device)
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=devices,
        backend=client,
        input_avals=inputs,
        input_shardings=[sharding] * len(inputs),
        output_avals=[aval(leaf) for leaf in results],
        output_shardings=[sharding] * len(results),
        committed=True,
        name=entry.function,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(entry.kept),
        mut=None,
        xla_in_layouts=[None] * len(inputs),  # the default layouts
        dispatch_in_layouts=[None] * len(inputs),
        xla_out_layouts=[None] * len(results),
        all_args_info=None,
        pgle_profiler=None,
    )
    info = jax.tree.map(lambda leaf: jax.stages.ArgInfo(aval(leaf), donated=False), (args, {}))
    return jax.stages.Compiled(unloaded.load(), [], info, out_tree, no_kwargs=True)
