"""Architectures from outside of the package: registered ones, and entry points of packages."""

import re
import sys

import pytest

import forge_jax
from forge_jax.errors import ModelError, UnsupportedModelError
from forge_jax.models import Architecture, decoder_spec, plugins
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.plugins import architecture_names, code_digest, find_architecture

OWN = Architecture(
    read_spec=lambda config, generation: decoder_spec(config, generation, "OwnForCausalLM"),
    defaults={},
)
MODULE = "from forge_jax.models.families.llama import ARCHITECTURE\n"


@pytest.fixture(autouse=True)
def _no_registrations(monkeypatch):
    monkeypatch.setattr(plugins, "_registered", {})


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package with one module and an entry point on the path, as pip lays it out."""

    def add(package: str, module: str, name: str = "OwnForCausalLM", code: str = MODULE) -> None:
        root = tmp_path / package
        info = root / f"{package}-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(
            f"[forge_jax.models]\n{name} = {module}:ARCHITECTURE\n"
        )
        (root / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(root)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return add


def test_registered_architecture_is_found_and_listed():
    forge_jax.register("OwnForCausalLM", OWN)
    assert find_architecture("OwnForCausalLM") is OWN
    assert architecture_names() == [*ARCHITECTURES, "OwnForCausalLM"]
    with pytest.raises(UnsupportedModelError, match=r"'Other' .* supported: .*, OwnForCausalLM$"):
        find_architecture("Other")


def test_entry_point_is_imported_when_its_name_is_needed(install):
    install("own-models", "own_lazy")
    assert "OwnForCausalLM" in architecture_names()
    find_architecture("LlamaForCausalLM")
    assert "own_lazy" not in sys.modules
    assert find_architecture("OwnForCausalLM") is ARCHITECTURES["LlamaForCausalLM"]
    assert "own_lazy" in sys.modules


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import missing_module",
            "the entry point OwnForCausalLM = own_broken:ARCHITECTURE of own-models 1.5 cannot be "
            "imported: ModuleNotFoundError: No module named 'missing_module': reinstall or "
            "uninstall the package",
        ),
        ("raise OSError('disk')", "of own-models 1.5 cannot be imported: OSError: disk: reinst"),
        ("ARCHITECTURE = 5", "of own-models 1.5 must be a forge_jax.models.Architecture, not 5"),
        ("x = 1", "of own-models 1.5 cannot be imported: AttributeError: "),
    ],
)
def test_broken_entry_point_is_reported_with_its_package(install, code, message):
    install("own-models", "own_broken", code=code)
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        find_architecture("OwnForCausalLM")


def test_name_of_a_built_in_architecture_cannot_be_registered():
    with pytest.raises(ModelError, match="'LlamaForCausalLM': it is already built in: choose"):
        forge_jax.register("LlamaForCausalLM", OWN)


def test_name_cannot_be_registered_twice(install):
    forge_jax.register("OwnForCausalLM", OWN)
    with pytest.raises(ModelError, match="it is already registered: choose another name"):
        forge_jax.register("OwnForCausalLM", OWN)
    install("own-models", "own_twice", "SecondForCausalLM")
    with pytest.raises(ModelError, match=r"it is already provided by own-models 1\.5: choose"):
        forge_jax.register("SecondForCausalLM", OWN)


@pytest.mark.parametrize("name", ["OwnForCausalLM", "LlamaForCausalLM"])
def test_name_from_two_places_is_rejected(install, name):
    install("own-models", "own_first", name)
    install("other-models", "own_second", name)
    with pytest.raises(UnsupportedModelError) as caught:
        find_architecture(name)
    message = str(caught.value)
    assert "provided by own-models 1.5" in message and "provided by other-models 1.5" in message
    assert ("built in" in message) == (name == "LlamaForCausalLM")
    assert message.endswith("uninstall a package or rename its architecture")


def test_digest_covers_the_code_of_a_familys_package(install, tmp_path):
    own = "\ndef read_spec(*files): return llama.ARCHITECTURE.read_spec(*files)\n"
    code = f"import dataclasses\nfrom forge_jax.models.families import llama\n{own}"
    code += "ARCHITECTURE = dataclasses.replace(llama.ARCHITECTURE, read_spec=read_spec)\n"
    install("own-models", "own_code", code=code)
    first = code_digest("OwnForCausalLM")
    assert first is not None and code_digest("OwnForCausalLM") == first
    (tmp_path / "own-models" / "own_code.py").write_text(code + "# changed\n")
    assert code_digest("OwnForCausalLM") not in (None, first)
    assert {code_digest(name) for name in ARCHITECTURES} == {None}
