"""The registers of the GPU kernel for few rows, which Pallas' interpreter does not simulate.

Registers of all threads hold the places of their elements in the array. The kernel's own code moves
them. The layouts of `mma` are compared with the PTX ISA ("Matrix Fragments for mma.m16n8k16 with
floating point type"). The PTX of the conversion runs in a small interpreter.
"""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import Replicated
from jax.experimental.pallas import mosaic_gpu as plgpu

from forge_kernels.linear import mosaic_gpu
from forge_kernels.linear.tiles import DEPTH, GROUPS, MOST_ROWS, TILE

LANES = np.arange(128) % 32
WARPS = np.arange(128) // 32
FLOATS = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
SIZES = [(values, size) for values, sizes in GROUPS.items() for size in sizes]
FORMS = pytest.mark.parametrize(("values", "size"), SIZES)


def places(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of registers, each i32[threads, elements, axes of the array]."""
    layout = layout.to_mgpu()
    registers = np.empty(layout.registers_shape(shape), object)
    for index in np.ndindex(registers.shape):
        tiled = [np.full((128, layout.vector_length), i) for i in index]
        for ids, dims in ((WARPS, layout.warp_dims), (LANES, layout.lane_dims)):
            rest = ids[:, None]
            for dim in reversed(dims):
                size = dim.times if isinstance(dim, Replicated) else layout.tiled_tiling_shape[dim]
                if not isinstance(dim, Replicated):
                    tiled[dim] = tiled[dim] + rest % size
                rest = rest // size
        tiled[layout.vector_dim] = tiled[layout.vector_dim] + np.arange(layout.vector_length)
        registers[index] = np.stack(layout.tiling.untile_indices(tuple(tiled)), -1)
    return registers


def part(register: np.ndarray, elements: slice) -> np.ndarray:
    return register[:, elements]


def pairs_of(register: np.ndarray) -> list[np.ndarray]:
    return [part(register, slice(at, at + 2)) for at in range(0, register.shape[1], 2)]


def joined(registers: np.ndarray) -> np.ndarray:
    """Return [threads, registers, elements, axes]."""
    return np.stack(list(registers.flat), 1)


def left(dtype: Any, values: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the operand's registers, and the places in memory of their contents."""
    own = places(plgpu.Layout.MMA_LHS(dtype), (TILE, size))
    made = np.empty(own.shape, object)
    by_lane = mosaic_gpu.values_by_lane(mosaic_gpu.LANES[values])
    mosaic_gpu.fill_left(made, places(by_lane, (TILE, size)), pairs_of)
    return joined(own), joined(made)


def right(dtype: Any, values: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    own = places(plgpu.Layout.MMA_RHS(dtype), (size, MOST_ROWS))
    made = np.empty(own.shape, object)
    lane = mosaic_gpu.LANES[values]
    source = places(mosaic_gpu.inputs_by_lane(lane), (size, MOST_ROWS))
    mosaic_gpu.fill_right(made, source, lane, part)
    return joined(own), joined(made)


def order(own: np.ndarray, made: np.ndarray, axis: int) -> np.ndarray:
    """Return the input at each position along an operand's axis of inputs."""
    # Each element is of the row, or of the column of x^T, where it is placed.
    np.testing.assert_array_equal(own[..., 1 - axis], made[..., 1 - axis])
    at, inputs = own[..., axis].ravel(), made[..., axis].ravel()
    found = np.empty(at.max() + 1, int)
    found[at] = inputs
    np.testing.assert_array_equal(found[at], inputs)  # holds in every thread and row
    np.testing.assert_array_equal(np.sort(found), np.arange(len(found)))  # each input once
    return found


def check_operands(dtype: Any, values: str, size: int) -> None:
    orders = order(*left(dtype, values, size), 1), order(*right(dtype, values, size), 0)
    np.testing.assert_array_equal(*orders)
    # The order stays within the inputs of four lanes.
    width = 4 * mosaic_gpu.LANES[values]
    np.testing.assert_array_equal(orders[0] // width, np.arange(size) // width)


@FLOATS
@FORMS
def test_operands_have_the_same_inputs_in_the_same_order(dtype, values, size):
    check_operands(dtype, values, size)


@pytest.mark.parametrize("name", ["fill_left", "fill_right"])
@pytest.mark.parametrize("values", GROUPS)
def test_a_swap_of_two_registers_is_found(monkeypatch, name, values):
    fill = getattr(mosaic_gpu, name)

    def swapped(made, *rest):
        fill(made, *rest)
        flat = made.reshape(-1)
        flat[0], flat[1] = flat[1], flat[0]

    monkeypatch.setattr(mosaic_gpu, name, swapped)
    with pytest.raises(AssertionError):
        check_operands(jnp.bfloat16, values, 64)


@FLOATS
def test_the_layouts_are_those_of_the_instruction(dtype):
    """JAX passes the registers of a tile to the instruction in the order of `flatten`."""
    group, lane = LANES[:, None] // 4, LANES[:, None] % 4
    warp = 16 * WARPS[:, None]

    def check(layout: Any, shape: tuple[int, int], row: np.ndarray, column: np.ndarray) -> None:
        got = joined(places(layout, shape)).reshape(128, -1, 2)
        want = np.stack(np.broadcast_arrays(row, column), -1)
        np.testing.assert_array_equal(got, want)

    i = np.arange(8)
    a_row = warp + group + 8 * (i // 2 % 2)
    check(plgpu.Layout.MMA_LHS(dtype), (TILE, 16), a_row, 2 * lane + i % 2 + 8 * (i // 4))
    i = np.arange(4)
    check(plgpu.Layout.MMA_RHS(dtype), (16, 8), 2 * lane + i % 2 + 8 * (i // 2), group)
    check(plgpu.Layout.MMA_ACC(dtype), (TILE, 8), warp + group + 8 * (i // 2), 2 * lane + i % 2)


@FLOATS
@FORMS
@pytest.mark.parametrize("factor", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_factors_are_those_of_the_rows_of_sums(dtype, values, size, factor):
    groups = DEPTH[values] // size
    layout = mosaic_gpu.factors_by_row(groups, factor)
    length = layout.to_mgpu().vector_length
    own = places(plgpu.Layout.MMA_ACC(dtype).reduce(1), (TILE,))
    for group in range(groups):
        made = np.empty(own.shape, object)
        source = places(layout, (TILE, groups))
        mosaic_gpu.fill_column(made, source, group, length, part)
        got = joined(made)
        np.testing.assert_array_equal(got[..., :1], joined(own))
        assert (got[..., 1] == group).all()


@pytest.mark.parametrize("count", [4, 8])
def test_numbers_become_floats_in_their_places(count):
    bytes_of, floats = (
        places(mosaic_gpu.factors_by_row(count, dtype), (TILE, count))
        for dtype in (jnp.int8, jnp.bfloat16)
    )
    np.testing.assert_array_equal(joined(bytes_of), joined(floats))


def execute(ptx: str, word: np.ndarray, dtype: Any) -> np.ndarray:
    """Run the instructions of a conversion, and return u32 of $0."""
    values: dict[str, np.ndarray] = {"$1": word, "$2": word >> np.uint32(4)}

    def read(name: str) -> np.ndarray:
        return values[name] if name in values else np.full(len(word), int(name, 0), np.uint32)

    def halves(word: np.ndarray) -> np.ndarray:
        return word.view(np.uint16).view(dtype).astype(np.float64)

    _, instructions = ptx.split("minus;", 1)  # the declaration ends there
    for name, operands in re.findall(r"(\w+(?:\.\w+)+) ([^;]+);", instructions):
        target, *sources = operands.split(", ")
        match name, [read(s) for s in sources]:
            case "mov.b32", [a]:
                values[target] = a
            case "prmt.b32", [a, b, selector]:
                data = np.stack([a, b], 1).view(np.uint8)
                picked = [int(selector[0]) >> (4 * i) & 15 for i in range(4)]
                assert max(picked) < 8  # no copies of sign bits
                values[target] = np.ascontiguousarray(data[:, picked]).view(np.uint32)[:, 0]
            case "and.b32", [a, b]:
                values[target] = a & b
            case "xor.b32", [a, b]:
                values[target] = a ^ b
            case "lop3.b32", [a, b, c, table]:
                result = np.zeros_like(a)
                for bit in np.arange(32, dtype=np.uint32):
                    number = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
                    result |= (table >> number & 1) << bit
                values[target] = result
            case "fma.rn.bf16x2" | "fma.rn.f16x2", [a, b, c]:
                assert ("bf16" in name) == (dtype == jnp.bfloat16)
                total = (halves(a) * halves(b) + halves(c)).astype(dtype)
                values[target] = total.view(np.uint32)
            case _:
                raise AssertionError(f"{name} is not simulated")
    return values["$0"]


def two(register: np.ndarray, dtype: Any) -> np.ndarray:
    return register.view(np.uint16).view(dtype).reshape(-1, 2).astype(np.float64)


@FLOATS
@pytest.mark.parametrize("raised", [False, True])
def test_conversion_makes_the_numbers_in_order(dtype, raised):
    numbers = np.random.default_rng(0).integers(-8, 8, (512, mosaic_gpu.LANES["int4"]))
    numbers[:16] = np.arange(-8, 8)[:, None]
    # Stored as JAX stores them.
    words = np.asarray(lax.bitcast_convert_type(jnp.asarray(numbers, jnp.int4), jnp.uint32))
    offset = mosaic_gpu.OFFSETS[jnp.dtype(dtype).name][1] if raised else 0
    for pair in range(mosaic_gpu.LANES["int4"] // 2):
        got = two(execute(mosaic_gpu.int4_to_float(pair, dtype, raised), words, dtype), dtype)
        np.testing.assert_array_equal(got, numbers[:, 2 * pair : 2 * pair + 2] + offset)


@FLOATS
def test_conversion_of_bytes_is_exact(dtype):
    numbers = np.stack([np.roll(np.arange(-128, 128, dtype=np.int8), by) for by in range(4)], 1)
    words = numbers.view(np.uint32)[:, 0]
    for pair in range(mosaic_gpu.LANES["int8"] // 2):
        got = two(execute(mosaic_gpu.int8_to_float(pair, dtype), words, dtype), dtype)
        np.testing.assert_array_equal(got, numbers[:, 2 * pair : 2 * pair + 2])
