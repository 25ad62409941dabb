"""Memory, utilization, temperature and power of NVIDIA GPUs, as NVML reports them.

NVML counts all processes on a GPU. It reads the driver, so no CUDA context is created.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from types import ModuleType
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forge_serve.openapi.payload import Payload

log = logging.getLogger(__name__)

LEAST_S = 1.0  # minimum time between two reads; the driver averages utilization over this time


class GpuAnswer(Payload, kw_only=True):
    """GPU that the server can use. Values that the GPU does not report are null."""

    index: int
    name: str
    memory_used_bytes: int
    memory_total_bytes: int
    utilization: float | None
    temperature_celsius: int | None
    power_watts: float | None


class Gpus:
    """GPUs that CUDA can use, by `CUDA_VISIBLE_DEVICES`; empty without NVML.

    Attributes:
      latest: the states of the latest `read`.
    """

    def __init__(self) -> None:
        self.latest: list[GpuAnswer] = []
        self._next_s = 0.0
        self._lock = threading.Lock()

    def read(self) -> list[GpuAnswer]:
        """Return the states, at most `LEAST_S` old. Thread-safe.

        The first call loads NVML, which can take a second. Later calls take milliseconds.
        """
        with self._lock:
            if time.monotonic() >= self._next_s:
                states = (_state(self._nvml, *gpu) for gpu in self._devices)
                self.latest = [state for state in states if state is not None]
                self._next_s = time.monotonic() + LEAST_S
            return self.latest

    @cached_property
    def _nvml(self) -> ModuleType | None:
        return _load()

    @cached_property
    def _devices(self) -> list[tuple[int, Any]]:
        return [] if self._nvml is None else _visible(self._nvml)


class GpuCollector(Collector):
    """Collector of the `forge:gpu_...` series from the latest read."""

    def __init__(self, gpus: Gpus):
        self._gpus = gpus

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, (doc, value) in _SERIES.items():
            family = GaugeMetricFamily(f"forge:gpu_{name}", doc, labels=["gpu", "name"])
            for state in self._gpus.latest:
                if (found := value(state)) is not None:
                    family.add_metric([str(state.index), state.name], found)
            if family.samples:
                yield family


_SERIES: dict[str, tuple[str, Callable[[GpuAnswer], float | None]]] = {
    "memory_used_bytes": (
        "Memory of the GPU that all processes use",
        lambda gpu: gpu.memory_used_bytes,
    ),
    "memory_total_bytes": ("Memory of the GPU", lambda gpu: gpu.memory_total_bytes),
    "utilization_ratio": (
        "Fraction of the last second in which a kernel was running, from 0 to 1",
        lambda gpu: gpu.utilization,
    ),
    "temperature_celsius": ("Temperature of the GPU", lambda gpu: gpu.temperature_celsius),
    "power_watts": ("Power draw of the GPU", lambda gpu: gpu.power_watts),
}


def _load() -> ModuleType | None:
    """Return NVIDIA's binding of NVML, initialized; None without the binding or the driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.debug("NVML is not available: %s", error)
        return None
    return pynvml


def _visible(nvml: ModuleType) -> list[tuple[int, Any]]:
    """Return NVML's index and handle of each GPU in `CUDA_VISIBLE_DEVICES`; default: all.

    Like CUDA, it stops at the first entry that is not a GPU. MIG devices are not supported.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(enumerate(handles))
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    visible = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isdecimal():
            found = [int(entry)] if int(entry) < len(handles) else []
        else:
            found = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(found) != 1:
            break
        visible.append((found[0], handles[found[0]]))
    return visible


def _state(nvml: ModuleType | None, index: int, handle: Any) -> GpuAnswer | None:
    """Return a GPU's state; None if the GPU is lost."""
    assert nvml is not None

    def value(read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(handle, *arguments)
        except nvml.NVMLError_NotSupported:
            return None

    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        rates = value(nvml.nvmlDeviceGetUtilizationRates)
        milliwatts = value(nvml.nvmlDeviceGetPowerUsage)
        return GpuAnswer(
            index=index,
            name=nvml.nvmlDeviceGetName(handle),
            memory_used_bytes=memory.used,
            memory_total_bytes=memory.total,
            utilization=None if rates is None else rates.gpu / 100,
            temperature_celsius=value(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            power_watts=None if milliwatts is None else milliwatts / 1000,
        )
    except nvml.NVMLError as error:
        log.debug("NVML cannot read GPU %d: %s", index, error)
        return None
