"""Expected times of kernels on a GPU, from bytes, operations and counts.

All constants are assumptions, because no kernel of this project has been timed on a GPU. Memory
traffic, matrix products and other operations overlap within a kernel, so the slowest of the three
determines its time. Kernels do not overlap each other. No kernel finds its inputs in a cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.aot.hlo import Kernel
from forge_jax.step.targets import Target

# Part of the published bandwidth that a large copy on the GPU reaches. Typical figures for A100 and
# H100 are 0.88 to 0.93.
BANDWIDTH_PART = 0.9
# Part of the published matrix throughput that a large product reaches. Typical for cuBLAS on H100.
PRODUCT_PART = 0.7
# Time from the end of a kernel of a CUDA graph to the work of the next one. Empty kernels on an
# H100 take 1.3 us each (Hazy Research, "Look Ma, No Bubbles!", 2025).
GRAPH_GAP_S = 1.3e-6
# A kernel starts and ends with reads that wait for memory: two of about 480 cycles on an H100 (Luo
# et al. 2024, arXiv:2402.13499).
MEMORY_WAIT_S = 0.6e-6
KERNEL_S = GRAPH_GAP_S + MEMORY_WAIT_S
# The cost model in NCCL's `tuning.cc` for small collectives on one host: LL protocol, ring.
# It has a base time, a time per step over NVLink or PCIe, and a part of the bandwidth.
COLLECTIVE_S = 6.6e-6
NVLINK_STEP_S, PCIE_STEP_S = 0.6e-6, 1.0e-6
COLLECTIVE_PART = 0.25
# Operations of dense 16-bit matrix products per cycle and multiprocessor, with float32 sums, from
# NVIDIA's architecture white papers.
PRODUCTS_PER_CYCLE = {(8, 0): 2048, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 512}
LEAST_PRODUCTS_PER_CYCLE = 512
# Bytes per second and direction between GPUs of one host, from NVIDIA's data sheets. Unlisted
# devices have PCIe 4.0 x16.
NVLINK = {"h200": 450e9, "a100": 300e9, "b200": 900e9}
PCIE = {"rtx5090": 64e9}
PCIE_4 = 32e9

ASSUMPTIONS = {
    "bandwidth_part": BANDWIDTH_PART,
    "product_part": PRODUCT_PART,
    "graph_gap_s": GRAPH_GAP_S,
    "memory_wait_s": MEMORY_WAIT_S,
    "collective_s": COLLECTIVE_S,
    "nvlink_step_s": NVLINK_STEP_S,
    "pcie_step_s": PCIE_STEP_S,
    "collective_part": COLLECTIVE_PART,
}


@dataclass(frozen=True)
class Device:
    """The published limits of a GPU: bytes per second and operations per second."""

    key: str
    bandwidth: float
    products: float
    operations: float  # one per lane and cycle

    @classmethod
    def of(cls, target: Target) -> Device:
        per_cycle = PRODUCTS_PER_CYCLE.get(target.gpu.capability, LEAST_PRODUCTS_PER_CYCLE)
        cycles = target.cores * target.clock_hz
        return cls(target.key, target.bandwidth, per_cycle * cycles, target.lanes * cycles)

    @property
    def link(self) -> tuple[float, float]:
        """Bytes per second to another GPU, and the seconds of one step of a collective."""
        if self.key in NVLINK:
            return NVLINK[self.key], NVLINK_STEP_S
        return PCIE.get(self.key, PCIE_4), PCIE_STEP_S

    def busy_s(self, moved: float, multiplied: float = 0.0, computed: float = 0.0) -> float:
        """Return the time that a kernel works, without its start and end.

        Args:
          moved: bytes read and written.
          multiplied: operations of matrix products.
          computed: other operations.
        """
        return max(
            moved / (BANDWIDTH_PART * self.bandwidth),
            multiplied / (PRODUCT_PART * self.products),
            computed / self.operations,
        )

    def collective_s(self, kind: str, num_bytes: float, shards: int) -> float:
        """Return the time of a collective of `shards` GPUs, each of which sends `num_bytes`."""
        rate, step_s = self.link
        steps = (2 if kind == "all-reduce" else 1) * (shards - 1)
        # Per ring step, an all-reduce sends 1/N of the array, an all-gather one shard.
        sent = num_bytes / shards if kind == "all-reduce" else num_bytes
        return COLLECTIVE_S + steps * (step_s + sent / (COLLECTIVE_PART * rate))


@dataclass(frozen=True)
class Attention:
    """The work of the attention kernels in one layer, from their plan.

    Attributes:
      read, written: bytes of the kernel that reads the cache.
      sum_read, sum_written: bytes of the kernel that adds partial results.
      multiplied: operations of matrix products.
    """

    read: float
    written: float
    sum_read: float
    sum_written: float
    multiplied: float


NO_ATTENTION = Attention(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Totals:
    """The cost of several kernels.

    Attributes:
      moved: bytes read and written.
      busy_s: time of the kernels without their starts and ends.
      start_s: time of the starts and ends.
      collective_s: time of collectives.
    """

    kernels: float = 0.0
    collectives: float = 0.0
    moved: float = 0.0
    busy_s: float = 0.0
    start_s: float = 0.0
    collective_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.busy_s + self.start_s + self.collective_s

    def plus(self, other: Totals, times: float = 1.0) -> Totals:
        mine, theirs = asdict(self), asdict(other)
        return Totals(**{name: mine[name] + times * theirs[name] for name in mine})


def kernel_cost(kernel: Kernel, device: Device, attention: Attention, shards: int = 1) -> Totals:
    """Return the cost of one kernel, or nothing if it runs only when a row requests it."""
    if kernel.asked:
        return Totals()
    if kernel.collective is not None:
        sent = sum(kernel.reads.values())
        taken_s = device.collective_s(kernel.collective, sent, shards)
        return Totals(collectives=1, moved=2 * sent, collective_s=taken_s)
    moved, multiplied = kernel.moved, kernel.multiplied
    if "/forge_attention_sum/" in kernel.scope:
        moved = attention.sum_read + attention.sum_written
    elif "/forge_attention/" in kernel.scope:
        moved, multiplied = attention.read + attention.written, attention.multiplied
    busy_s = device.busy_s(moved, multiplied, kernel.computed)
    return Totals(kernels=1, moved=moved, busy_s=busy_s, start_s=KERNEL_S)


def step_cost(
    kernels: Iterable[Kernel],
    device: Device,
    attention: Attention,
    *,
    layers: int,
    compiled: int,
    unit: int = 1,
    shards: int = 1,
) -> Totals:
    """Return the cost of a step of `layers` layers, from the kernels of one with `compiled`.

    Layers repeat every `unit` layers. The first and the last ones share kernels with the rest of
    the step, so the second unit is the one that is repeated.
    """
    every = middle = Totals()
    for kernel in kernels:
        cost = kernel_cost(kernel, device, attention, shards)
        every = every.plus(cost)
        if kernel.layer is not None and unit <= kernel.layer < 2 * unit:
            middle = middle.plus(cost)
    return every.plus(middle, times=(layers - compiled) / unit)


def attention_s(device: Device, attention: Attention) -> float:
    """Return the time of the two kernels of attention."""
    read = device.busy_s(attention.read + attention.written, attention.multiplied)
    return 2 * KERNEL_S + read + device.busy_s(attention.sum_read + attention.sum_written)


def device_named(name: str) -> Any:
    """Return the Device whose NVIDIA name a `jax.Device` has, or None."""
    from forge_jax.step.targets import TARGETS

    for key in TARGETS:
        target = Target.read(key)
        if name.startswith(target.name):
            return Device.of(target)
    return None
