"""Compiles for an NVIDIA H200 without a GPU or a driver: import it before jax is used.

XLA's CUDA compiler takes a description of the device instead of the device. What comes back is what
would run: the optimised program, ptxas' registers and spills, shared memory, the grouping into
command buffers. Not the choice of matrix kernels, which XLA makes by measuring.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

DUMP = Path(tempfile.mkdtemp(prefix="forge-aot-"))
os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin does not look for a driver then
os.environ["XLA_FLAGS"] = f"--xla_dump_to={DUMP} --xla_dump_hlo_as_text"
os.environ["MOSAIC_GPU_DUMP_TO"] = str(DUMP)
os.environ["TF_CPP_VMODULE"] = "subprocess_compilation=3"  # ptxas' report, on standard error
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"

import jax  # noqa: E402
from jax._src.core import jaxprs_in_params  # noqa: E402
from jax._src.mesh import AbstractDevice  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec  # noqa: E402

H200 = Path(__file__).with_name("h200.txtpb")
SHARED_LIMIT = 232448  # bytes of a CTA
KERNELS = ("mpmd_map", "pallas_call")  # the primitives of Pallas


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel."""

    name: str
    registers: int
    spilled: int  # bytes, stores and loads
    stack: int  # bytes


@dataclass(frozen=True)
class Program:
    hlo: str  # optimised
    temp_bytes: int
    alias_bytes: int
    kernels: tuple[Kernel, ...]
    shared_bytes: tuple[int, ...]  # of each Mosaic kernel
    command_buffers: int
    outside: tuple[str, ...]  # kinds of what the executable runs besides command buffers
    written_conditions: int  # in the function
    compiled_conditions: int  # what XLA has left of them: of the others it computes both sides


class Compiler:
    """For one device, or for several of one host: a mesh with the one axis `axis`."""

    def __init__(self, devices: int = 1, axis: str = "x"):
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=H200.read_text(),
            topology=f"1x1x{devices}",
        )
        mesh = topologies.make_mesh(topology, (devices,), (axis,))
        self.devices = list(mesh.devices.flat)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        device = AbstractDevice("NVIDIA H200", 132, "cuda")  # what Pallas compiles for
        self._mesh = AbstractMesh((devices,), (axis,), (AxisType.Auto,), abstract_device=device)

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        options: dict[str, Any] | None = None,
        **jit_options: Any,
    ) -> Program:
        """Compiles `function` at the shapes `args`, each whole on every device or as it says."""

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
        ):
            traced = jax.jit(function, **jit_options).trace(*args)
            compiled = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)
        new = sorted(set(DUMP.iterdir()) - before)
        memory = compiled.memory_analysis()
        buffers, outside = _thunks(new)
        hlo = compiled.as_text()
        return Program(
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
    """`shard_map` over devices that are described: those of a topology do not say what they are."""
    return lambda function, **options: shard_map(function, **options | {"mesh": described})


@contextmanager
def _standard_error() -> Iterator[list[str]]:
    """What C++ writes there meanwhile."""
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
        if kernel not in seen:  # XLA compiles some twice
            seen.add(kernel)
            yield kernel


def _find(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"ptxas says nothing like {pattern!r}")
    return found.groups()


def _conditions(jaxpr: Any) -> int:
    """Those of a function.

    Not those inside kernels; nor choices between platforms, which are made before compiling.
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
    """How many command buffers there are, and what stands beside them."""
    # Where nothing was grouped, only the first of the two is there.
    names = ("thunk_sequence.txt", "thunk_sequence_after_thunk_passes.txt")
    *_, path = (p for name in names for p in files if p.name.endswith(name))
    top = [re.match(r"(?:\d+: )?(k\w+)", line) for line in path.read_text().splitlines()]
    kinds = [match[1] for match in top if match is not None]
    outside = dict.fromkeys(kind for kind in kinds if kind != "kCommandBuffer")
    return kinds.count("kCommandBuffer"), tuple(outside)
