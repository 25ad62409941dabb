"""Broken GGUF files: an error that names the field, soon and with little memory."""

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import write_gguf

from forge_jax.checkpoint.gguf import open_gguf, read_gguf
from forge_jax.checkpoint.load import check_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.errors import CheckpointError, ModelError
from forge_jax.models import build_model
from forge_jax.text import Tokenizer

U32, STRING, ARRAY = 4, 8, 9
F32 = 0


def string(text: str | bytes, length: int | None = None) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if length is None else length) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name="x", shape=(2,), kind=F32, offset=0) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def header(
    entries=(), tensors=(), *, version=3, num_entries=None, num_tensors=None, data=64
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    table = struct.pack("<IQQ", version, *counts) + b"".join([*entries, *tensors])
    table = b"GGUF" + table
    return table + bytes(-len(table) % 32 + data)


HUGE = struct.pack("<Q", 2**63)
ALIGN = entry("general.alignment", U32, struct.pack("<I", 3))
FILES = {
    "empty": (b"", "it has only 0 bytes"),
    "another file": (b"GGML" + bytes(64), "does not begin with GGUF"),
    "version 0": (header(version=0), "its version must be from 1 to 3, got 0"),
    "version 4": (header(version=4), "its version must be from 1 to 3, got 4"),
    "big-endian": (header(version=3 << 24), "it is big-endian"),
    "tensors without end": (header(num_tensors=2**62), "it declares 4611686018427387904 tensors"),
    "entries without end": (header(num_entries=2**62), "4611686018427387904 entries"),
    "fewer entries": (header(num_entries=9), "a key|truncated|appears twice"),
    "fewer tensors": (header(num_tensors=900), "truncated|appears twice|dimensions"),
    "a long key": (
        header([string("k", 2**40)], num_entries=1),
        "a key declares 1099511627776 bytes",
    ),
    "a key twice": (header([entry("k", U32, bytes(4))] * 2), "the key 'k' appears twice"),
    "a key of no text": (header([string(b"\xff")], num_entries=1), "a key is not UTF-8"),
    "a long text": (header([entry("k", STRING, HUGE)]), "the value of 'k' declares"),
    "a text that is cut": (header([entry("k", STRING, string("x", 500))]), "it is truncated"),
    "an unknown type": (header([entry("k", 99, b"")]), "value of 'k' is of the unknown type 99"),
    "a negative type": (header([entry("k", 2**32 - 1, b"")]), "unknown type 4294967295"),
    "no truth value": (header([entry("k", 7, b"\x02")]), "'k' must be 0 or 1, got 2"),
    "a long array": (
        header([entry("k", ARRAY, struct.pack("<I", U32) + HUGE)]),
        "the array 'k' declares 9223372036854775808 elements",
    ),
    "an array that is cut": (
        header([entry("k", ARRAY, struct.pack("<IQ", U32, 10**6))]),
        "it is truncated",
    ),
    "many strings": (
        header([entry("k", ARRAY, struct.pack("<IQ", STRING, 2**23))]),
        "the array 'k' declares 8388608 elements",
    ),
    "arrays in arrays": (
        header([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]),
        "the array 'k' is of the unknown or nested type 9",
    ),
    "an odd alignment": (header([ALIGN]), "general.alignment must be a power of 2, got 3"),
    "no dimensions": (header((), [tensor(shape=())]), "the tensor 'x' has 0 dimensions"),
    "five dimensions": (header((), [tensor(shape=(1,) * 5)]), "the tensor 'x' has 5 dimensions"),
    "no elements": (header((), [tensor(shape=(0, 4))]), r"'x' has the shape '?\[4, 0\]"),
    "elements beyond 64 bits": (header((), [tensor(shape=(2**40, 2**40))]), "'x' has the shape"),
    "a size that overflows": (
        header((), [tensor(shape=(2**61,))]),
        "ends after the end of the file",
    ),
    "an unknown kind": (header((), [tensor(kind=77)]), "the tensor 'x' is of type 77"),
    "half a block": (
        header((), [tensor(kind=8, shape=(33,))]),
        "rows of 33 elements, but Q8_0 needs",
    ),
    "an odd offset": (header((), [tensor(offset=4)]), "the tensor 'x' is not aligned to 32 bytes"),
    "beyond the end": (header((), [tensor(offset=96)]), "'x' ends after the end of the file"),
    "an offset that overflows": (
        header((), [tensor(offset=2**64 - 32)]),
        "'x' ends after the end of the file",
    ),
    "an overlap": (
        header((), [tensor(shape=(16,)), tensor("y", (8,), offset=32)]),
        "the tensor 'y' overlaps another",
    ),
    "a tensor twice": (header((), [tensor(), tensor(offset=32)]), "the tensor 'x' appears twice"),
}


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", FILES)
def test_broken_file_is_rejected_by_field(name, file):
    data, match = FILES[name]
    file.write_bytes(data)
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(ModelError, match=match) as raised:
            read_gguf(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(file) in str(raised.value) and len(str(raised.value)) < 500
    assert peak < 2**20 and time.process_time() - begin < 5


def test_unmodified_test_file_is_valid(file):
    file.write_bytes(
        header([entry("k", STRING, string("v"))], [tensor(), tensor("y", (8,), offset=32)])
    )
    assert list(read_gguf(file).tensors) == ["x", "y"] and read_gguf(file).metadata == {"k": "v"}


def test_file_that_is_not_regular_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not an ordinary file"):
        read_gguf(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match=r"missing\.gguf"):
        read_gguf(tmp_path / "missing.gguf")


# ---- a real file, damaged ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(stories) -> bytes:
    folder = stories.parent / "stories260k-gguf"
    return (folder / "tinyllamas-stories-260k-f32.gguf").read_bytes()


def open_all(file: Path) -> None:
    """Read everything that a start reads before the weights."""
    spec = read_spec(file)
    check_weights(build_model(spec), file)
    Tokenizer.from_folder(file, spec.vocab_size)


def test_file_truncated_anywhere_is_rejected(whole, file):
    rng = random.Random(0)
    header_end = len(whole) - 1_040_000
    cuts = [rng.randrange(header_end) for _ in range(150)] + [header_end + 1000, len(whole) - 1]
    for at in cuts:
        file.write_bytes(whole[:at])
        with pytest.raises(CheckpointError):
            open_all(file)


def test_header_with_a_flipped_bit_is_read_or_rejected(whole, file):
    """Only our own errors may be raised."""
    rng = random.Random(1)
    refused = 0
    for _ in range(100):
        data = bytearray(whole)
        data[rng.randrange(2000 if rng.random() < 0.5 else 16_000)] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        try:
            open_all(file)
        except ModelError:
            refused += 1
    assert 10 < refused < 100


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b"llama.block_count", b"llama.blocX_count", "llama.block_count is missing"),
        (
            b"blk.4.ffn_up.weight",
            b"blk.9.ffn_up.weight",
            r"layers\.4\.mlp\.up_proj\.weight is miss",
        ),
        (
            b"blk.4.ffn_up.weight",
            b"blk.4.ffn_ux.weight",
            "'blk.4.ffn_ux.weight' is not part of any",
        ),
        (b"token_embd.weight", b"token_embX.weight", "the tensor token_embd.weight is missing"),
        (
            b"tokenizer.ggml.scores",
            b"tokenizer.ggml.scorez",
            "tokenizer.ggml.scores must be|missing",
        ),
    ],
)
def test_missing_keys_are_named_in_the_error(whole, file, old, new, match):
    assert whole.count(old) == 1
    file.write_bytes(whole.replace(old, new))
    with pytest.raises(ModelError, match=match):
        open_all(file)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("block_count", 0, "llama.block_count must be an integer from 1 to 1024, got 0"),
        ("block_count", 2**31, "llama.block_count must be an integer from 1 to 1024"),
        ("attention.head_count", 0, "llama.attention.head_count must be an integer from 1"),
        ("attention.head_count", 7, "head_dim|rope.dimension_count"),
        (
            "attention.head_count_kv",
            3,
            "num_key_value_heads must be a divisor|cannot be split into pairs in 3 heads",
        ),
        ("feed_forward_length", 2**31 - 1, "intermediate_size must be an integer"),
        ("feed_forward_length", 173, r"has shape \(172, 64\), not \(173, 64\)"),
        ("context_length", 0, "llama.context_length must be an integer from 1"),
    ],
)
def test_false_model_sizes_are_rejected(whole, file, key, value, match):
    at = whole.index(f"llama.{key}".encode() + struct.pack("<I", U32)) + len(f"llama.{key}") + 4
    file.write_bytes(whole[:at] + struct.pack("<I", value) + whole[at + 4 :])
    with pytest.raises(ModelError, match=match):
        open_all(file)


FULL_DIM = "attention.key_length attention.value_length rope.dimension_count"
SIZES = [
    ("qwen3_5_moe", "ssm.group_count", 2**20, "ssm.group_count must be an integer from 1 to 4096"),
    ("qwen3_5_moe", "ssm.time_step_rank", 2**20, "time_step_rank must be an integer from 1 to 4"),
    ("qwen3_5_moe", "ssm.state_size", 2**30, "ssm.state_size must be an integer from 1 to 1048576"),
    (
        "qwen3_5_moe",
        "ssm.inner_size",
        2**26,
        r"'blk\.0\..*' must have \d+ rows on 2 axes, got shape",
    ),
    ("gemma4", FULL_DIM, 2**26, "rope_freqs.weight must have 33554432 factors"),
    ("gemma4_moe", "expert_count", 5000, "expert_count must be an integer from 0 to 4096"),
    ("gpt_oss", "expert_count", 5000, "expert_count must be an integer from 1 to 4096"),
]


@pytest.mark.parametrize(("name", "keys", "value", "match"), SIZES)
def test_sizes_are_compared_with_the_file_before_memory_is_used(
    name, keys, value, match, goldens, file
):
    data = write_gguf(goldens / name, file).read_bytes()
    for key in keys.split():
        at = data.index(f".{key}".encode() + struct.pack("<I", U32)) + len(key) + 5
        data = data[:at] + struct.pack("<I", value) + data[at + 4 :]
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=match):
            read_spec(file)
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()


def test_experts_of_layers_that_do_not_exist_are_not_split(goldens, file):
    def more(writer):
        writer.add_tensor("blk.9.ffn_up_exps.weight", np.zeros((6, 1, 1), np.float32))

    write_gguf(goldens / "qwen3_5_moe", file, more=more)
    assert not any("layers.9." in name for name in open_gguf(file))
    check_weights(build_model(read_spec(file)), file)
