"""The sdist and the wheel: their files, their metadata, and an installation of the wheel."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from server_process import running

import forge_jax

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "forge_jax": ROOT / "forge_jax",
    "forge_kernels": ROOT / "kernels" / "forge_kernels",
    "forge_serve": ROOT / "serve" / "forge_serve",
}
ESSENTIAL = {
    "forge_jax/checkpoint/bundled/forge-tiny/model.safetensors",
    "forge_jax/py.typed",
    "forge_kernels/cpu/src/amx.cc",
    "forge_kernels/cpu/src/kernels.cc",
    "forge_kernels/cpu/src/probe.cc",
    "forge_kernels/cpu/src/rounded.cc",
    "forge_kernels/py.typed",
    "forge_serve/py.typed",
    "forge_serve/server/static/index.html",
}
SDIST = f"forge_jax-{forge_jax.__version__}"
SDIST_ROOT_FILES = {
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md"),
    *("constraints.txt", "pyproject.toml", ".gitignore"),
}
SDIST_FOLDERS = {"deploy", "docs", "examples", "forge_jax", "kernels", "serve"}

pytestmark = pytest.mark.slow


def files_of(folder: Path) -> set[str]:
    """Return the files below a folder, without Python's caches."""
    return {
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def build(source: Path, target: str, folder: Path) -> Path:
    """Build one distribution, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / SDIST


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the sdist, like package indexes and distributions."""
    return build(unpacked, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"{SDIST}.dist-info/METADATA"))


def test_sdist_has_packages_and_documents_but_no_tests(unpacked):
    found = files_of(unpacked)
    assert {file for file in found if "/" not in file} == SDIST_ROOT_FILES
    assert {file.split("/")[0] for file in found if "/" in file} == SDIST_FOLDERS
    assert {p.name for p in (ROOT / "docs").glob("*.md")} <= files_of(unpacked / "docs")
    for folder in ("deploy", "examples", "forge_jax", "kernels", "serve"):
        assert files_of(unpacked / folder) == files_of(ROOT / folder), folder
    assert not [file for file in found if re.search(r"(^|/)(tests?|\.git)/", file)]


def test_wheel_has_exactly_the_three_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    info = {name for name in found if name.startswith(f"{SDIST}.dist-info/")}
    expected = {f"{name}/{f}" for name, folder in PACKAGES.items() for f in files_of(folder)}
    assert found - info == expected
    assert expected >= ESSENTIAL
    assert {name.split("/", 1)[1] for name in info} == {
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }


def test_metadata_has_version_author_and_license(metadata):
    assert metadata["Version"] == forge_jax.__version__
    assert metadata["Author"] == "The forge-jax developers"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier", ())


def test_package_index_readme_has_no_relative_links(metadata):
    readme = metadata.get_payload()
    assert isinstance(readme, str) and readme.lstrip().startswith("# forge-jax")
    targets = re.findall(r"\]\(([^)]*)\)", readme)
    targets += re.findall(r"(?:href|src|srcset)=\"([^\"]*)\"", readme)
    assert [t for t in targets if not t.startswith(("https://", "http://", "#"))] == []


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with the wheel; dependencies come from the tests' environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    variables = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", scheme="venv", vars=variables))
    # Path files in a folder that another one names are not read, so an editable forge-jax is
    # excluded.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder outside any checkout, with an environment that refers to none."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("VIRTUAL_ENV", "")
    return tmp_path


def test_installed_wheel_imports_its_own_files_and_has_its_version(environment, outside):
    code = (
        "import importlib.metadata, json, forge_jax, forge_kernels, forge_serve;"
        "print(json.dumps([forge_jax.__file__, forge_kernels.__file__, forge_serve.__file__,"
        "importlib.metadata.version('forge-jax'), forge_jax.__version__]))"
    )
    python = environment / "bin" / "python"
    done = subprocess.run([python, "-c", code], cwd=outside, capture_output=True, check=True)
    *files, installed, imported = json.loads(done.stdout)
    assert all(Path(file).is_relative_to(environment) for file in files), files
    assert installed == imported == forge_jax.__version__
    command = [environment / "bin" / "forge-jax", "--version"]
    done = subprocess.run(command, cwd=outside, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"forge-jax {forge_jax.__version__}"


def test_installed_wheel_serves_the_bundled_model(environment, outside):
    sizes = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-blocks", "64")
    command = [str(environment / "bin" / "forge-jax"), "serve", "forge-tiny", "--port", "0", *sizes]
    with running(command, stdout=subprocess.PIPE, cwd=outside) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.match(r"forge-jax serves forge-tiny at (http://\S+);", line)
        assert found, f"the server did not start: {line!r}"
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"{found[1]}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=200) as response:
            answer = json.load(response)
        with urllib.request.urlopen(f"{found[1]}/version", timeout=10) as response:
            assert json.load(response) == {"version": forge_jax.__version__}
        with urllib.request.urlopen(f"{found[1]}/", timeout=10) as response:
            assert b"<html" in response.read()
    assert "Paris" in answer["choices"][0]["text"]


def test_plain_checkout_has_its_version(outside):
    paths = [ROOT, ROOT / "kernels", ROOT / "serve", sysconfig.get_path("purelib")]
    code = (
        "import sys; sys.path[:0] = sys.argv[1:];"
        "from forge_serve.cli.main import make_parser; make_parser().parse_args(['--version'])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *map(str, paths)],
        cwd=outside, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == f"forge-jax {forge_jax.__version__}", done.stderr
