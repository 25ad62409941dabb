"""Compilation for NVIDIA GPUs without a GPU or a driver; import it before jax is used.

XLA's CUDA compiler accepts a description of the device instead of the device. The result is the
real program: optimized HLO, ptxas' registers and spills, shared memory, and the grouping into
command buffers. The choice of matrix kernels is missing, because XLA makes it by measuring.

The compilers' files (HLO, PTX and ptxas' reports) are deleted at exit, unless the environment
variable FORGE_AOT_DUMP names a folder. Each process then keeps them in a new folder there.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from unittest import mock

DUMP = Path(tempfile.mkdtemp(prefix="forge-aot-", dir=os.environ.get("FORGE_AOT_DUMP")))
if "FORGE_AOT_DUMP" not in os.environ:
    Finalize(None, shutil.rmtree, (DUMP,), {"ignore_errors": True}, exitpriority=0)
os.environ["JAX_PLATFORMS"] = "cpu"  # keeps the plugin from looking for a driver
os.environ["XLA_FLAGS"] = f"--xla_dump_to={DUMP} --xla_dump_hlo_as_text"
os.environ["MOSAIC_GPU_DUMP_TO"] = str(DUMP)
os.environ["TF_CPP_VMODULE"] = "subprocess_compilation=3"  # ptxas' report, on standard error
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"

import jax  # noqa: E402
from jax._src.core import jaxprs_in_params  # noqa: E402
from jax._src.mesh import AbstractDevice  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec  # noqa: E402

from forge_jax.step.targets import Target  # noqa: E402
from forge_kernels.devices import described  # noqa: E402

KERNELS = ("mpmd_map", "pallas_call")  # the primitives of Pallas


@dataclass(frozen=True)
class Kernel:
    """ptxas' report on one kernel."""

    name: str
    registers: int
    spilled: int  # bytes, stores and loads
    stack: int  # bytes


@dataclass(frozen=True)
class Program:
    target: Target
    hlo: str  # optimized
    temp_bytes: int
    alias_bytes: int
    kernels: tuple[Kernel, ...]
    shared_bytes: tuple[int, ...]  # one per Mosaic kernel
    command_buffers: int
    outside: tuple[str, ...]  # kinds of instructions outside command buffers
    written_conditions: int  # conditions in the function
    compiled_conditions: int  # conditions left by XLA; it computes both branches of the others


@dataclass(frozen=True)
class _Described(AbstractDevice):
    """A device with the attribute that Pallas reads from a real one."""

    compute_capability: str = "9.0"


class Compiler:
    """A compiler for one device, or for several in a mesh with the one axis `axis`.

    Args:
      devices: number of devices in all.
      axis: name of the mesh's axis.
      target: one of TARGETS.
      hosts: number of hosts, each with an equal part of the devices.
    """

    def __init__(self, devices: int = 1, axis: str = "x", target: str = "h200", hosts: int = 1):
        self.target = Target.read(target)
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=self.target.config,
            topology=f"1x{hosts}x{devices // hosts}",
        )
        mesh = topologies.make_mesh(topology, (devices,), (axis,))
        self.devices = list(mesh.devices.flat)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        # The device that Pallas compiles for.
        device = _Described(
            self.target.name, self.target.cores, "cuda", self.target.compute_capability
        )
        self._mesh = AbstractMesh((devices,), (axis,), (AxisType.Auto,), abstract_device=device)

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        options: dict[str, Any] | None = None,
        **jit_options: Any,
    ) -> Program:
        """Compile `function` at the shapes `args`, replicated unless an argument has a sharding."""

        def on_device(leaf):
            sharding = leaf.sharding or self._replicated
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        args = jax.tree.map(on_device, args)
        before = set(DUMP.iterdir())
        of_described = _shard_map_on(self._mesh, jax.shard_map)
        with (
            _standard_error() as log,
            mock.patch.object(jax, "shard_map", of_described),
            jax.sharding.use_abstract_mesh(self._mesh),
            described(self.target.gpu),
        ):
            traced = jax.jit(function, **jit_options).trace(*args)
            compiled = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)
        new = sorted(set(DUMP.iterdir()) - before)
        memory = compiled.memory_analysis()
        buffers, outside = _thunks(new)
        hlo = compiled.as_text()
        assert hlo is not None and memory is not None
        return Program(
            target=self.target,
            hlo=hlo,
            temp_bytes=memory.temp_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            kernels=tuple(_kernels(log[0])),
            shared_bytes=tuple(
                int(re.findall(r"smem_scratch_bytes=(\d+)", path.read_text())[0])
                for path in new
                if path.name.endswith(".resources.txt")
            ),
            command_buffers=buffers,
            outside=outside,
            written_conditions=_conditions(traced.jaxpr.jaxpr),
            compiled_conditions=hlo.count(" conditional("),
        )


def _shard_map_on(described: AbstractMesh, shard_map: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `shard_map` to described devices, because a topology's devices lack a description."""
    return lambda function, **options: shard_map(function, **options | {"mesh": described})


@contextmanager
def _standard_error() -> Iterator[list[str]]:
    """Yield the lines that C++ writes to standard error meanwhile."""
    text: list[str] = []
    with tempfile.TemporaryFile() as file:
        old = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield text
        finally:
            os.dup2(old, 2)
            os.close(old)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def _kernels(log: str) -> Iterator[Kernel]:
    seen = set()
    for section in log.split("Compiling entry function '")[1:]:
        name = section.split("'", 1)[0]
        stack, stores, loads = map(
            int,
            _find(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
                section,
            ),
        )
        (registers,) = map(int, _find(r"Used (\d+) registers", section))
        kernel = Kernel(name, registers, stores + loads, stack)
        if kernel not in seen:  # XLA compiles some kernels twice
            seen.add(kernel)
            yield kernel


def _find(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"ptxas reported nothing that matches {pattern!r}")
    return found.groups()


def _conditions(jaxpr: Any) -> int:
    """Count the conditions of a function.

    Conditions inside kernels do not count, and neither do choices between platforms, which are made
    before compilation.
    """
    platform = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "platform_index"}
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in KERNELS:
            continue
        inner = [_conditions(sub) for sub in jaxprs_in_params(eqn.params)]
        if eqn.primitive.name != "cond":
            count += sum(inner)
        elif eqn.invars[0] in platform:
            count += max(inner)
        else:
            count += 1 + sum(inner)
    return count


def _thunks(files: list[Path]) -> tuple[int, tuple[str, ...]]:
    """Return the number of command buffers and the kinds of instructions outside of them."""
    # If nothing was grouped, only the first of the two exists.
    names = ("thunk_sequence.txt", "thunk_sequence_after_thunk_passes.txt")
    *_, path = (p for name in names for p in files if p.name.endswith(name))
    top = [re.match(r"(?:\d+: )?(k\w+)", line) for line in path.read_text().splitlines()]
    kinds = [match[1] for match in top if match is not None]
    outside = dict.fromkeys(kind for kind in kinds if kind != "kCommandBuffer")
    return kinds.count("kCommandBuffer"), tuple(outside)
