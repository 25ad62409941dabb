"""Model names: each resolves to a folder or an error that names the remedy."""

from fnmatch import fnmatch
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from forge_jax.checkpoint import hub
from forge_jax.errors import ModelError


@pytest.fixture
def download(monkeypatch, tmp_path):
    """Replace the network: `download.fails_with(error)`, or it returns a folder."""

    class Download:
        def __init__(self, *holds):
            self.holds, self.calls, self.error = holds, [], None

        def __call__(self, *args, **kwargs):
            self.calls.append((args, kwargs))
            if self.error:
                raise self.error
            for name in self.holds:
                if any(fnmatch(name, pattern) for pattern in kwargs["allow_patterns"]):
                    (tmp_path / name).touch()
            return str(tmp_path)

    fake = Download("model.safetensors", "pytorch_model.bin")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_existing_folder_resolves_to_itself(tmp_path, monkeypatch, download):
    assert hub.resolve(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name").is_dir()
    assert not download.calls


def test_hub_id_is_downloaded_without_other_formats(download, tmp_path):
    assert hub.resolve("org/some-model_1.5", "v2") == tmp_path
    ((args, kwargs),) = download.calls
    assert args == ("org/some-model_1.5",) and kwargs["revision"] == "v2"
    assert "*.safetensors" in kwargs["allow_patterns"]
    assert not any("bin" in pattern for pattern in kwargs["allow_patterns"])


def test_bin_files_are_downloaded_if_there_is_no_safetensors(download, tmp_path):
    download.holds = ("pytorch_model-00001-of-00002.bin", "training_args.bin", "config.json")
    assert hub.resolve("org/old-model", "v2") == tmp_path
    assert {file.name for file in tmp_path.iterdir()} == {download.holds[0], download.holds[2]}
    assert [kwargs["revision"] for _, kwargs in download.calls] == ["v2", "v2"]


@pytest.mark.parametrize("name", ["no-such-folder", "./org/name", "a/b/c", "", "org/", "/missing"])
def test_invalid_id_is_rejected_without_the_network(download, name):
    download.calls.clear()
    with pytest.raises(ModelError, match=r"neither forge-tiny, nor an existing folder or \.gguf"):
        hub.resolve(name)
    assert not download.calls


def test_file_is_rejected(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"or the folder with config\.json"):
        hub.resolve(str(tmp_path / "model.safetensors"))


def http_error(kind: type[Exception], message: str) -> Exception:
    return kind(message, response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            http_error(errors.GatedRepoError, "gated"),
            "accept its terms at .*org/m.*HF_TOKEN",
        ),
        (http_error(errors.RepositoryNotFoundError, "404"), "no model 'org/m' on the"),
        (http_error(errors.RevisionNotFoundError, "404"), "no revision 'main'"),
        (errors.LocalEntryNotFoundError("offline"), "cannot be reached: go online, or copy"),
        (http_error(errors.HfHubHTTPError, "500"), "could not be downloaded: 500"),
        (errors.HFValidationError("bad"), "is not a Hugging Face ID"),
        (OSError(28, "No space left on device"), "could not be downloaded: .*No space left"),
        (RuntimeError("refused"), "could not be downloaded: refused"),
    ],
)
def test_download_failures_name_the_remedy(download, error, message):
    download.error = error
    with pytest.raises(ModelError, match=message):
        hub.resolve("org/m", "main")


def test_bundled_model_resolves_without_a_download(tmp_path, monkeypatch):
    monkeypatch.setattr(hub.importlib.resources, "files", lambda package: tmp_path)
    with pytest.raises(ModelError, match="forge-tiny is not bundled"):
        hub.resolve("forge-tiny")
    folder = tmp_path / "bundled" / "forge-tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert hub.resolve("forge-tiny") == folder
