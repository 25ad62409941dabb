"""The figures of `benchmarks.structure`, on sources small enough to count by hand."""

import ast

import pytest

from benchmarks import structure


def test_private_accesses_exclude_self_and_dunders():
    tree = ast.parse("self._a\ncls._b\nengine._core\nengine.__dict__\nengine.core._state._x")
    assert structure.private_accesses(tree) == 3


def test_patches_are_counted_by_function():
    tree = ast.parse(
        "monkeypatch.setattr(a, 'b', 1)\nmock.patch.object(a, 'b')\nsetattr(a, 'b', 1)"
    )
    assert structure.patches(tree) == 2


def test_names_are_found_wherever_they_can_be_bound():
    tree = ast.parse("def f(a): return g(b=c.d)['e']")
    assert {"a", "b", "c", "d", "e", "g"} <= structure.names_in(tree)


def test_functions_count_arguments_without_self():
    tree = ast.parse("class C:\n  def f(self, a, /, b, *, c):\n    return 1\n")
    (function,) = structure.functions(tree)
    assert (function.name, function.lines, function.arguments) == ("f", 2, 3)
    (documented,) = structure.functions(ast.parse('def f():\n  """a\n  b"""\n  return 1\n'))
    assert documented.lines == 2
    (found,) = structure.classes(ast.parse("class C:\n  def f(self): self.a = self.b = 1\n"))
    assert (found.methods, found.attributes) == (1, 2)


def test_knots_are_strongly_connected_components():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert structure.knots(edges) == [["a", "b", "c"], ["d", "e"]]
    assert structure.knots({"a": {"b"}, "b": set()}) == []


def test_edges_between_rooms_exclude_internal_ones():
    edges = {"p.a.x": {"p.a.y", "p.b"}, "p.a.y": set(), "p.b": {"p"}}
    assert structure.between_rooms(edges) == {"p.a": {"p.b"}, "p.b": set()}


def test_complexity_is_measured_per_function(tmp_path):
    (tmp_path / "m.py").write_text(
        "def f(a):\n    if a:\n        return 1\n\n\ndef g():\n    pass\n"
    )
    assert sorted(structure.complexities([tmp_path])) == [1, 2]


@pytest.mark.slow
def test_packages_of_this_repository_are_measured():
    edges = structure.import_edges()
    assert "forge_jax.config" in edges["forge_jax.engine.thread"]
    assert structure.entries(structure.PACKAGES["forge_jax"]) > 10
