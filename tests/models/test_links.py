"""A file of a model may be a link, but only to a file of the same model."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from forge_jax.checkpoint import orbax
from forge_jax.checkpoint.adapter import adapter_digest
from forge_jax.checkpoint.converted import read_record
from forge_jax.checkpoint.folder import open_checkpoint
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.engine.fingerprint import _model_files
from forge_jax.errors import CheckpointError
from forge_jax.text.template_files import folder_templates, given_template
from forge_jax.text.tokenizer import Tokenizer
from forge_jax.tools.convert import _copy_text

BUNDLED = resolve("forge-tiny")
JINJA = "{{ messages[0].content }}"
INDEX = json.dumps({"weight_map": {"x": "shard.safetensors"}})
INDEX_NAME = "model.safetensors.index.json"
OUTSIDE = "is a link to .*/outside/.*, which is not in the model's folder.*cp --remove-destination"


def open_array(folder: Path) -> object:
    return orbax.open_arrays(folder / "weights", {"x": jax.ShapeDtypeStruct((2,), np.int8)})


def write_text(folder: Path) -> None:
    target = folder.parent / "copy"
    target.mkdir(exist_ok=True)
    _copy_text(folder, target)


# What is linked, and who reads it.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "configuration": ("config.json", read_spec),
    "generation": ("generation_config.json", read_spec),
    "tokenizer": ("tokenizer.json", Tokenizer.from_folder),
    "its configuration": ("tokenizer_config.json", Tokenizer.from_folder),
    "its special tokens": ("special_tokens_map.json", Tokenizer.from_folder),
    "template": ("chat_template.jinja", folder_templates),
    "another template": ("additional_chat_templates/tools.jinja", folder_templates),
    "the other templates": ("additional_chat_templates", folder_templates),
    "a template to convert": ("chat_template.jinja", write_text),
    "templates to convert": ("additional_chat_templates", write_text),
    "weights": ("model.safetensors", open_checkpoint),
    "index": (INDEX_NAME, open_checkpoint),
    "shard": ("shard.safetensors", open_checkpoint),
    "pickled weights": ("pytorch_model.bin", open_checkpoint),
    "the only GGUF file": ("model.gguf", lambda folder: resolve(str(folder))),
    "adapter": ("adapter_config.json", adapter_digest),
    "its weights": ("adapter_model.safetensors", adapter_digest),
    "record": ("forge_jax.json", read_record),
    "description of an array": ("weights/x/.zarray", open_array),
    "array": ("weights/x", open_array),
    "arrays": ("weights", open_array),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that has each kind of file; each test takes out those that are in its way."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(JINJA)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text(JINJA)
    (folder / INDEX_NAME).write_text(INDEX)
    for name in ("shard.safetensors", "pytorch_model.bin", "adapter_model.safetensors"):
        shutil.copyfile(folder / "model.safetensors", folder / name)
    for name in ("model.gguf", "adapter_config.json", "forge_jax.json"):
        (folder / name).write_text("{}")
    (folder / "weights" / "x").mkdir(parents=True)
    described = orbax._description(jax.ShapeDtypeStruct((2,), np.int8))
    (folder / "weights" / "x" / ".zarray").write_text(json.dumps(described))
    (folder / "weights" / "x" / "0").write_bytes(b"ab")
    return folder


def take_out(folder: Path, name: str) -> None:
    first = {
        "model.safetensors": [INDEX_NAME],
        "pytorch_model.bin": [INDEX_NAME, "model.safetensors"],
        "model.gguf": ["config.json"],
    }
    for each in first.get(name, []):
        (folder / each).unlink()


@pytest.mark.parametrize("kind", READERS)
def test_a_link_out_of_the_folder_is_refused(folder, kind):
    name, read = READERS[kind]
    take_out(folder, name)
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / name).rename(outside / "target")
    (folder / name).symlink_to(outside / "target")
    with pytest.raises(CheckpointError, match=OUTSIDE):
        read(folder)


@pytest.mark.parametrize("kind", ["generation", "its special tokens", "template", "weights"])
def test_a_link_to_nothing_is_not_a_file_that_is_missing(folder, kind):
    name, read = READERS[kind]
    take_out(folder, name)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../outside/none")
    with pytest.raises(
        CheckpointError, match=r"is a link to \.\./outside/none, which does not exist"
    ):
        read(folder)


def test_a_template_that_is_a_pipe_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    os.mkfifo(folder / "chat_template.jinja")
    with pytest.raises(CheckpointError, match="is not an ordinary file"):
        folder_templates(folder)


@pytest.mark.parametrize("kind", ["configuration", "template", "shard"])
def test_a_link_inside_the_folder_is_followed(folder, kind):
    name, read = READERS[kind]
    (folder / "below").mkdir()
    (folder / name).rename(folder / "below" / "target")
    (folder / name).symlink_to("below/target")
    (folder / "forge_jax.json").unlink()
    if kind == "shard":
        with pytest.raises(CheckpointError, match=r"lists 'x' in shard\.safetensors"):
            read(folder)
    else:
        assert read(folder)


def test_the_folder_itself_may_be_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert folder_templates(tmp_path / "link")


def snapshot(cache: Path, name: str) -> Path:
    """A model with a chat template as Hugging Face's cache keeps it."""
    repo = cache / f"models--org--{name}"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "abc").write_text(JINJA)
    folder = repo / "snapshots" / "0123456789abcdef"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "chat_template.jinja").symlink_to("../../blobs/abc")
    (folder / "additional_chat_templates" / "tools.jinja").symlink_to("../../../blobs/abc")
    return folder


def test_a_snapshot_of_the_hubs_cache_has_links_to_its_blobs(tmp_path):
    folder = snapshot(tmp_path, "one")
    assert folder_templates(folder) == {"default": JINJA, "tools": JINJA}


def test_a_snapshot_has_none_to_the_blobs_of_another_model(tmp_path):
    one, other = snapshot(tmp_path, "one"), snapshot(tmp_path, "other")
    (one / "chat_template.jinja").unlink()
    (one / "chat_template.jinja").symlink_to(other.parents[1] / "blobs" / "abc")
    with pytest.raises(CheckpointError, match=r"which is not in the model's folder"):
        folder_templates(one)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_snapshot_has_none_to_blobs_that_are_a_link(tmp_path, absolute):
    folder, outside = snapshot(tmp_path, "one"), tmp_path / "outside"
    blobs = folder.parents[1] / "blobs"
    blobs.rename(outside)
    blobs.symlink_to(outside if absolute else "../outside")
    with pytest.raises(CheckpointError, match=OUTSIDE):
        folder_templates(folder)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/hostname", "a/../../b", ".."])
def test_an_index_names_no_file_outside_the_folder(folder, shard):
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(CheckpointError, match=f"outside the folder: '{re.escape(shard)}'"):
        open_checkpoint(folder)


def test_a_template_that_the_operator_names_may_be_a_link(folder, tmp_path):
    (tmp_path / "mine").write_text(JINJA)
    (tmp_path / "link.jinja").symlink_to("mine")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "link.jinja").symlink_to(tmp_path / "mine")
    assert given_template(folder, tmp_path / "below" / "link.jinja") == {"default": JINJA}


def test_a_gguf_file_that_the_operator_names_may_be_a_link(tmp_path):
    """As in the folders of other programs, which keep files by their hash."""
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "below").mkdir()
    link = tmp_path / "below" / "model.gguf"
    link.symlink_to(tmp_path / "blob")
    assert resolve(str(link)) == link
    with pytest.raises(CheckpointError, match="not a GGUF file: it has only 2 bytes"):
        open_checkpoint(link)


def test_the_fingerprint_reads_ordinary_files_of_the_model_only(folder, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    before = _model_files(folder)
    (folder / "link.json").symlink_to(tmp_path / "secret.json")
    (folder / "broken.json").symlink_to(tmp_path / "none")
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    assert _model_files(folder) == before
