"""GGUF files of the Hub, from a local server with its API."""

import functools

import huggingface_hub
import pytest

import forge_jax
from forge_jax.checkpoint.gguf import read_gguf
from forge_jax.checkpoint.hub import resolve
from forge_jax.errors import ModelError
from tests import fake_hub

ID = "organization/Small-GGUF"
PARTS = [f"Q8_0/Small-Q8_0-{k:05}-of-00002.gguf" for k in (1, 2)]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Serve a repository of GGUF files from a local hub, and redirect downloads to it."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with fake_hub.serving() as hub:
        names = ["Small-Q4_K_M.gguf", "Small-UD-Q4_K_M.gguf", "small.q4_0.gguf", *PARTS]
        files = {name: name.encode() for name in [*names, "mmproj-F16.gguf", "Small-F16.gguf"]}
        files |= {"config.json": b"{}", "README.md": b"text"}
        hub.repositories[ID] = fake_hub.Repository(files)
        download = functools.partial(
            huggingface_hub.snapshot_download,
            endpoint=hub.url,
            cache_dir=tmp_path / "cache",
            token=False,
        )
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        listing = huggingface_hub.HfApi(endpoint=hub.url, token=False).list_repo_files
        monkeypatch.setattr(huggingface_hub, "list_repo_files", listing)
        yield hub


def downloaded(tmp_path):
    snapshots = next((tmp_path / "cache").glob("models--*/snapshots/*"))
    return {file.relative_to(snapshots).as_posix() for file in snapshots.rglob("*.*")}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("q4_0", ["small.q4_0.gguf"]),
        ("Q4_0", ["small.q4_0.gguf"]),
        ("f16", ["Small-F16.gguf"]),
        ("UD-Q4_K_M", ["Small-UD-Q4_K_M.gguf"]),
        ("Q8_0", PARTS),
        ("Small-Q4_K_M.gguf", ["Small-Q4_K_M.gguf"]),
        ("Small-Q8_0-00001-of-00002.gguf", PARTS),
    ],
)
def test_only_the_files_of_the_type_are_downloaded(kind, names, hub, tmp_path):
    file = resolve(f"{ID}:{kind}")
    assert file.read_bytes() == names[0].encode() and file.name in names[0]
    assert downloaded(tmp_path) == set(names)


def test_downloaded_file_is_found_in_the_cache(hub, tmp_path, monkeypatch):
    file = resolve(f"{ID}:Q4_0")
    offline = functools.partial(huggingface_hub.snapshot_download, local_files_only=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert resolve(f"{ID}:Q4_0") == file
    hub.repositories.clear()
    with pytest.raises(ModelError, match="is not in the cache and"):
        resolve(f"{ID}:Q8_0")


def test_several_files_of_a_type_are_listed(hub):
    match = r"has 2 GGUF files for 'Q4_K_M' \(Small-Q4_K_M.gguf, Small-UD-Q4_K_M.gguf\): pass the"
    with pytest.raises(ModelError, match=match):
        resolve(f"{ID}:Q4_K_M")


@pytest.mark.parametrize("kind", ["Q5_K_M", "other.gguf"])
def test_missing_type_is_rejected_with_the_files(kind, hub):
    with pytest.raises(ModelError, match=f"no GGUF file for '{kind}': .*Small-F16.gguf") as raised:
        resolve(f"{ID}:{kind}")
    assert "00002-of" not in str(raised.value) and "mmproj" not in str(raised.value)


def test_repository_with_only_gguf_files_requires_a_type(hub):
    with pytest.raises(ModelError, match=f"has no safetensors .* such as {ID}:Q4_K_M .*q4_0.gguf"):
        resolve(ID)


def test_missing_repository_is_reported(hub):
    with pytest.raises(ModelError, match="no model 'organization/none' on the Hugging Face Hub"):
        resolve("organization/none:Q4_0")


def test_downloaded_model_loads(hub, stories):
    gguf = stories.parent / "stories260k-gguf" / "tinyllamas-stories-260k-f32.gguf"
    files = {"tinyllamas-stories-260k-f32.gguf": gguf.read_bytes()}
    hub.repositories["karpathy/tinyllamas"] = fake_hub.Repository(files)
    model = forge_jax.load("karpathy/tinyllamas:F32", progress=False)
    assert model.spec.architecture == "LlamaForCausalLM"
    assert read_gguf(resolve("karpathy/tinyllamas:f32")).version == 1
