"""Memory for host arrays: alignment, sharing, lifetime and huge pages."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_kernels import cpu, host_arrays
from forge_kernels.attention import cpu_ffi
from forge_kernels.host_arrays import ALIGNMENT, OWN_BYTES, aligned_empty, empty_weight

MIB = 1 << 20

with_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux has no huge pages here"
)


@pytest.fixture(autouse=True)
def slabs(monkeypatch: pytest.MonkeyPatch) -> host_arrays._Slabs:
    """Start with no slab, like a new process."""
    slabs = host_arrays._Slabs()
    monkeypatch.setattr(host_arrays, "_slabs", slabs)
    return slabs


def requests_huge_pages(address: int) -> bool:
    """Return True if the mapping of an address has been advised to use huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in rest
    raise LookupError(hex(address))


@pytest.mark.parametrize("empty", [aligned_empty, empty_weight])
@pytest.mark.parametrize("size", [0, 1, 100, OWN_BYTES // 4 - 1, OWN_BYTES // 4, OWN_BYTES])
def test_arrays_are_aligned_and_xla_adopts_them(empty, size):
    array = empty((size,), np.float32)
    assert array.shape == (size,) and array.flags.c_contiguous and array.flags.writeable
    assert array.ctypes.data % ALIGNMENT == 0 or size == 0
    array[...] = 1.0
    if size:
        adopted = jax.device_put(array, may_alias=True)
        assert adopted.unsafe_buffer_pointer() == array.ctypes.data


def test_arrays_of_several_threads_do_not_overlap():
    def fill(number: int) -> np.ndarray:
        array = empty_weight((number % 7 * 1000 + 1, 3), np.int32)
        array[...] = number
        return array

    with ThreadPoolExecutor(8) as threads:
        arrays = list(threads.map(fill, range(1000)))
    assert all((array == number).all() for number, array in enumerate(arrays))


def test_slab_is_freed_with_the_last_of_its_arrays(slabs):
    arrays = [empty_weight((MIB,), np.uint8) for _ in range(3)]
    memory = arrays[0]
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    slab = weakref.ref(memory.base.obj if isinstance(memory.base, memoryview) else memory.base)
    del memory
    slabs._rest = np.empty(0, np.uint8)  # the next slab has begun
    while arrays:
        gc.collect()
        assert slab() is not None
        arrays.pop()
    gc.collect()
    assert slab() is None


@with_huge_pages
def test_small_arrays_are_next_to_each_other_in_huge_pages():
    one, two = (empty_weight((MIB // 2 + 1,), np.uint8) for _ in range(2))
    assert two.ctypes.data - one.ctypes.data == MIB // 2 + ALIGNMENT
    assert one.ctypes.data % (2 * MIB) == 0
    assert requests_huge_pages(one.ctypes.data)


def test_system_without_huge_pages_has_arrays(monkeypatch):
    class Memory(host_arrays.mmap.mmap):
        def madvise(self, *_):
            raise OSError("no huge pages")

    monkeypatch.setattr(host_arrays.mmap, "mmap", Memory)
    array = empty_weight((1000,), np.uint8)
    array[...] = 1
    assert not requests_huge_pages(array.ctypes.data)
    monkeypatch.delattr(host_arrays.mmap, "MADV_HUGEPAGE")
    monkeypatch.setattr(host_arrays, "_slabs", host_arrays._Slabs())
    other = empty_weight((1000,), np.uint8)
    other[...] = 2
    assert (array == 1).all() and other.ctypes.data % ALIGNMENT == 0


@with_huge_pages
@pytest.mark.skipif(not cpu.available(), reason="no CPU kernels on this machine")
def test_kv_cache_requests_huge_pages():
    cpu.load()
    shape = jax.ShapeDtypeStruct((64, MIB), jnp.uint8)
    cache = jax.jit(lambda: cpu_ffi.untouched(shape))()
    assert requests_huge_pages(cache.unsafe_buffer_pointer() + 2 * MIB)
