"""`python -m tests.real_checkpoints`, with models of this repository served by a local hub.

The expectations of these models were made by transformers, like those of published ones.
"""

import functools
import json
import tomllib

import huggingface_hub
import pytest
from safetensors.numpy import load, save

from forge_jax.models.families import ARCHITECTURES
from tests import fake_hub, real_checkpoints

ROOT = real_checkpoints.HERE.parent.parent.parent
STAND_INS = tomllib.loads((real_checkpoints.HERE / "stand_ins.toml").read_text())["model"]
MODELS = tomllib.loads((real_checkpoints.HERE / "models.toml").read_text())["model"]
ID, CHAT_ID = "stand-in/stories260k", "stand-in/forge-tiny"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Serve the stand-ins from a local hub, and redirect downloads to it."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with fake_hub.serving() as hub:
        for entry in STAND_INS:
            files = (file for file in (ROOT / entry["folder"]).iterdir() if file.is_file())
            content = {file.name: file.read_bytes() for file in files}
            hub.repositories[entry["id"]] = fake_hub.Repository(content)
        local = functools.partial(
            huggingface_hub.snapshot_download,
            endpoint=hub.url,
            cache_dir=tmp_path / "cache",
            token=False,
        )
        monkeypatch.setattr(huggingface_hub, "snapshot_download", local)
        files_of = huggingface_hub.HfApi(endpoint=hub.url, token=False).list_repo_files
        monkeypatch.setattr(huggingface_hub, "list_repo_files", files_of)
        yield hub


@pytest.fixture
def run(tmp_path, capsys):
    """Return a function that runs the command on stand-ins; it returns status and table rows."""

    def run(*ids, gated=False, expectations=real_checkpoints.HERE / "expectations"):
        entries = [
            f'[[model]]\nid = "{entry["id"]}"\nrevision = "main"\nfamily = "{entry["family"]}"\n'
            f"gated = {str(gated).lower()}\n"
            for entry in STAND_INS
        ]
        file = tmp_path / "list.toml"
        file.write_text("\n".join(entries))
        flags = ["--list", str(file), "--expectations", str(expectations)]
        status = real_checkpoints.main([*flags, *ids])
        lines = capsys.readouterr().out.splitlines()
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| stand-in")]
        return status, {row[0]: row[2:] for row in rows}

    return run


def test_model_agrees_with_transformers(hub, run):
    status, rows = run(ID)
    assert (status, rows) == (0, {ID: ["72 of 72", "19.4800", "19.4800", "ok"]})


@pytest.mark.slow
def test_all_stand_ins_agree_with_transformers(hub, run):
    status, rows = run()
    assert status == 0
    assert [row[-1] for row in rows.values()] == ["ok", "ok"]


def test_other_weights_are_a_mismatch(hub, run):
    files = hub.repositories[ID].files
    tensors = load(files[WEIGHTS])
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name] = tensors[name] * 1.5
    files[WEIGHTS] = save(tensors)
    status, rows = run(ID)
    assert status == 1
    greedy, found, expected, verdict = rows[ID]
    assert greedy != "72 of 72" and found != expected == "19.4800"
    assert verdict.startswith("MISMATCH: greedy token") and "perplexity differs" in verdict


def test_other_tokenization_is_a_mismatch(hub, run):
    files = hub.repositories[ID].files
    tokenizer = json.loads(files["tokenizer.json"])
    tokenizer["normalizer"]["normalizers"].pop(0)  # prepends a space
    files["tokenizer.json"] = json.dumps(tokenizer).encode()
    status, rows = run(ID)
    assert status == 1
    assert rows[ID][-1].startswith("MISMATCH: prompt 'Once upon a time' has the tokens [1, ")


@pytest.mark.slow
def test_other_chat_template_is_a_mismatch(hub, run):
    files = hub.repositories[CHAT_ID].files
    config = json.loads(files["tokenizer_config.json"])
    config["chat_template"] = "Chat:\n" + config["chat_template"]
    files["tokenizer_config.json"] = json.dumps(config).encode()
    status, rows = run(CHAT_ID)
    assert status == 1
    assert rows[CHAT_ID][-1] == "MISMATCH: the chat template gives other tokens"


def test_missing_expectation_is_reported_without_failing(hub, run, tmp_path):
    status, rows = run(ID, expectations=tmp_path)
    assert (status, rows) == (0, {ID: ["-", "19.4800", "-", "no expectation yet"]})


def test_missing_weights_fail(hub, run):
    del hub.repositories[ID].files[WEIGHTS]
    status, rows = run(ID)
    assert status == 1
    assert rows[ID][-1].startswith("FAILED: ") and "has no weights" in rows[ID][-1]


def test_missing_repository_fails(hub, run):
    del hub.repositories[ID]
    status, rows = run(ID)
    assert status == 1 and f"FAILED: no model '{ID}'" in rows[ID][-1]


@pytest.mark.parametrize(
    ("gated", "status", "verdict"),
    [
        (True, 0, "skipped: gated"),
        (False, 1, "FAILED: stand-in/stories260k (revision main) is gat"),
    ],
)
def test_gated_model_is_skipped_only_if_the_list_marks_it(hub, run, gated, status, verdict):
    hub.repositories[ID].gated = True
    found, rows = run(ID, gated=gated)
    assert found == status and rows[ID][-1].startswith(verdict)


def test_interrupted_download_fails_and_the_next_run_completes_it(hub, run, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between retries
    repository = hub.repositories[ID]
    repository.cut = {WEIGHTS}
    status, rows = run(ID)
    assert status == 1
    assert rows[ID][-1].startswith("FAILED: ") and "could not be downloaded" in rows[ID][-1]
    repository.cut = set()
    assert run(ID) == (0, {ID: ["72 of 72", "19.4800", "19.4800", "ok"]})


def test_crash_is_reported_as_a_failure(hub, run, monkeypatch):
    def crash(*args, **kwargs):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(real_checkpoints, "LLM", crash)
    assert run(ID) == (1, {ID: ["-", "-", "-", "FAILED: ZeroDivisionError: a defect"]})


def test_model_that_is_not_in_the_list_is_rejected(hub, run, capsys):
    with pytest.raises(SystemExit):
        run("org/other")
    assert "org/other" in capsys.readouterr().err


def test_near_tie_may_end_the_agreement():
    assert real_checkpoints.num_agreeing([1, 2, 3], [1, 2, 3]) == 3
    assert real_checkpoints.num_agreeing([1, 5, 3], [1, 2, 3]) == 1


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry["id"])
def test_list_names_supported_families_and_sources(entry):
    assert entry["family"] in ARCHITECTURES
    assert entry["found"] and type(entry["gated"]) is bool and entry["revision"]
