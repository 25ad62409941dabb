"""PyTorch .bin files: read without torch, and without executing any opcode."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import time
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch_writer as writer
from torch_writer import (
    MARK,
    PROTO,
    REDUCE,
    STOP,
    TUPLE,
    integer,
    program,
    storage,
    string,
    tensor,
    write_archive,
)

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint import torch_bin
from forge_jax.checkpoint.folder import open_checkpoint
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.checkpoint.torch_bin import read_bin
from forge_jax.errors import CheckpointError
from forge_jax.models import build_model

ONE = storage("FloatStorage", "0", 6)  # six floats
SIX = np.arange(6, dtype=np.float32)


@pytest.fixture
def model_folder(tmp_path, goldens):
    (tmp_path / "config.json").write_text((goldens / "llama2" / "config.json").read_text())
    return tmp_path


@pytest.fixture
def tensors(goldens):
    stored = read_header(goldens / "llama2" / "model.safetensors")
    return {name: np.array(tensor.read()) for name, tensor in stored.items()}


@pytest.fixture
def bin_of(tmp_path):
    """Return a function that writes an archive of one pickle and one storage of six floats."""

    def write(pickle: bytes, **options):
        path = tmp_path / "pytorch_model.bin"
        return write_archive(path, pickle, {"0": SIX.tobytes()}, **options)

    return write


def leaves_of(folder):
    model = build_model(read_spec(folder))
    return load_weights(model, folder, progress=False)


# Supported content


def test_bin_files_give_the_same_leaves(model_folder, goldens, tensors):
    writer.save(model_folder / "pytorch_model.bin", tensors)
    for ours, theirs in zip(leaves_of(model_folder), leaves_of(goldens / "llama2"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_shards_are_found_through_the_index(model_folder, goldens, tensors):
    names = sorted(tensors)
    index = {}
    for shard, held in (("pytorch_model-1.bin", names[::2]), ("pytorch_model-2.bin", names[1::2])):
        writer.save(model_folder / shard, {name: tensors[name] for name in held})
        index |= dict.fromkeys(held, shard)
    path = model_folder / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for ours, theirs in zip(leaves_of(model_folder), leaves_of(goldens / "llama2"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_safetensors_take_precedence(model_folder, goldens):
    (model_folder / "pytorch_model.bin").write_bytes(b"not even looked at")
    shutil.copyfile(goldens / "llama2" / "model.safetensors", model_folder / "model.safetensors")
    assert {t.file.name for t in open_checkpoint(model_folder).values()} == {"model.safetensors"}


def test_torch_is_not_imported(model_folder, tensors):
    writer.save(model_folder / "pytorch_model.bin", tensors)
    open_checkpoint(model_folder)
    assert "torch" not in sys.modules


@pytest.mark.parametrize("dtype", writer.STORAGES, ids=str)
def test_every_storage_type_is_read(tmp_path, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    read = read_bin(writer.save(tmp_path / "x.bin", {"x": array, "y": array}))
    np.testing.assert_array_equal(read["x"].read(), array)
    assert read["y"].read().dtype == dtype


def test_types_without_their_own_storage_are_read(tmp_path):
    array = np.arange(6).astype(ml_dtypes.float8_e4m3fn).reshape(2, 3)
    pickle = program({"x": writer.tensor_v3("0", 6, (2, 3), (3, 1), "float8_e4m3fn")})
    read = read_bin(write_archive(tmp_path / "x.bin", pickle, {"0": array.tobytes()}))
    np.testing.assert_array_equal(read["x"].read(), array)


def test_file_written_by_torch_is_read(goldens):
    read = read_bin(goldens.parent / "torch" / "pytorch_model.bin")
    stored = read_header(goldens / "llama2" / "model.safetensors")
    layer = {name: t.read() for name, t in stored.items() if name.startswith("model.layers.0.")}
    attention = {name: t for name, t in layer.items() if "self_attn" in name}
    norms = {name: t for name, t in layer.items() if "norm" in name}
    queries = read["model.layers.0.self_attn.q_proj.weight"].read()
    expected = {
        **{name: array.astype(ml_dtypes.bfloat16) for name, array in attention.items()},
        **norms,
        "transposed": queries.T,
        "rows": queries[8:24:2],
        "half": stored["model.norm.weight"].read().astype(np.float16),
        "steps": np.arange(5),
        "nothing": np.empty((0, 3), np.float32),
    }
    assert read.keys() == expected.keys() and len(attention) == 4 and len(norms) == 2
    for name, array in expected.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name].read(), array)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e5m2, ml_dtypes.bfloat16, np.float16], ids=str)
def test_views_of_types_unknown_to_numpy_are_read(tmp_path, dtype):
    array = np.arange(6).astype(dtype)
    kind = {"bfloat16": "bfloat16", "float16": "float16"}.get(array.dtype.name, "float8_e5m2")
    view = writer.tensor_v3("0", array.nbytes, (3, 2), (1, 3), kind)
    read = read_bin(write_archive(tmp_path / "x.bin", program({"x": view}), {"0": array.tobytes()}))
    np.testing.assert_array_equal(read["x"].read(), array.reshape(2, 3).T)


def test_parameter_with_attributes_is_read(bin_of):
    begin, _, arguments = writer.parameter(tensor(ONE, 0, (6,), (1,))).partition(b"\n_rebuild_")
    arguments = arguments.removeprefix(b"parameter").removesuffix(TUPLE + REDUCE)
    state = b"}" + string("tag") + integer(1) + b"s"
    value = begin + b"\n_rebuild_parameter_with_state" + arguments + state + TUPLE + REDUCE
    np.testing.assert_array_equal(read_bin(bin_of(program({"x": value})))["x"].read(), SIX)


def test_views_may_share_a_storage(bin_of):
    pickle = program(
        {
            "transposed": tensor(ONE, 0, (3, 2), (1, 3)),
            "second": tensor(ONE, 3, (3,), (1,)),
            "odd": tensor(ONE, 1, (3,), (2,)),
            "scalar": tensor(ONE, 5, (), ()),
            "empty": tensor(ONE, 0, (0, 4), (4, 1)),
        }
    )
    read = {name: found.read() for name, found in read_bin(bin_of(pickle)).items()}
    np.testing.assert_array_equal(read["transposed"], SIX.reshape(2, 3).T)
    np.testing.assert_array_equal(read["second"], [3, 4, 5])
    np.testing.assert_array_equal(read["odd"], [1, 3, 5])
    assert read["scalar"] == 5 and read["empty"].shape == (0, 4)
    with pytest.raises(ValueError, match="read-only"):
        read["odd"][0] = 1


def test_values_that_are_not_tensors_are_ignored(bin_of):
    items = {"x": tensor(ONE, 0, (6,), (1,)), "step": integer(2**40), "lr": b"G" + bytes(8)}
    assert list(read_bin(bin_of(program(items, ordered=False)))) == ["x"]


def test_pickle_memo_is_supported(bin_of):
    pickle = (
        PROTO + b"}" + MARK + string("a") + ONE + b"q\x05" + b""
        + string("b") + b"h\x05" + b"u" + STOP
    )  # fmt: skip
    assert read_bin(bin_of(pickle)) == {}  # storages alone are no tensors


def test_engine_runs_on_a_folder_of_bin_files(tmp_path, stories):
    stored = read_header(stories / "model.safetensors")
    arrays = {name: np.array(found.read()) for name, found in stored.items()}
    writer.save(tmp_path / "pytorch_model.bin", arrays)
    for file in stories.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    llm = LLM(
        str(tmp_path), deterministic=True, max_num_batched_tokens=8, max_num_seqs=1,
        max_model_len=64, num_blocks=8, kernels="xla",
    )  # fmt: skip
    params = SamplingParams(max_tokens=8, temperature=0)
    (output,) = llm.generate(["Once upon a time"], params, progress=False)
    assert output.text == ", there was a little girl"


# Rejected content. If executed, every program would create the file `touched`, or do worse.


def attack(module: str, name: str, argument: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + MARK + argument + TUPLE + REDUCE


def attacks(touched) -> dict[str, tuple[bytes, str]]:
    command = string(f"touch {touched}")
    code = string(f"open({str(touched)!r}, 'w').close()")
    stacked = string("os") + string("system") + b"\x93"
    return {
        "os.system": (attack("os", "system", command), "'os.system'"),
        "posix.system": (attack("posix", "system", command), "'posix.system'"),
        "subprocess": (attack("subprocess", "Popen", command), "'subprocess.Popen'"),
        "eval": (attack("builtins", "eval", code), "'builtins.eval'"),
        "python2 eval": (attack("__builtin__", "eval", code), "'__builtin__.eval'"),
        "exec": (attack("builtins", "exec", code), "'builtins.exec'"),
        "getattr": (attack("builtins", "getattr", b"cos\n__name__\n"), "'builtins.getattr'"),
        "dotted": (attack("torch", "serialization.os.system", command), "'torch.serialization.os"),
        "torch.load": (attack("torch", "load", command), "'torch.load'"),
        "numpy": (attack("numpy.core.multiarray", "_reconstruct", command), "_reconstruct'"),
        "codecs": (attack("_codecs", "encode", command), "'_codecs.encode'"),
        "import": (attack("importlib", "import_module", string("os")), "import_module'"),
        "STACK_GLOBAL": (
            stacked + MARK + command + TUPLE + REDUCE,
            "STACK_GLOBAL, for 'os.system'",
        ),
        "STACK_GLOBAL of ints": (b"K\x01K\x01\x93", "STACK_GLOBAL"),
        "EXT1": (b"\x82\x01", "EXT1"),
        "EXT2": (b"\x83\x01\x00", "EXT2"),
        "EXT4": (b"\x84\x01\x00\x00\x00", "EXT4"),
        "INST": (MARK + command + b"ios\nsystem\n", "INST, for 'os.system'"),
        "OBJ": (MARK + b"ccollections\nOrderedDict\n" + b"o", "OBJ"),
        "NEWOBJ": (b"ccollections\nOrderedDict\n)\x81", "NEWOBJ"),
        "PERSID": (b"Pstorage\n", "PERSID"),
        "call a string": (string("os.system") + command + b"\x85R", "it calls a str"),
        "call a storage": (ONE + command + b"\x85R", "it calls a _Storage"),
        "call a dtype": (
            b"ctorch\nFloatStorage\n" + command + b"\x85R",
            "arguments that do not describe",
        ),
        "arguments no tuple": (b"ccollections\nOrderedDict\n]R", "it calls a _Global"),
        "OrderedDict of pairs": (
            b"ccollections\nOrderedDict\n]\x85R",
            "arguments that do not describe",
        ),
        "BUILD of a tensor": (tensor(ONE, 0, (6,), (1,)) + b"}b", "sets the state"),
        "BUILD with slots": (b"}N}\x86b", "sets the state"),
        "persistent str": (string("storage") + b"Q", "persistent id"),
        "persistent int": (b"K\x01Q", "persistent id"),
        "persistent nested": (b")" * 2 + b"\x86Q", "persistent id"),
        "persistent short": (MARK + string("storage") + TUPLE + b"Q", "persistent id"),
        "persistent outside": (storage("FloatStorage", "../version", 1), "is not in the file"),
        "persistent bool": (
            ONE.replace(integer(6) + TUPLE, b"\x88" + TUPLE),
            "persistent id",
        ),
        "metadata": (tensor(ONE, 0, (6,), (1,), b"}" + string("conj") + b"\x88s"), "metadata"),
        "sparse": (attack("torch._utils", "_rebuild_sparse_tensor", b""), "_rebuild_sparse_tensor"),
        "hash of a tuple": (b"}(K\x01K\x01\x86K\x01u", "key of a dictionary is a tuple"),
        "hash of a float": (b"}(G" + bytes(8) + b"K\x01u", "key of a dictionary is a float"),
        "append to a tuple": (b")K\x01a", "appends to a value that is not a list"),
        "items of a list": (b"](K\x01K\x01u", "sets items"),
        "an odd item": (b"}(K\x01u", "sets items"),
    }


@pytest.mark.parametrize("name", attacks(""))
def test_pickle_program_is_rejected_and_not_run(bin_of, tmp_path, name):
    touched = tmp_path / "touched"
    value, message = attacks(touched)[name]
    with pytest.raises(CheckpointError) as caught:
        read_bin(bin_of(program({"x": value})))
    assert message in str(caught.value) and "data.pkl in " in str(caught.value)
    assert not touched.exists()


def test_attacks_work_on_an_unsafe_reader(tmp_path):
    """The test above must be able to fail."""
    import pickle

    touched = tmp_path / "touched"
    for name in ("os.system", "eval", "STACK_GLOBAL", "INST"):
        value, _ = attacks(touched)[name]
        pickle.loads(b"\x80\x04" + value + STOP)
        assert touched.exists()
        touched.unlink()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tensor(ONE, 0, (7,), (1,)), "extends beyond its storage of 6 elements"),
        (tensor(ONE, 1, (6,), (1,)), "extends beyond"),
        (tensor(ONE, 0, (2, 3), (4, 1)), "extends beyond"),
        (tensor(ONE, 0, (10**9, 10**9), (0, 0)), "an expanded view"),
        (tensor(ONE, 0, (6, 1), (0, 1)), "an expanded view"),
        (tensor(ONE, 0, (2**62, 4), (1, 2**62)), "extends beyond"),
        (tensor(ONE, 2**62, (1,), (1,)), "extends beyond"),
        (tensor(ONE, -1, (1,), (1,)), "invalid size, offset or stride"),
        (tensor(ONE, 5, (2,), (-1,)), "invalid size, offset or stride"),
        (tensor(ONE, 0, (-1,), (1,)), "invalid size, offset or stride"),
        (tensor(ONE, 0, (2**64,), (0,)), "invalid size, offset or stride"),
        (tensor(ONE, 0, (6,), (1, 1)), "has 2 strides"),
        (tensor(ONE, 0, (1,) * 33, (1,) * 33), "has 33 strides"),
        (tensor(b"N", 0, (6,), (1,)), "must have a storage"),
        (tensor(storage("FloatStorage", "0", 5), 0, (5,), (1,)), "has 24 bytes, not 5 elements"),
        (tensor(storage("DoubleStorage", "0", 6), 0, (6,), (1,)), "has 24 bytes, not 6 elements"),
        (tensor(storage("FloatStorage", "9", 6), 0, (6,), (1,)), "storage '9' is not in the file"),
        (tensor(storage("FloatStorage", "0", 2**70), 0, (6,), (1,)), "has 24 bytes, not 11805"),
    ],
)
def test_tensor_outside_its_storage_is_rejected(bin_of, value, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_bin(bin_of(program({"layer.weight": value})))
    if "storage '9'" not in message and "bytes, not" not in message:
        assert "tensor 'layer.weight'" in str(caught.value)


BOMBS = {
    "marks": PROTO + MARK * 10**6 + STOP,
    "values": PROTO + b"N" * 3 * 10**6 + STOP,
    "opcodes": PROTO + b"}" + b"q\x00" * 4_100_000 + STOP,
    "memo": PROTO + b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(1_100_000)) + STOP,
    "nested tuples": PROTO + b")" + b"\x85" * 10**6 + STOP,
    "laughs": PROTO
    + b"]"
    + b"".join(b"q\x00](" + b"h\x00" * 10 + b"e" for _ in range(1000))
    + STOP,
    "a string": PROTO + b"X" + struct.pack("<I", 2**31) + b"x" * 70_000 + STOP,
    "a name": PROTO + b"c" + b"x" * 10**6,
    "twice": PROTO + b"}" + string("x") + b"Ns" + string("x") + b"Ns" + STOP,
    # Python's own unpickler never returns from hashing the key, and needs 32 GB for this memo.
    "a key of shared tuples": PROTO + b"})" + b"q\x00h\x00\x86" * 60 + b"Ns" + STOP,
    "a distant memo": PROTO + b"Nr" + struct.pack("<I", 2**32 - 1) + STOP,
    "no end": PROTO + b"}",
    "nothing": b"",
    "underflow": PROTO + b"u" + STOP,
    "pop over a mark": PROTO + b"}" + MARK + b"s" + STOP,
    "forgotten": PROTO + b"h\x09" + STOP,
    "no dictionary": PROTO + b"K\x01" + STOP,
    "protocol 4": b"\x80\x04" + b"}" + STOP,
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.quick_cases(6)
def test_pickle_bomb_fails_soon(bin_of, name):
    path = bin_of(BOMBS[name])
    begin = time.thread_time()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        read_bin(path)
    assert time.thread_time() - begin < 10  # seconds of one core; 1 on an idle machine


def test_pickle_bombs_take_little_memory(bin_of):
    for name in ("values", "laughs", "a string", "a distant memo"):
        path = bin_of(BOMBS[name])
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError):
                read_bin(path)
            assert tracemalloc.get_traced_memory()[1] < 200e6, name
        finally:
            tracemalloc.stop()


# The archive


def refused(path, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_bin(path)
    assert str(path) in str(caught.value)


def test_legacy_format_error_names_the_remedy(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")
    refused(path, r"format of torch before 1\.6.*convert it to safetensors")
    path.write_bytes(b"ustar archive")
    refused(path, "not a zip archive.*convert")
    path.write_bytes(b"")
    refused(path, "not a zip archive")


def test_compressed_entries_are_rejected(bin_of):
    path = bin_of(program({}) + bytes(10**6), compression=zipfile.ZIP_DEFLATED)
    refused(path, "compressed.*convert")


def test_big_endian_file_is_rejected(bin_of):
    refused(bin_of(program({}), order=b"big"), "not little-endian")


def test_file_without_byte_order_is_little_endian(bin_of):
    assert read_bin(bin_of(program({}), order=None)) == {}


def test_archive_without_one_pickle_is_rejected(tmp_path):
    for names in ([], ["a/data.pkl", "b/data.pkl"], ["data.pkl"], ["a/b/data.pkl"]):
        with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
            archive.writestr("archive/version", b"3")
            for name in names:
                archive.writestr(name, program({}))
        refused(tmp_path / "x.bin", "torch.save did not write it")


def test_duplicate_entry_is_rejected(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("archive/data.pkl", program({}))
        archive.writestr("archive/data.pkX", program({}))
    data = (tmp_path / "x.bin").read_bytes().replace(b"data.pkX", b"data.pkl")
    (tmp_path / "x.bin").write_bytes(data)
    refused(tmp_path / "x.bin", "appears twice")


def patched(path, at: int, form: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at, value)
    path.write_bytes(data)


def test_broken_directory_is_rejected(bin_of):
    """Covers fields of the first entry and of the end record, one after the other."""
    good = bin_of(program({})).read_bytes()
    entry, end = good.index(b"PK\x01\x02"), good.index(b"PK\x05\x06")
    for at, form, value, message in [
        (entry + 8, "<H", 1, "encrypted"),
        (entry + 10, "<H", 99, "compressed"),
        (entry + 20, "<I", 5, "different stored and original sizes"),
        (entry + 42, "<I", 2**31, "truncated or broken"),
        (entry + 42, "<I", 1, "no header at its declared position"),
        (entry + 28, "<H", 2**16 - 1, "directory is broken"),
        (entry, "<I", 0, "directory is broken"),
        (end + 4, "<H", 1, "one part of a split archive"),
        (end + 8, "<H", 1, "one part of a split archive"),
        (end + 12, "<I", 2**31, "directory has 2147483648 bytes"),
        (end + 16, "<I", 0, "not at the position that it declares"),
        (end + 16, "<I", 2**32 - 1, "not at the position that it declares"),
        (end + 20, "<H", 7, "does not end with the file"),
    ]:
        path = bin_of(program({}))
        patched(path, at, form, value)
        refused(path, message)


def test_overlapping_entries_are_rejected(tmp_path):
    """An entry is inside another one, as in a zip bomb: its header is in the other's data."""
    name = b"archive/data/1"
    inner = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 4, 4, len(name), 0) + name
    path = write_archive(tmp_path / "x.bin", program({}), {"0": inner + b"1234", "1": b"1234"})
    data = bytearray(path.read_bytes())
    within = data.index(inner)
    entry = data.index(name, data.index(b"PK\x01\x02")) - 46
    struct.pack_into("<I", data, entry + 42, within)
    path.write_bytes(data)
    refused(path, "archive/data/0' and 'archive/data/1' overlap")


def test_64_bit_sizes_are_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as entry:
            entry.write(program({"x": tensor(ONE, 0, (6,), (1,))}))
        with archive.open("archive/data/0", "w", force_zip64=True) as entry:
            entry.write(SIX.tobytes())
    np.testing.assert_array_equal(read_bin(tmp_path / "x.bin")["x"].read(), SIX)


def as_zip64(path, *, huge: bool) -> None:
    """Add the 64-bit end record and its locator, which torch writes into every file.

    huge: The 32-bit record has no values, as in a file beyond 4 GiB.
    """
    data = path.read_bytes()
    end = data.index(b"PK\x05\x06")
    count, size, at = struct.unpack_from("<HII", data, end + 10)
    record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    tail = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    path.write_bytes(data[:end] + record + locator + (tail if huge else data[end:]))


@pytest.mark.parametrize("huge", [True, False])
def test_64_bit_directory_is_read(bin_of, huge):
    path = bin_of(program({"x": tensor(ONE, 0, (6,), (1,))}))
    as_zip64(path, huge=huge)
    np.testing.assert_array_equal(read_bin(path)["x"].read(), SIX)
    data = path.read_bytes()
    patched(path, data.index(b"PK\x06\x07") + 8, "<Q", 2**63)
    refused(path, "broken zip64")


@pytest.mark.parametrize(("at", "form"), [(8, "<H"), (10, "<H"), (12, "<I"), (16, "<I")])
def test_contradicting_directories_are_rejected(bin_of, at, form):
    path = bin_of(program({}))
    as_zip64(path, huge=False)
    patched(path, path.read_bytes().index(b"PK\x05\x06") + at, form, 1)
    refused(path, "two directories contradict each other")


def test_checksums_are_ignored(bin_of):
    """Torch also ignores them, and can be configured to write none."""
    path = bin_of(program({"x": tensor(ONE, 0, (6,), (1,))}))
    data = path.read_bytes()
    at = data.index(b"PK\x01\x02")
    while at >= 0:
        patched(path, at + 16, "<I", 12345)
        at = data.find(b"PK\x01\x02", at + 4)
    np.testing.assert_array_equal(read_bin(path)["x"].read(), SIX)


def test_pipes_and_link_loops_are_rejected(tmp_path):
    os.mkfifo(tmp_path / "pytorch_model.bin")
    refused(tmp_path / "pytorch_model.bin", "not an ordinary file")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    refused(tmp_path / "a", "cannot be read")


def test_truncation_and_flipped_bytes_are_detected_or_harmless(bin_of):
    """Covers every byte before and after the data: an error, or the same tensors."""
    path = bin_of(program({"x": tensor(ONE, 0, (2, 3), (3, 1)), "y": tensor(ONE, 1, (5,), (1,))}))
    good = path.read_bytes()
    expected = describe(read_bin(path))
    for size in range(0, len(good), 7):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError):
            read_bin(path)
    generator = np.random.default_rng(0)
    outcomes = {"refused": 0, "same": 0, "other": 0}
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= int(generator.integers(1, 256))
        path.write_bytes(data)
        outcomes[outcome(path, expected)] += 1
    assert outcomes["refused"] > 0.5 * len(good) and outcomes["same"] > 0
    # A name, a shape and an offset have no check in this format; the model checks them.
    assert outcomes["other"] < 0.05 * len(good)


def describe(tensors):
    return {name: (t.dtype, t.shape, t.strides, t.offset) for name, t in tensors.items()}


def outcome(path, expected) -> str:
    try:
        return "same" if describe(read_bin(path)) == expected else "other"
    except CheckpointError:
        return "refused"


def test_limits_exceed_the_needs_of_large_models():
    assert torch_bin.MAX_OPCODES / 40 > 50_000
