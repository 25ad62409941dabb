"""Matrices that C++ reads from files and packs: the same bits as in Python."""

import ml_dtypes
import numpy as np
import pytest

from forge_kernels import cpu
from forge_kernels.linear import FORMATS, Packing, files, pack, packed
from forge_kernels.linear.files import (
    TYPES,
    PackedInFiles,
    PlainInFiles,
    ShortFileError,
    Stretch,
    read_files,
)

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def kernels():
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")


def write(folder, pieces):
    stretches = []
    for index, piece in enumerate(pieces):
        file = folder / f"{index % 2}.bin"
        offset = file.stat().st_size if file.exists() else 0
        with file.open("ab") as stream:
            stream.write(b"x" + piece.tobytes())  # at odd offsets
        stretches.append(Stretch(file, piece.dtype, offset + 1, len(piece)))
    return stretches


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_rows_match_pack(dtype, form, paired, tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    monkeypatch.setattr(packed, "CHUNK_BYTES", 32 * 99 * 2 * 2)  # two panels
    for number, (outputs, inputs) in enumerate([(200, 99), (34, 7), (64, 128), (2, 40)]):
        w = rng.standard_normal((outputs, inputs)).astype(dtype)
        (folder := tmp_path / str(number)).mkdir()
        stretches = write(folder, np.split(w, [outputs // 5, outputs // 2]))
        packing = Packing(form, outputs, inputs, paired)
        [(weight, scale)] = read_files([PackedInFiles(packing, [stretches])])
        want, want_scale = pack(w.astype(BF16), packing)
        np.testing.assert_array_equal(weight, want)
        if scale is None or want_scale is None:
            assert scale is None and want_scale is None
        else:
            np.testing.assert_array_equal(scale, want_scale)


def test_several_arrays_are_read_by_one_call(tmp_path, monkeypatch):
    rng = np.random.default_rng(2)
    monkeypatch.setattr(files, "CHUNK_BYTES", 64)
    experts = rng.standard_normal((3, 40, 24)).astype(BF16)
    matrix, vector = rng.standard_normal((9, 5)), rng.standard_normal(33).astype(np.float32)
    packing = Packing("int4", 40, 24, paired=True, experts=3)
    found = read_files(
        [
            PackedInFiles(packing, [[s] for s in write(tmp_path, experts)]),
            PlainInFiles((9, 5), matrix.dtype, write(tmp_path, np.split(matrix, [2]))),
            PlainInFiles((33,), vector.dtype, write(tmp_path, [vector])),
            PlainInFiles((0,), vector.dtype, ()),
        ]
    )
    for number, expert in enumerate(experts):
        weight, scale = pack(expert, Packing("int4", 40, 24, paired=True))
        np.testing.assert_array_equal(found[0][0][number], weight)
        np.testing.assert_array_equal(found[0][1][number], scale)
    np.testing.assert_array_equal(found[1][0], matrix)
    np.testing.assert_array_equal(found[2][0], vector)
    assert found[3][0].size == 0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rounding_matches_ml_dtypes_for_every_kind_of_number(dtype, tmp_path):
    if dtype == "float16":
        values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    else:
        halves = np.arange(2**16, dtype=np.uint32)
        low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        values = (halves[:, None] << 16 | low).reshape(-1).view(np.float32)
    rows = values.reshape(64, -1)
    packing = Packing("bf16", *rows.shape)
    [(weight, _)] = read_files([PackedInFiles(packing, [write(tmp_path, [rows])])])
    with np.errstate(all="ignore"):
        want, _ = pack(rows.astype(BF16), packing)
    np.testing.assert_array_equal(weight, want)


def test_truncated_file_is_named_in_the_error(tmp_path):
    w = np.ones((64, 8), BF16)
    stretches = write(tmp_path, [w, w])
    stretches[1].file.write_bytes(b"x")
    packing = Packing("bf16", 128, 8)
    with pytest.raises(ShortFileError, match=r"1\.bin") as caught:
        read_files([PackedInFiles(packing, [stretches])])
    assert caught.value.file == stretches[1].file


def test_unreadable_file_raises_an_os_error(tmp_path):
    stretches = [Stretch(tmp_path, BF16, 0, 64)]
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read_files([PackedInFiles(Packing("bf16", 64, 8), [stretches])])
    missing = [Stretch(tmp_path / "missing", BF16, 0, 64)]
    with pytest.raises(FileNotFoundError, match="missing"):
        read_files([PackedInFiles(Packing("bf16", 64, 8), [missing])])
