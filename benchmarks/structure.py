"""Measures the structure of the code: layers, sizes, complexity, and what tests reach into.

    python -m benchmarks.structure [--output FILE.json] [--trace NAME]

Prints one table per question. The code is neither imported nor run. Import cycles come from grimp,
with imports for type checkers left out. Cyclomatic complexity comes from ruff. `--trace` counts the
product files that name a parameter (default: temperature), which shows how far it travels.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "forge_jax": ROOT / "forge_jax",
    "forge_kernels": ROOT / "kernels" / "forge_kernels",
    "forge_serve": ROOT / "serve" / "forge_serve",
}
LONG_FUNCTION = 60  # lines
MANY_ARGUMENTS = 5
COMPLEX = 10  # cyclomatic complexity
LARGEST_CLASSES = 8


@dataclass(frozen=True)
class Function:
    """One function or method.

    Attributes:
      lines: from `def` to its end, without its docstring.
      arguments: without self and cls.
    """

    name: str
    lines: int
    arguments: int


@dataclass(frozen=True)
class Class:
    """One class: its own methods, and the attributes that its methods assign to self."""

    name: str
    methods: int
    attributes: int


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def parsed(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sources(folder):
        yield path, ast.parse(path.read_text(), filename=str(path))


def functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            names = [name for name in names if name not in ("self", "cls")]
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1 - _docstring_lines(node)
            yield Function(node.name, lines, len(names))


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node, clean=False) is None:
        return 0
    first = node.body[0]
    assert first.end_lineno is not None
    return first.end_lineno - first.lineno + 1


def classes(tree: ast.Module) -> Iterator[Class]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [
                item
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            yield Class(node.name, len(methods), len(_assigned(methods)))


def _assigned(methods: Iterable[ast.AST]) -> set[str]:
    return {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def names_in(tree: ast.Module) -> set[str]:
    """Return every identifier that a module uses, and every string that is one."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                found.add(name)
    return found


def private_accesses(tree: ast.Module) -> int:
    """Count attributes with one leading underscore, except on self and cls."""
    return sum(
        isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr) is not None
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in ast.walk(tree)
    )


def patches(tree: ast.Module) -> int:
    """Count calls of `monkeypatch.setattr` and `patch.object`."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func).endswith(("monkeypatch.setattr", "patch.object"))
        for node in ast.walk(tree)
    )


def knots(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return strongly connected components of more than one node, largest first (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for child in sorted(edges.get(node, ())):
            if child not in index:
                visit(child)
                low[node] = min(low[node], low[child])
            elif child in stack:
                low[node] = min(low[node], index[child])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return sorted(found, key=len, reverse=True)


def import_edges() -> dict[str, set[str]]:
    """Return each module's imports among the three packages, without those for type checkers."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    return {
        module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules
    }


def room(module: str) -> str:
    """Return the top-level entry of its package that a module is in."""
    return ".".join(module.split(".")[:2])


def between_rooms(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, imported in edges.items():
        if module.count("."):
            others = {room(name) for name in imported if name.count(".")} - {room(module)}
            found.setdefault(room(module), set()).update(others)
    return found


def complexities(folders: Iterable[Path]) -> list[int]:
    """Return the cyclomatic complexity of every function, from ruff."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--ignore-noqa"]
    command += ["--select", "C901", "--config", "lint.mccabe.max-complexity=0"]
    command += ["--output-format", "json", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"ruff failed: {done.stderr.strip()[-500:]}")
    messages = [item["message"] for item in json.loads(done.stdout)]
    return [int(re.search(r"\((\d+) > 0\)", message)[1]) for message in messages]  # type: ignore[index]


def entries(folder: Path) -> int:
    """Count modules and folders at the top of a package, without `__init__.py` and data."""
    hidden = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    return sum(
        path.name not in hidden and (path.suffix == ".py" or any(path.glob("*.py")))
        for path in folder.iterdir()
    )


def lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in sources(folder))


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[int(share * (len(values) - 1))]


def measure(traced: str) -> dict[str, Any]:
    found: dict[str, Any] = {"packages": {}}
    modules: list[tuple[Path, ast.Module]] = []
    for package, folder in PACKAGES.items():
        trees = list(parsed(folder))
        modules += trees
        own = [function for _, tree in trees for function in functions(tree)]
        complexity = complexities([folder])
        found["packages"][package] = {
            "lines": lines(folder),
            "entries": entries(folder),
            "functions": len(own),
            "lines_median": statistics.median(function.lines for function in own),
            "lines_p95": percentile([function.lines for function in own], 0.95),
            "long_functions": sum(function.lines > LONG_FUNCTION for function in own),
            "many_arguments": sum(function.arguments > MANY_ARGUMENTS for function in own),
            "complexity_mean": round(statistics.mean(complexity), 2),
            "complex_functions": sum(value > COMPLEX for value in complexity),
            "complexity_max": max(complexity),
        }
    largest = sorted(
        (each for _, tree in modules for each in classes(tree)),
        key=lambda each: each.methods,
        reverse=True,
    )
    found["classes"] = [asdict(each) for each in largest[:LARGEST_CLASSES]]
    edges = import_edges()
    found["module_cycles"] = knots(edges)
    found["room_cycles"] = knots(between_rooms(edges))
    found["traced"] = {
        "name": traced,
        "files": [
            str(path.relative_to(ROOT)) for path, tree in modules if traced in names_in(tree)
        ],
    }
    tests = [tree for _, tree in parsed(ROOT / "tests")]
    found["tests"] = {
        "lines": lines(ROOT / "tests"),
        "private_accesses": sum(map(private_accesses, tests)),
        "patches": sum(map(patches, tests)),
    }
    found["benchmarks"] = {"lines": lines(ROOT / "benchmarks")}
    return found


def show(found: dict[str, Any]) -> None:
    rows = list(next(iter(found["packages"].values())))
    print(f"{'':18}" + "".join(f"{package:>15}" for package in found["packages"]))
    for row in rows:
        cells = (figures[row] for figures in found["packages"].values())
        print(f"{row.replace('_', ' '):18}" + "".join(f"{cell:>15}" for cell in cells))
    print("\nlargest classes (methods, attributes)")
    for each in found["classes"]:
        print(f"  {each['name']:22}{each['methods']:>4}{each['attributes']:>4}")
    for name in ("module_cycles", "room_cycles"):
        print(f"\n{name.replace('_', ' ')}: {len(found[name])}")
        for cycle in found[name]:
            print(f"  {' '.join(cycle)}")
    print(f"\nfiles that name {found['traced']['name']}: {len(found['traced']['files'])}")
    print(f"tests: {found['tests']}")
    print(f"benchmarks: {found['benchmarks']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    parser.add_argument(
        "--trace", default="temperature", metavar="NAME", help="the parameter name to count"
    )
    given = parser.parse_args()
    found = measure(given.trace)
    show(found)
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
