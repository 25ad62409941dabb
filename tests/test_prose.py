"""The prose check finds what it must find, and reads prose only."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "prose.py"
LONG = " ".join(["word"] * 26)


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("prose", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prose"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["prose"]


@pytest.fixture
def rules(prose):
    """Return a function from path and source to the broken rules with their lines."""

    def check(path: str, source: str) -> list[tuple[int, str]]:
        texts = prose.texts_of(path, source)
        return [(hit.line, hit.rule) for text in texts for hit in prose.hits_in(text)]

    return check


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("subject", "What is compiled and found wrong fails."),
        ("subject", "The log has it: those that fail."),
        ("person", "The code does not know where it runs."),
        ("person", "Because nobody sends it."),
        ("calque", "The step is computed anew."),
        ("calque", "It runs in a process of its own."),
        ("calque", "Strings count, too."),
        ("term", "It lowers the gaps between tokens."),
        ("because", "Keep it, for it is small."),
        ("semicolons", "One part; a second part; a third part."),
        ("long", f"{LONG}."),
    ],
)
def test_each_rule_finds_a_planted_sentence(rules, rule, text):
    assert rules("page.md", f"# Title\n\nA good sentence. {text}\n") == [(3, rule)]


@pytest.mark.parametrize(
    "text",
    [
        "Return the queue's length.",
        "If the queue is full, the server returns 503.",
        "What is the difference?",
        LONG.removesuffix(" word"),
    ],
)
def test_plain_sentences_pass(rules, text):
    assert rules("page.md", text) == []


def test_long_cells_are_found_in_tables(rules):
    cell = " ".join(["word"] * 13)
    assert rules("page.md", f"| a | b |\n|---|---|\n| fits | {cell} |\n") == [(3, "cell")]


def test_code_and_comments_in_markdown_are_ignored(rules):
    page = "`anew`\n\n<!-- anew\nanew -->\n\n```python\nanew = 1\n```\n\nThen anew.\n"
    assert rules("page.md", page) == [(10, "calque")]


def test_python_docstrings_comments_and_messages_are_read(rules):
    source = (
        '"""Of two."""\n'
        "x = 1  # computed anew\n"
        "def f():\n"
        '    """Whether it is set.\n\n    Raises:\n      ValueError: nobody did.\n    """\n'
        '    raise ValueError(f"{x} is what the server likes")\n'
        "anew = 'likewise'\n"
    )
    found = rules("forge_jax/a.py", source)
    assert sorted(found) == [
        (1, "start"),
        (2, "calque"),
        (4, "person"),
        (4, "whether"),
        (9, "person"),
    ]


def test_comments_on_adjacent_lines_are_one_text(rules):
    assert rules("a.py", f"# {LONG[:60]}\n# {LONG[61:]}\n") == [(1, "long")]
    assert rules("a.cc", f"// {LONG[:60]}\n// {LONG[61:]}\n") == [(1, "long")]


def test_trailing_comments_and_docstring_entries_need_a_noun(rules):
    source = (
        "x = 1  # of the sampler\n"
        "y = 2  # per token\n"
        "z = 3\n"
        "# of a comment on its own line\n"
        "def f(seed, **options):\n"
        '    """Sample.\n\n'
        "    Args:\n"
        "      seed: {0}the sampler.\n"
        "      a, b: {0}the sampler.\n"
        "      **options: {0}the sampler.\n"
        '    """\n'
    )
    assert rules("a.py", source.format("of ")) == [(6, "noun")] * 3 + [(1, "noun")]
    assert rules("a.py", source.format("option of ")) == [(1, "noun")]


def test_riddles_are_found_in_test_names(rules):
    source = "def test_what_is_found(): pass\ndef test_index_matches_linear_search(): pass\n"
    source += "def test_error_says_so(): pass\ndef say(): pass\n"
    source += "def test_missing_part_is_named(): pass\n"
    assert rules("tests/test_a.py", source) == [(1, "name"), (3, "name"), (5, "name")]
    assert rules("forge_jax/a.py", source) == []
