"""Products in AMX tiles: `amx.cc` with Intel's instructions emulated in software.

The CPU's own instructions do not run here; every build compiles them.
"""

import ctypes
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from forge_kernels.cpu import choice
from forge_kernels.cpu.build import find_compiler

HERE = Path(__file__).parent / "cpu_amx"
SOURCES = import_module("forge_kernels.cpu.build").SOURCES
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 70)
WORDS = (1, 7, 15, 16, 17, 32, 50)


def compiled(folder: Path, *changes: tuple[str, str]) -> ctypes.CDLL:
    """Compile `amx.cc`, with changes, on emulated instructions."""
    text = (SOURCES / "amx.cc").read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"amx.cc has changed: {old}"
        text = text.replace(old, new)
    (folder / "amx.cc").write_text(text)
    shutil.copy(SOURCES / "tiles.h", folder)
    for name in ("tile_instructions.h", "shim.cc"):
        shutil.copy(HERE / name, folder)
    command = [*find_compiler(), "-O1", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared"]
    sources = [folder / name for name in ("amx.cc", "shim.cc")]
    subprocess.run([*command, *sources, "-o", folder / "amx.so"], check=True)
    return ctypes.CDLL(str(folder / "amx.so"))


@pytest.fixture(scope="module")
def amx(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("amx"))


TYPES = {ml_dtypes.bfloat16: 0, np.uint8: 1, np.int8: 2}  # numbers in shim.cc


def multiply(amx: ctypes.CDLL, x: np.ndarray, w: np.ndarray, group: int = 0) -> np.ndarray:
    """Multiply x: 4 bytes along k in a word, [rows, words, 2 or 4]; w: [words, 32, 2 or 4].

    Args:
      group: the words of a sum; the result is [groups, rows, 32]. By default, all: [rows, 32].
    """
    rows, words = x.shape[:2]
    padded = np.zeros((rows, -(-words // 16) * 16), np.uint32)
    padded[:, :words] = x.view(np.uint32)[..., 0]
    blocks = [padded[r : r + 16] for r in range(0, rows, 16)]
    steps = [block.reshape(len(block), -1, 16).transpose(1, 0, 2).ravel() for block in blocks]
    packed, weights = np.concatenate(steps), np.ascontiguousarray(w)
    out = np.full((words // group if group else 1, rows, 32), 0xDEAD, np.uint32)
    amx.multiply(
        *(ctypes.c_void_p(array.ctypes.data) for array in (packed, weights)),
        *(ctypes.c_long(n) for n in (rows, words, group)),
        ctypes.c_int(TYPES[w.dtype.type]),
        ctypes.c_void_p(out.ctypes.data),
    )
    out = out.view(np.float32 if w.dtype == ml_dtypes.bfloat16 else np.int32)
    return out if group else out[0]


def bf16_by_the_manual(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Sum each 16 words, even and odd values separately from zero, then both, then the rest.

    Products and sums are separate, because a product of two bfloat16 is exact in float32 unless it
    is subnormal.
    """
    a, b = x.astype(np.float32), w.astype(np.float32)
    y = np.zeros((len(x), 32), np.float32)
    for first in range(0, x.shape[1], 16):
        sums = np.zeros((2, len(x), 32), np.float32)
        for k in range(first, min(first + 16, x.shape[1])):
            for i in range(2):
                sums[i] += a[:, k, i, None] * b[None, k, :, i]
        y += sums[0] + sums[1]
    return y


def bf16_case(rows: int, words: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([rows, words])
    x = rng.standard_normal((rows, words, 2)) * 2.0 ** rng.integers(-8, 8, (rows, words, 2))
    w = rng.standard_normal((words, 32, 2))
    return x.astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("words", WORDS)
def test_bfloat16_tiles_have_the_manuals_bits(amx, words):
    for rows in ROWS:
        x, w = bf16_case(rows, words)
        np.testing.assert_array_equal(multiply(amx, x, w), bf16_by_the_manual(x, w), f"{rows} rows")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("words", WORDS)
def test_int8_tiles_are_exact(amx, words, dtype):
    for rows in ROWS:
        x, w = int8_case(rows, words, dtype)
        want = np.einsum("rki,kni->rn", x.astype(np.int64), w.astype(np.int64))
        np.testing.assert_array_equal(multiply(amx, x, w), want, f"{rows} rows")


def int8_case(rows: int, words: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([rows, words])
    w = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, (words, 32, 4), dtype)
    return rng.integers(-128, 128, (rows, words, 4), np.int8), w


def sums_by_group(x: np.ndarray, w: np.ndarray, group: int) -> np.ndarray:
    rows, words = x.shape[:2]
    a = x.astype(np.int64).reshape(rows, words // group, -1)
    b = w.astype(np.int64).reshape(words // group, group, 32, 4)
    return np.einsum("rgk,gkn->grn", a, b.transpose(0, 1, 3, 2).reshape(words // group, -1, 32))


@pytest.mark.parametrize(
    ("words", "group"), [(4, 4), (12, 4), (16, 4), (20, 4), (64, 4), (8, 8), (16, 8), (72, 8)]
)
def test_groups_have_separate_sums(amx, words, group):
    for rows in ROWS:
        x, w = int8_case(rows, words, np.int8)
        got = multiply(amx, x, w, group)
        np.testing.assert_array_equal(got, sums_by_group(x, w, group), f"{rows} rows")


def test_row_bits_are_independent_of_other_rows(amx):
    x, w = bf16_case(70, 50)
    whole = multiply(amx, x, w)
    for rows in range(1, 70):
        np.testing.assert_array_equal(multiply(amx, x[:rows], w), whole[:rows])
    order = np.random.default_rng(0).permutation(70)
    np.testing.assert_array_equal(multiply(amx, x[order], w), whole[order])


def test_subnormal_numbers_flush_to_zero(amx):
    """On input and output, because TDPBF16PS ignores the processor's mode."""
    x, w = np.zeros((3, 1, 2), ml_dtypes.bfloat16), np.zeros((1, 32, 2), ml_dtypes.bfloat16)
    x[:, 0, 0], w[0, :, 0] = [2.0**-130, 2.0**-100, 2.0**-100], 2.0**-30
    w[0, 1, 0], w[0, 2, 0] = 2.0**120, 2.0**-26
    out = multiply(amx, x, w)
    assert not out[0].any()  # 2^-130 times anything
    assert out[1, 0] == 0 and out[1, 1] == 2.0**20 and out[1, 2] == np.float32(2.0**-126)


@pytest.mark.parametrize(
    "fault",
    [
        ("dot<weights, 3, 5, 7>();", "dot<weights, 3, 5, 6>();"),
        ("tile_load<7>(w + 64, 128);", "tile_load<7>(w + 32, 128);"),
        ("kStepBytes, left * 128);", "kStepBytes, left * 64);"),
    ],
    ids=["tile", "column", "tail"],
)
@pytest.mark.quick_cases(1)
def test_planted_fault_is_detected(tmp_path, fault):
    faulty = compiled(tmp_path, fault)
    x, w = bf16_case(40, 17)
    assert not np.array_equal(multiply(faulty, x, w), bf16_by_the_manual(x, w))


@pytest.mark.parametrize(
    "fault",
    [
        ("(x + word, below + word,", "(x + word, below,"),
        ("s * kStepBytes + word * 128);", "s * kStepBytes);"),
        ("      begin<lower>();\n", ""),
        ("block.second, s, sums);", "block.second, 0, sums);"),
    ],
    ids=["row", "weights", "sum", "step"],
)
@pytest.mark.quick_cases(1)
def test_planted_fault_in_groups_is_detected(tmp_path, fault):
    faulty = compiled(tmp_path, fault)
    x, w = int8_case(40, 24, np.int8)
    assert not np.array_equal(multiply(faulty, x, w, 8), sums_by_group(x, w, 8))


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_kernels")
def test_tiles_pass_the_kernel_checks(tmp_path):
    """Runs the whole library on emulated instructions, which multiply any number of rows."""
    from cpu_contract import digests
    from test_blocks import rounded_digests
    from test_cpu_build import child

    shutil.copytree(SOURCES, tmp_path / "src")
    shutil.copy(HERE / "tile_instructions.h", tmp_path / "src")
    result = child("--isa", "amx", "--sources", str(tmp_path / "src"), "--quick-build")
    assert result["failed"] == {}
    assert result["identity"].endswith("-amx-1-1")  # a part of the fingerprint
    assert result["rounded"] == rounded_digests()  # as without tiles, which were used
    assert result["products of groups"] > 0
    assert choice._are_tile_times(result["tile times"])
    mine = digests()
    same = {name for name, value in result["digests"].items() if mine.get(name) == value}
    whole_numbers = {name for name in mine if name.startswith(("int8", "int4"))}
    assert whole_numbers <= same  # int8 has the same bits as without tiles
    assert not {name for name in mine if name.startswith("bf16")} & same
