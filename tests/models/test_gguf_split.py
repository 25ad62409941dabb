"""A GGUF model in several files gives the same model as in one file."""

import functools
import shutil

import gguf
import jax
import numpy as np
import pytest
from gguf_writer import write_gguf

import forge_jax
from forge_jax.checkpoint.gguf import read_gguf
from forge_jax.checkpoint.hub import resolve
from forge_jax.engine.fingerprint import system_fingerprint
from forge_jax.errors import CheckpointError, ModelError

NAMES = [f"model-{k:05}-of-00003.gguf" for k in (1, 2, 3)]


@pytest.fixture(scope="module")
def whole(goldens, tmp_path_factory):
    return write_gguf(goldens / "qwen3", tmp_path_factory.mktemp("whole") / "model.gguf")


@pytest.fixture
def parts(whole, goldens, tmp_path):
    """Write the same model in three parts with the library."""
    most = -(-len(read_gguf(whole).tensors) // 3)
    with pytest.MonkeyPatch.context() as patch:
        split = functools.partial(gguf.GGUFWriter, split_max_tensors=most)
        patch.setattr(gguf, "GGUFWriter", split)
        write_gguf(goldens / "qwen3", tmp_path / "model.gguf")
    assert sorted(file.name for file in tmp_path.iterdir()) == NAMES
    return tmp_path


def test_split_model_equals_the_whole(whole, parts):
    got, expected = (
        forge_jax.load(str(file), progress=False) for file in (parts / NAMES[0], whole)
    )
    assert got.spec == expected.spec and got.model.names == expected.model.names
    for ours, theirs in zip(got.leaves, expected.leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_folder_with_one_split_model_resolves_to_the_first_part(parts):
    assert resolve(str(parts)) == parts / NAMES[0]
    (parts / "other.gguf").touch()
    with pytest.raises(ModelError, match=r"has 2 GGUF files: pass one .* \(model-00001.*, other"):
        resolve(str(parts))


def test_later_part_alone_in_a_folder_is_rejected(parts):
    (parts / NAMES[0]).unlink()
    (parts / NAMES[2]).unlink()
    with pytest.raises(CheckpointError, match=rf"not the first part of its model: pass {NAMES[0]}"):
        read_gguf(resolve(str(parts)))


def test_later_part_names_the_first(parts):
    with pytest.raises(CheckpointError, match=rf"not the first part of its model: pass {NAMES[0]}"):
        read_gguf(parts / NAMES[1])


def test_missing_part_is_named_in_the_error(parts):
    (parts / NAMES[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{NAMES[1]} is missing: it is part 2 of 3"):
        read_gguf(parts / NAMES[0])


def test_renamed_part_is_rejected(parts):
    other = (parts / NAMES[0]).rename(parts / "other.gguf")
    with pytest.raises(CheckpointError, match=r"must end in -00001-of-00003.gguf: restore"):
        read_gguf(other)


def test_exchanged_parts_are_rejected(parts):
    shutil.copy(parts / NAMES[2], parts / NAMES[1])
    with pytest.raises(
        CheckpointError, match=r"declares that it is part 3 of 3, .* is named part 2 of 3"
    ):
        read_gguf(parts / NAMES[0])


def patched(file, key, old, new):
    """Change a 16-bit or 32-bit integer of the metadata."""
    data = bytearray(file.read_bytes())
    at = data.index(key.encode()) + len(key) + 4
    size = 4 if key.startswith("split.tensors") else 2
    assert int.from_bytes(data[at : at + size], "little") == old
    data[at : at + size] = new.to_bytes(size, "little")
    file.write_bytes(data)


def test_tensor_in_two_parts_is_rejected(parts):
    shutil.copy(parts / NAMES[2], parts / NAMES[1])
    patched(parts / NAMES[1], "split.no", 2, 1)
    with pytest.raises(CheckpointError, match=rf"in two parts .*{NAMES[1]} and .*{NAMES[2]}"):
        read_gguf(parts / NAMES[0])


def test_wrong_number_of_tensors_is_rejected(parts):
    count = len(read_gguf(parts / NAMES[0]).tensors)
    patched(parts / NAMES[0], "split.tensors.count", count, count + 1)
    match = rf"declares {count + 1} tensors, but its 3 parts have {count}"
    with pytest.raises(CheckpointError, match=match):
        read_gguf(parts / NAMES[0])


@pytest.mark.parametrize(
    ("key", "old", "new", "match"),
    [
        ("split.no", 0, 3, "split.no must be an integer from 0 to 2, got 3"),
        ("split.count", 3, 65535, "split.count must be an integer from 0 to 10000, got 65535"),
    ],
)
def test_impossible_numbers_are_rejected(key, old, new, match, parts):
    patched(parts / NAMES[0], key, old, new)
    with pytest.raises(CheckpointError, match=match):
        read_gguf(parts / NAMES[0])


def test_merged_file_may_keep_the_name_of_the_first_part(whole, tmp_path):
    file = shutil.copy(whole, tmp_path / NAMES[0])
    assert read_gguf(file).tensors.keys() == read_gguf(whole).tensors.keys()
    assert system_fingerprint(file, jax.devices()[0], {}).startswith("fp_")


def test_fingerprint_follows_every_part(parts):
    fingerprints = set()
    for name in NAMES:
        data = bytearray((parts / name).read_bytes())
        data[-1] ^= 1
        (parts / name).write_bytes(data)
        fingerprints.add(system_fingerprint(parts / NAMES[0], jax.devices()[0], {}))
    assert len(fingerprints) == 3
