"""GGUF files of Granite 4 with Mamba-2."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from gguf_writer import write_gguf
from paged import PagedRun

import forge_jax
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.errors import CheckpointError


@pytest.mark.parametrize("name", ["granitemoehybrid", "granitemoehybrid_dense"])
def test_gguf_model_equals_the_folders(name, goldens, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(goldens / name, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["time_step_limit"]  # not in files
    (folder / "config.json").write_text(json.dumps(config))
    got, want = (
        forge_jax.load(str(path), progress=False)
        for path in (write_gguf(folder, tmp_path / "m.gguf"), folder)
    )
    assert dataclasses.replace(got.spec, ggml_types=None) == want.spec
    for leaf, ours, theirs in zip(got.model.names, got.leaves, want.leaves, strict=True):
        tolerance = 1e-6 if leaf.endswith("decay") else 0.0  # a logarithm of an exponential
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance, err_msg=leaf)
    ids = np.random.default_rng(0).integers(3, 160, (2, 20)).tolist()
    found = [np.stack(PagedRun(model, 2).step(ids)) for model in (got, want)]
    np.testing.assert_allclose(*found, atol=1e-4, rtol=0)


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [2, 0, 4, 0], [2, 0, 2]])
def test_invalid_key_value_heads_per_layer_are_rejected(counts, goldens, tmp_path):
    def changed(writer):
        del writer.kv_data[0]["granitehybrid.attention.head_count_kv"]
        writer.add_head_count_kv(counts)

    file = write_gguf(goldens / "granitemoehybrid", tmp_path / "m.gguf", more=changed)
    with pytest.raises(CheckpointError, match=r"head_count_kv must be an array of 4 integers"):
        read_spec(file)
