"""Malicious safetensors files: an error that names them, soon and with little memory."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc

import numpy as np
import pytest

from forge_jax.checkpoint import folder as checkpoint_folder
from forge_jax.checkpoint.folder import open_checkpoint
from forge_jax.checkpoint.load import check_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import MAX_HEADER_BYTES, read_header
from forge_jax.errors import CheckpointError
from forge_jax.models import build_model

FLOAT = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def at(begin: int, end: int, **changes) -> dict:
    return FLOAT | {"data_offsets": [begin, end]} | changes


def header(entries, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def refused(tmp_path):
    """Return a function that reads a file of the given bytes and returns the error's text."""

    def read(content: bytes) -> str:
        file = tmp_path / "model.safetensors"
        file.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path)
        assert str(file) in str(caught.value) and len(str(caught.value)) < 10_000
        return str(caught.value)

    return read


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # The names in brackets are those of the same attacks in the format's own library.
        (header(b'{"\xff": 1}'), "'utf-8' codec"),  # invalid utf-8
        (header({"\ud800": 3}), "tensor '\\ud800' of"),
        (header(b' {"x": 1}'), "not a JSON object"),
        (header({"x": FLOAT, "y": at(2, 6)}, bytes(6)), "tensor 'y' of"),  # overlap
        (header({"x": at(0, 4), "y": at(0, 4)}, bytes(4)), "overlaps tensor 'x'"),
        (header({"x": at(0, 4), "y": at(6, 10)}, bytes(10)), "2 bytes before it belong to no"),
        (header({"x": at(2, 6)}, bytes(6)), "2 bytes before it belong to no"),
        (header({"x": FLOAT}, bytes(6)), "2 bytes after tensor 'x' belong to none"),
        (header({}, bytes(6)), "6 bytes after"),
        (header({"x": at(4, 0)}, bytes(4)), "before it begins"),
        (header({"x": at(-4, 0)}, bytes(4)), "must be integers of at least 0"),
        (header({"x": at(0, 2**64 + 4)}, bytes(4)), "must be integers of at least 0"),
        (header({"x": at(0, True)}, bytes(4)), "must be integers of at least 0"),
        (header({"x": at(0, 4.0)}, bytes(4)), "must be integers of at least 0"),
        (header({"x": at(0, 4, shape=[2**32, 2**32, 4])}, bytes(4)), "does not fill 4 bytes"),
        (header({"x": at(0, 4, shape=[2**62 + 1])}, bytes(4)), "does not fill 4 bytes"),
        (header({"x": at(0, 4, shape="1")}, bytes(4)), "broken header entry"),
        (header({"x": at(0, 4, shape={"1": 1})}, bytes(4)), "broken header entry"),
        (header({"x": at(0, 4, shape=[1] * 33)}, bytes(4)), "broken header entry"),
        (header({"x": at(0, 4, shape=[[[[1]]]])}, bytes(4)), "must be integers of at least 0"),
        (header({"x": at(0, 4, shape=[1] * 10**5)}, bytes(4)), "tensor 'x' of"),
        (header({"x": at(0, 4, strides=[1])}, bytes(4)), "broken header entry"),
        (header({"x": at(0, 4, dtype="F32" * 1000)}, bytes(4)), "unknown dtype"),
        (header({"x": at(0, 4, dtype="f32")}, bytes(4)), "unknown dtype 'f32'"),
        (header({"x": at(0, 4, dtype=None)}, bytes(4)), "unknown dtype None"),
        (header({"x": {"dtype": "F32", "shape": [1]}}, bytes(4)), "broken header entry"),
        (header(b'{"x":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', bytes(4)),
         "a name appears twice"),
        (header(b'{"x":%s,"\\u0078":%s}' % ((json.dumps(FLOAT).encode(),) * 2), bytes(4)),
         "a name appears twice: 'x'"),
        (header(b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,NaN]}}'), "must be integers"),
        (header(b'{"x":{"dtype":"F32","shape":[%s]}}' % (b"9" * 4000)), "tensor 'x' of"),
        (header(b'{"x":%s}}' % json.dumps(FLOAT).encode(), bytes(4)), "text after"),
        (header(b'{"x":%s' % json.dumps(FLOAT).encode(), bytes(4)), "expected at byte"),
        (header(b'{"x":%s,}' % json.dumps(FLOAT).encode(), bytes(4)), "a name of at most"),
        (header(b'{"%s":1}' % (b"x" * 5000)), "a name of at most"),
        (header(b'{"__metadata__":1}'), "__metadata__ is not an object"),
        (header({"__metadata__": {"format": 1}}), "__metadata__ must hold only strings"),
        (header({"__metadata__": {"format": {"a": "b"}}}), "__metadata__ must hold only strings"),
        (header({"__metadata__": {"format": None}}), "__metadata__ must hold only strings"),
        (header(b'{"__metadata__":{"a":"b",}}'), "__metadata__ must hold only strings"),
        (header(b'{"__metadata__":{"a":"b" "c":"d"}}'), "__metadata__ must hold only strings"),
        (header(b'{"__metadata__":{"a":"b","a":"c"}}'), "a name appears twice"),
        (header(b'{"__metadata__":{},"__metadata__":{}}'), "a name appears twice"),
        (header(b'{"__metadata__":{"a":"\xff"}}'), "'utf-8' codec"),
    ],
)  # fmt: skip
def test_each_false_header_field_is_named_in_the_error(refused, content, message):
    assert message in refused(content)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b'{"__metadata__":{}}',
        b'{ "__metadata__" : { "a" : "{[\\"b\\"]}" , "c" : "" } } ',
        b'{"__metadata__":{"format":"pt"},"x":{"data_offsets":[0,0],"shape":[0,7],"dtype":"I8"}}',
        b'{"x":{"dtype":"I8","shape":[0],"data_offsets":[0,0]},"__metadata__":{"a":"b"}} \n\t',
    ],
)
def test_everything_the_format_allows_is_read(tmp_path, text):
    (tmp_path / "x.safetensors").write_bytes(header(text))
    assert list(read_header(tmp_path / "x.safetensors")) == (["x"] if b'"x"' in text else [])


MIB = 2**20
BOMBS = {
    "deep lists": b'{"x":' + b"[" * 50 * MIB,
    "deep objects": b'{"x":' * 5 * MIB,
    "many lists": b'{"x":[' + b"[]," * 10 * MIB + b"[]]}",
    "many numbers": b'{"x":{"dtype":"F32","shape":[' + b"1," * 10 * MIB + b"1]}}",
    "a long name": b'{"' + b"x" * 50 * MIB + b'":1}',
    "backslashes": b'{"' + b"\\" * 50 * MIB + b'":1}',
    "metadata": b'{"__metadata__":{' + b'"a":"' + b"b" * 50 * MIB + b'"}}',
    "metadata keys": b'{"__metadata__":{'
    + b",".join(b'"%d":""' % i for i in range(50_000))
    + b"}}",
    "blanks": b'{"x" ' + b" " * 50 * MIB + b":1}",
    "blanks before the end": b"{" + b" " * 50 * MIB,
    "a huge integer": b'{"x":{"dtype":"F32","shape":[' + b"9" * 50 * MIB + b"]}}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_header_bomb_fails_soon_in_little_memory(tmp_path, name):
    """Counts allocations only: the file itself is mapped, and the kernel may drop its pages."""
    (tmp_path / "model.safetensors").write_bytes(header(BOMBS[name]))
    tracemalloc.start()
    begin = time.thread_time()
    try:
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(tmp_path)
        seconds, peak = time.thread_time() - begin, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB
    assert seconds < 10  # on one core with traced memory; a tenth of it on an idle machine


def test_header_longer_than_the_limit_is_not_read(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        stream.truncate(200_000_000)  # a sparse file, which takes no disk space
    with pytest.raises(CheckpointError, match="header of 100000001"):
        open_checkpoint(tmp_path)


def test_sparse_file_is_no_header(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", MAX_HEADER_BYTES))
        stream.truncate(2**40)
    with pytest.raises(CheckpointError, match="not a JSON object"):
        open_checkpoint(tmp_path)


def test_too_many_tensors_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("forge_jax.checkpoint.safetensors.MAX_TENSORS", 3)
    empty = at(0, 0, shape=[0])
    (tmp_path / "x.safetensors").write_bytes(header({str(i): empty for i in range(3)}))
    assert len(read_header(tmp_path / "x.safetensors")) == 3
    (tmp_path / "x.safetensors").write_bytes(header({str(i): empty for i in range(4)}))
    with pytest.raises(CheckpointError, match="more than 3 tensors"):
        read_header(tmp_path / "x.safetensors")


# The index


@pytest.fixture
def index(tmp_path):
    def write(weight_map, shards=("a.safetensors",)):
        for shard in shards:
            (tmp_path / shard).write_bytes(header({"x": FLOAT}, bytes(4)))
        text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
        (tmp_path / "model.safetensors.index.json").write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    "shard", ["../a.safetensors", "/etc/passwd", "..", ".", "", "b/../a", "b/a", "a\0"]
)
def test_shard_outside_the_folder_is_rejected(index, shard):
    with pytest.raises(CheckpointError, match=r"index\.json names a file outside the folder"):
        open_checkpoint(index({"x": shard}))


def test_tensor_in_two_shards_is_rejected(index):
    folder = index({"x": "a.safetensors", "y": "b.safetensors"}, ["a.safetensors", "b.safetensors"])
    with pytest.raises(CheckpointError, match=r"tensor 'x' is in two shards.*a\.saf.* and b\.saf"):
        open_checkpoint(folder)


def test_shards_may_be_links_to_files_only(index, tmp_path):
    """The Hub's cache consists of links to files; everything else is refused."""
    folder = index({"x": "b.safetensors"})
    shard = tmp_path / "b.safetensors"
    shard.symlink_to(tmp_path / "a.safetensors")
    assert list(open_checkpoint(folder)) == ["x"]
    for make, message in [
        (lambda: shard.symlink_to(shard), "cannot be read|broken header"),
        (lambda: shard.symlink_to("/dev/zero"), "not an ordinary file"),
        (lambda: shard.symlink_to(tmp_path / "missing"), "does not exist"),
        (lambda: os.mkfifo(shard), "not an ordinary file"),
        (lambda: shard.mkdir(), "not an ordinary file"),
    ]:
        shard.unlink()
        make()
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)


def test_index_size_is_bounded(index, tmp_path, monkeypatch):
    for text in (
        "[" * 10**6,
        '{"weight_map": ' + '{"a":' * 10 + "1" + "}" * 11,
        '{"weight_map":{}}',
    ):
        with pytest.raises(CheckpointError, match=r"index\.json"):
            open_checkpoint(index(text))
    monkeypatch.setattr(checkpoint_folder, "MAX_SHARDS", 2)
    with pytest.raises(CheckpointError, match="names 3 files"):
        open_checkpoint(index({name: f"{name}.safetensors" for name in "xyz"}))
    with (tmp_path / "model.safetensors.index.json").open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(CheckpointError, match="has 1099511627776 bytes; at most"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors.index.json").symlink_to("model.safetensors.index.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(tmp_path)


# Random damage: an error, or the same tensors as before


class Damage:
    """A copy of the fixture that is damaged, loaded and compared."""

    def __init__(self, source, tmp_path):
        self.model = build_model(read_spec(source))
        self.good = (source / "model.safetensors").read_bytes()
        self.folder, self.file = tmp_path, tmp_path / "model.safetensors"
        self.start = 8 + int.from_bytes(self.good[:8], "little")
        self.file.write_bytes(self.good)
        self.expected = self.tensors()

    def tensors(self):
        checked = check_weights(self.model, self.folder).tensors
        names = [part.name for parts in checked.parts.values() for part in parts]
        return {
            name: (
                checked.stored[name].shape,
                checked.stored[name].dtype,
                *self.data(checked, name),
            )
            for name in names
        }

    def data(self, checked, name):
        return checked.stored[name].offset, len(checked.stored[name].read().tobytes())

    def survives(self, content: bytes) -> bool:
        """Return True if the damage is not detected; the tensors must then be the same."""
        self.file.write_bytes(content)
        try:
            found = self.tensors()
        except CheckpointError:
            return False
        assert found == self.expected
        return True

    def truncate(self, sizes) -> None:
        for size in sizes:
            assert not self.survives(self.good[:size])

    def flip(self, count: int, seed: int) -> int:
        generator = np.random.default_rng(seed)
        survived = 0
        for _ in range(count):
            data = bytearray(self.good)
            for _ in range(int(generator.integers(1, 4))):
                data[int(generator.integers(self.start))] ^= int(generator.integers(1, 256))
            survived += self.survives(bytes(data))
        return survived


@pytest.fixture
def damage(stories, tmp_path):
    return Damage(stories, tmp_path)


def test_damage_is_detected_or_harmless(damage):
    damage.truncate([*range(0, 64), *range(64, len(damage.good), 20_011), len(damage.good) - 1])
    assert damage.flip(300, seed=0) < 30  # only a comment's byte or a blank is harmless


@pytest.mark.soak
def test_much_damage_is_detected_or_harmless(damage):
    generator = np.random.default_rng(1)
    damage.truncate(range(damage.start + 64))
    damage.truncate(map(int, generator.integers(len(damage.good), size=2000)))
    assert damage.flip(20_000, seed=2) < 2000
