"""Light imports and a pure scheduler. Import contracts between modules are in `.importlinter`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import structure

ROOT = Path(__file__).parent.parent


def imported(source: str) -> set[str]:
    """Return the top-level packages that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_check_detects_imports_anywhere():
    source = "def f():\n    from forge_serve.server.app import x\n    import aiohttp.web as w"
    assert imported(source) == {"forge_serve", "aiohttp"}


@pytest.mark.parametrize(
    "module",
    [
        "forge_jax.config",
        "forge_jax.schedule.scheduler",
        "forge_jax.schedule.block_pool",
        "forge_jax.speculate.ngram",
        "forge_jax.speculate.suffix",
        "forge_jax.text",
        "forge_jax.engine.thread",
        "forge_jax.engine.fake",
        "forge_jax.tools.doctor",
        "forge_serve.cli.main",
    ],
)
def test_importing_does_not_import_jax(module):
    code = f"import sys, {module}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_llguidance_is_imported_with_the_first_grammar():
    code = (
        "import sys, forge_jax.engine.thread, forge_jax.grammar;"
        "assert 'llguidance' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


SOURCES = [
    *sorted((ROOT / "forge_jax/schedule").glob("*.py")),
    *(
        ROOT / f"forge_jax/speculate/{name}.py"
        for name in ("ngram_index", "ngram", "suffix", "draft_length")
    ),
    ROOT / "tests/schedule/simulation.py",
]


def shared_randomness(source: str) -> set[str]:
    """Return a module's uses of `random` other than seeded generators."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "random":
                found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "random.Random":
            found |= set() if node.args else {"Random()"}
    return found - {"Random"}


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_scheduler_has_no_clock_thread_or_randomness(file):
    clocks = {"jax", "asyncio", "threading", "time", "datetime", "os", "secrets", "uuid"}
    wrong = imported(file.read_text()) & clocks
    assert not wrong, f"{file.name} imports {', '.join(wrong)}"
    wrong = shared_randomness(file.read_text())
    assert not wrong, f"{file.name} uses random.{', '.join(wrong)}"


def test_check_detects_unseeded_randomness():
    source = "import random\nfrom random import choice\nrandom.random()\nrandom.Random()"
    assert shared_randomness(source) == {"choice", "random", "Random()"}
    assert not shared_randomness("def f(rng: random.Random): return random.Random(1)")


# ---- size and import cycles --------------------------------------------------------------------


@pytest.mark.parametrize(("package", "most"), [("forge_jax", 20), ("forge_serve", 16)])
def test_package_top_level_is_small(package, most):
    assert structure.entries(structure.PACKAGES[package]) <= most


@pytest.mark.parametrize("package", structure.PACKAGES)
def test_no_function_exceeds_the_length_limit(package):
    long = [
        f"{path.relative_to(ROOT)}: {function.name} has {function.lines} lines"
        for path, tree in structure.parsed(structure.PACKAGES[package])
        for function in structure.functions(tree)
        if function.lines > structure.LONG_FUNCTION
    ]
    assert not long, f"split them: at most {structure.LONG_FUNCTION} lines without docstrings"


def test_no_modules_import_each_other_in_a_circle():
    assert structure.knots(structure.import_edges()) == []
