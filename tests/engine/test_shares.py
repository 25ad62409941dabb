"""The CPUs, GPUs and memory that each of several engine processes uses."""

import os

import pytest

from forge_jax.config.options import ParallelConfig
from forge_jax.engine.process import shares
from forge_jax.engine.process.shares import Share, share_of
from forge_jax.errors import ConfigError
from forge_jax.telemetry import memory

TWO = ParallelConfig(tensor_parallel=2)


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Set up a host with six GPUs, some of which `CUDA_VISIBLE_DEVICES` may hide."""
    for name in (*(f"nvidia{i}" for i in range(6)), "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(shares, "_DEV", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)


def visible(engine: int, num_engines: int, parallel: ParallelConfig) -> str:
    share = share_of(engine, num_engines, parallel)
    assert share.device == 0 and not share.cpus
    return share.environment["CUDA_VISIBLE_DEVICES"]


def test_each_engine_gets_the_next_gpus(gpus, monkeypatch):
    assert [visible(i, 3, TWO) for i in range(3)] == ["0,1", "2,3", "4,5"]
    assert visible(1, 2, ParallelConfig(device=3)) == "4"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-a,1,0")
    assert [visible(i, 2, TWO) for i in range(2)] == ["5,GPU-a", "1,0"]


def test_too_few_gpus_are_an_error(gpus):
    with pytest.raises(ConfigError, match=r"with 2 GPUs each.*needs 8 GPUs, but there are 6"):
        share_of(0, 4, TWO)


def test_cpus_are_divided_evenly(gpus, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5, 6, 8, 9})
    cpu = ParallelConfig(backend="cpu")
    found = [share_of(i, 3, cpu) for i in range(3)]
    assert [share.cpus for share in found] == [(2, 3), (4, 5), (6, 8, 9)]
    assert all(not share.environment and share.device is None for share in found)
    assert share_of(0, 8, cpu) == Share()
    assert share_of(0, 1, ParallelConfig()) == Share()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert share_of(0, 3, ParallelConfig()).cpus == (2, 3)


def test_host_memory_is_divided(monkeypatch):
    monkeypatch.setattr(memory, "host_bytes", lambda: (1000, 2000))
    monkeypatch.setattr(memory, "_sharers", 1)
    assert memory.available_host_bytes() == 1000
    memory.share_host_memory(4)
    assert memory.available_host_bytes() == 250
