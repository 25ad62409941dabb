"""No code from data: no package deserializes objects, evaluates text or starts a shell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "forge_jax", ROOT / "kernels" / "forge_kernels", ROOT / "serve" / "forge_serve"]

MODULES = {
    "pickle", "_pickle", "cPickle", "pickletools", "marshal", "shelve", "dill", "cloudpickle",
    "joblib", "jsonpickle", "torch", "code", "codeop", "runpy", "imp", "pty", "commands",
    "copyreg", "msgpack", "yaml", "xml", "telnetlib",
}  # fmt: skip
# Calls by their written name, on any object.
CALLS = {
    "eval", "exec", "__import__", "execfile", "compile_command", "system", "popen", "spawnl",
    "spawnv", "execv", "execve", "execvp", "fork", "unsafe_load", "full_load",
    "import_module", "exec_module", "load_module", "spec_from_file_location", "literal_eval",
}  # fmt: skip
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
LOADERS = {("yaml", "load"), ("torch", "load"), ("np", "fromfile"), ("numpy", "fromfile")}

# (file, call) -> the reason why it is allowed.
ALLOWED = {
    ("forge_jax/__init__.py", "import_module"): "the names of a fixed table of this package",
    (
        "forge_jax/tools/doctor/checks.py",
        "subprocess",
    ): "Python, with a module of this package",
    ("forge_jax/tools/doctor/machine.py", "subprocess"): "nvidia-smi, by a list of words",
    ("forge_jax/grammar/probe.py", "subprocess"): "Python, with a module of this package",
    ("serve/forge_serve/generation/pdf.py", "subprocess"): "Python, with a module of this package",
    ("forge_jax/engine/process/launcher.py", "subprocess"): "Python, with a module of this package",
    ("forge_jax/engine/hosts/service.py", "subprocess"): "Python, with a module of this package",
    ("forge_jax/checkpoint/torch_bin.py", "pickletools"): "the names of opcodes, for messages",
    (
        "serve/forge_serve/integrations/ray.py",
        "subprocess",
    ): "Python, with a module of this package",
    ("kernels/forge_kernels/cpu/build.py", "subprocess"): "the C++ compiler, by a list of words",
}


def findings(source: str) -> list[tuple[int, str]]:
    """Return line and name of each forbidden use."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names]
            tops = {name.partition(".")[0] for name in names}
            found += [(node.lineno, top) for top in tops & (MODULES | {"subprocess"})]
            found += [
                (node.lineno, alias.name)
                for alias in node.names
                if isinstance(node, ast.ImportFrom) and alias.name in CALLS
            ]
        elif isinstance(node, ast.Call):
            found += [(node.lineno, name) for name in _call_faults(node)]
        elif isinstance(node, ast.Name) and node.id in {"eval", "exec", "__import__"}:
            found.append((node.lineno, node.id))  # includes references that are only passed on
    return found


def _call_faults(call: ast.Call) -> list[str]:
    match call.func:
        case ast.Name(id=name):
            owner = ""
        case ast.Attribute(attr=name, value=ast.Name(id=owner)):
            pass
        case ast.Attribute(attr=name):
            owner = "?"
        case _:
            return []
    faults = []
    if name in CALLS or (owner, name) in LOADERS:
        faults.append(name)
    if name == "compile" and owner == "":
        faults.append("compile")  # the builtin, not `re.compile` or executables
    for keyword in call.keywords:
        if keyword.arg in KEYWORDS and not _is_false(keyword.value):
            faults.append(f"{keyword.arg}=")
    return faults


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_no_code_is_made_from_data():
    used = set()
    for file in sorted(file for package in PACKAGES for file in package.rglob("*.py")):
        name = str(file.relative_to(ROOT))
        for line, what in findings(file.read_text(encoding="utf-8")):
            assert (name, what) in ALLOWED, f"{name}:{line} uses {what}"
            used.add((name, what))
    assert used == set(ALLOWED), f"no longer needed: {set(ALLOWED) - used}"


def test_templates_are_rendered_in_one_sandbox():
    """`jinja2.Environment`, or a mutable sandbox, would bypass the limits."""
    for file in sorted(file for package in PACKAGES for file in package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                    assert not name.endswith("Environment") and name != "Template", (file, name)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("def f():\n    from marshal import loads", "marshal"),
        ("import shelve as s, os", "shelve"),
        ("import torch.serialization", "torch"),
        ("from dill import load", "dill"),
        ("import cloudpickle", "cloudpickle"),
        ("from yaml import safe_load", "yaml"),
        ("eval('1')", "eval"),
        ("f = eval", "eval"),
        ("builtins.exec(text)", "exec"),
        ("exec(text, {})", "exec"),
        ("compile(text, 'x', 'exec')", "compile"),
        ("__import__(name)", "__import__"),
        ("importlib.import_module(name)", "import_module"),
        ("from importlib import import_module", "import_module"),
        ("np.load(file, allow_pickle=True)", "allow_pickle="),
        ("np.load(file, allow_pickle=flag)", "allow_pickle="),
        ("torch.load(file)", "load"),
        ("os.system('ls')", "system"),
        ("os.popen('ls')", "popen"),
        ("run(text, shell=True)", "shell="),
        ("import subprocess", "subprocess"),
        ("from_pretrained(name, trust_remote_code=True)", "trust_remote_code="),
    ],
)
def test_check_detects_forbidden_calls(source, what):
    assert what in [name for _, name in findings(source)]


@pytest.mark.parametrize(
    "source",
    ["re.compile('a')", "runner.compile()", "np.load(f, allow_pickle=False)", "run(x, shell=False)",
     "json.loads(text)", "evaluate(x)"],
)  # fmt: skip
def test_check_accepts_ordinary_code(source):
    assert findings(source) == []
