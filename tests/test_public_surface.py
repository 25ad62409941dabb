"""The public surface: `forge_jax.__all__`, its documentation and its types."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import forge_jax
from forge_jax import errors

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGE = (ROOT / "docs" / "python.md").read_text()
TREE = ast.parse((ROOT / "forge_jax" / "__init__.py").read_text())
NAMES = sorted(set(forge_jax.__all__) - {"__version__"})


def typed_imports() -> dict[str, str]:
    """Return the names that type checkers see, and the module of each."""
    (guard,) = (node for node in TREE.body if isinstance(node, ast.If))
    assert ast.unparse(guard.test) == "TYPE_CHECKING"
    return {
        alias.name: str(node.module)
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("name", NAMES)
def test_public_name_is_the_object_that_type_checkers_see(name):
    home = importlib.import_module(typed_imports()[name])
    assert getattr(forge_jax, name) is getattr(home, name)


def test_type_checkers_see_exactly_the_public_names():
    assert sorted(typed_imports()) == NAMES
    assert dir(forge_jax) == sorted(forge_jax.__all__)
    assert len(set(forge_jax.__all__)) == len(forge_jax.__all__)


def test_missing_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="'forge_jax' has no attribute 'LMM'"):
        _ = forge_jax.LMM


def test_every_error_is_public():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ForgeError)
    }
    assert defined == {name for name in NAMES if name.endswith("Error")}


def test_python_page_lists_exactly_the_public_names():
    tables = PAGE.split("## Public names")[1]
    cells = re.findall(r"^\| (`[^|]*`) \|", tables, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(forge_jax.__all__)


def test_documents_and_examples_use_only_public_names():
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]
    for file in files:
        text = file.read_text()
        used = ", ".join(re.findall(r"from forge_jax import ([\w, ]+)", text)).split(", ")
        used += re.findall(r"\bforge_jax\.(\w+)\(", text)
        assert set(used) - {""} <= set(forge_jax.__all__), file.name


def test_importing_the_package_imports_no_dependency():
    code = (
        "import sys; before = set(sys.modules); import forge_jax;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before};"
        "assert new <= sys.stdlib_module_names | {'forge_jax'}, new;"
        "assert not any(m.startswith('forge_jax.') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ["forge_jax", "kernels/forge_kernels", "serve/forge_serve"])
def test_each_package_is_marked_as_typed(package):
    assert (ROOT / package / "py.typed").is_file()


def test_public_modules_are_type_checked_strictly():
    modules = [importlib.import_module(name) for name in {"forge_jax", *typed_imports().values()}]
    strict = PYPROJECT["tool"]["pyright"]["strict"]
    assert {str(Path(str(module.__file__)).relative_to(ROOT)) for module in modules} <= set(strict)
    assert all((ROOT / file).is_file() for file in strict)


# ---- version -------------------------------------------------------------------------------------


def test_version_is_written_once():
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["project"]["dynamic"] == ["version", "readme"]
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "forge_jax/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", forge_jax.__version__)


def test_changelog_has_a_dated_section_for_the_version():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(forge_jax.__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])
