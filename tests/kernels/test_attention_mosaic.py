"""GPU attention in Pallas' interpreter, against the contract of `test_attention`.

The interpreter simulates memory spaces, barriers and copies, and detects races. It is slow, so the
cases are small. Only `tests/aot` can show that the kernels compile, and only a GPU that the tensor
cores work as modeled.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from forge_kernels.attention import api, ragged_paged_attention
from forge_kernels.attention.mosaic_gpu import unsupported
from forge_kernels.devices import HOPPER, Gpu, described

pytestmark = [pytest.mark.long, pytest.mark.slow]

GPUS = (HOPPER, Gpu((8, 0), 108), Gpu((12, 0), 170))
CHILD = Path(__file__).with_name("mosaic_child.py")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kernel", ["wgmma", "mma"])
@pytest.mark.parametrize(
    "group",
    [
        *("bits", "some cases", "some quantized", "some faults"),
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("cases", "quantized", "faults")),
    ],
)
def test_interpreted_kernels_keep_the_contract(kernel, group):
    """`wgmma` is the kernel for Hopper, `mma` the one for other GPUs, as compiled for an A100.

    The group `faults` checks that each fault planted into the kernels is detected.
    """
    environment = os.environ | {"NPROC": "32", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(CHILD), kernel, group], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["seconds"], "nothing has run"
    assert result["failed"] == {}


def test_unsupported_kernel_inputs_are_named_in_the_error():
    bf16, f32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    assert unsupported(32, 8, 128, 64, bf16, bf16) is None
    assert "head dim must be one of 64, 80, 96, 128, 256, not 72" in unsupported(
        32, 8, 72, 64, bf16, bf16
    )
    assert "block size must be a multiple of 8, not 20" in unsupported(32, 8, 128, 20, bf16, bf16)
    assert "float32" in unsupported(32, 8, 128, 64, f32, f32)
    assert "uint16" in unsupported(32, 8, 128, 64, bf16, jnp.dtype(jnp.uint16))
    for of_8_bits in (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)):
        assert unsupported(32, 8, 256, 8, bf16, of_8_bits) is None
        assert "float32" in unsupported(32, 8, 128, 64, f32, of_8_bits)
    # The raw bits of a supported type are not that type.
    assert "cache of uint8" in unsupported(32, 8, 128, 64, bf16, jnp.dtype(jnp.uint8))
    assert "71 query heads" in unsupported(71, 1, 128, 64, bf16, bf16)
    # Before sm_90, threads copy blocks, and there must be enough for all of them.
    a100, l4 = Gpu((8, 0), 108), Gpu((8, 9), 58)
    assert unsupported(32, 8, 128, 16, bf16, bf16, a100) is None
    for size in (32, 64):
        assert unsupported(32, 8, 80, size, bf16, bf16, a100) is None
    assert "multiple of 32, not 16" in unsupported(32, 8, 80, 16, bf16, bf16, a100)
    int8, f16 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float16)
    assert unsupported(32, 8, 128, 128, bf16, int8, a100) is None
    assert "multiple of 64, not 32" in unsupported(32, 8, 128, 32, bf16, int8, a100)
    b200, rtx5090 = Gpu((10, 0), 148), Gpu((12, 0), 170)
    for device in (a100, b200, rtx5090):
        assert unsupported(32, 8, 128, 64, bf16, int8, device) is None
        assert "multiple of 64, not 16" in unsupported(32, 8, 128, 16, bf16, int8, device)
    assert unsupported(32, 8, 256, 64, f16, int8, a100) is None
    assert "bytes of shared memory" in unsupported(32, 8, 256, 64, f16, int8, l4)
    assert unsupported(32, 8, 256, 64, bf16, int8, l4) is None
    q, kv = jnp.zeros((2, 4, 72), jnp.bfloat16), jnp.zeros((3, 2, 2, 16, 72), jnp.bfloat16)
    lengths = jnp.ones(1, jnp.int32)
    with pytest.raises(TypeError, match="do not support this attention: the head dim must be"):
        ragged_paged_attention(
            q,
            kv,
            jnp.zeros((1, 1), jnp.int32),
            lengths,
            jnp.arange(2, dtype=jnp.int32),
            jnp.int32(1),
            sm_scale=1.0,
            implementation="mosaic",
        )


@pytest.mark.parametrize("device", GPUS)
def test_auto_uses_the_kernels_on_gpus_and_reports_exceptions_once(device, monkeypatch, caplog):
    monkeypatch.setattr(api, "_say_once", functools.cache(api._say_once.__wrapped__))

    def traced(head_dim: int, dtype=jnp.bfloat16) -> str:
        q, kv = jnp.zeros((2, 4, head_dim), dtype), jnp.zeros((3, 2, 2, 16, head_dim), dtype)
        table, lengths = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
        call = functools.partial(ragged_paged_attention, sm_scale=1.0)
        rows = jnp.arange(2, dtype=jnp.int32)
        with described(device):
            return str(jax.make_jaxpr(call)(q, kv, table, lengths, rows, jnp.int32(1)))

    with caplog.at_level("WARNING"):
        assert "forge_attention" in traced(64)
        assert not caplog.records
        assert "forge_attention" not in traced(72)
        assert "forge_attention" not in traced(72)
    assert len(caplog.records) == 1
    assert "the head dim must be one of 64, 80" in caplog.text
    assert "forge_attention" not in traced(64, jnp.float32)


@pytest.mark.parametrize("capability", [(7, 5), (7, 0)])
def test_auto_uses_plain_xla_on_older_gpus(capability):
    q, kv = jnp.zeros((2, 4, 64), jnp.bfloat16), jnp.zeros((3, 2, 2, 16, 64), jnp.bfloat16)
    arrays = (q, kv, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    call = functools.partial(ragged_paged_attention, sm_scale=1.0)
    with described(Gpu(capability, 40)):
        traced = jax.make_jaxpr(call)(*arrays, jnp.arange(2, dtype=jnp.int32), jnp.int32(1))
    assert "forge_attention" not in str(traced)


@pytest.mark.parametrize("device", GPUS)
def test_windows_and_soft_caps_reach_the_kernels(device):
    q, kv = jnp.zeros((2, 4, 64), jnp.bfloat16), jnp.zeros((3, 2, 2, 16, 64), jnp.bfloat16)
    arrays = (q, kv, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    arrays += (jnp.arange(2, dtype=jnp.int32), jnp.int32(1))

    def traced(**options) -> str:
        call = functools.partial(ragged_paged_attention, sm_scale=1.0, **options)
        with described(device):
            return str(jax.make_jaxpr(call)(*arrays))

    assert all("forge_attention" in traced(**o) for o in ({}, {"window": 70}, {"soft_cap": 2.0}))
    assert "70:u32" in traced(window=70)
    assert "70:u32" not in traced()
    assert "tanh" in traced(soft_cap=2.0)
    assert "tanh" not in traced()
