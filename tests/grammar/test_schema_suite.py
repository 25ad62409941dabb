"""A sample of the JSON Schema Test Suite: our grammars give llguidance's expected results."""

import json
from collections import Counter
from pathlib import Path

import pytest

from forge_jax.engine.fake import fake_tokenizer
from forge_jax.errors import GrammarError, RequestError
from forge_jax.grammar import GrammarCompiler, GrammarSpec

SAMPLE = Path(__file__).parent.parent / "fixtures" / "json_schema" / "sample.jsonl"
TOKENIZER = fake_tokenizer()
# llguidance's categories, best first; schemas that do not compile are one category.
WORSE = ("pass", "false_negative", "refused", "false_positive")
REFUSED = ("skip_compile", "compile_error_valid", "compile_error_all_invalid")


@pytest.fixture(scope="module")
def compiler():
    made = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, (TOKENIZER.eos_token_id,), limits=None)
    yield made
    made.close()


def test_schema_suite_gives_llguidances_results(compiler):
    seen, worse = Counter(), []
    lines = SAMPLE.read_text().splitlines()
    for group in map(json.loads, lines):
        for test, got in zip(group["tests"], outcomes(compiler, group), strict=True):
            expected = "refused" if test["expected"] in REFUSED else test["expected"]
            seen[expected] += 1
            if WORSE.index(got) > WORSE.index(expected):
                worse.append((group["name"], test["data"], expected, got))
    assert worse == []
    assert len(lines) == 300
    assert seen["pass"] > 500 and seen["refused"] > 500, "both have been tried"
    assert seen["false_positive"] <= 1, "what is let through wrongly is known"


def outcomes(compiler, group) -> list[str]:
    try:
        grammar = compiler.compile(GrammarSpec.json_schema(group["schema"]))
    except RequestError:
        return ["refused"] * len(group["tests"])
    return [outcome(grammar.matcher(), test["data"], test["valid"]) for test in group["tests"]]


def outcome(matcher, value, valid: bool) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        matcher.accept(TOKENIZER.encode(text, False))
        taken = matcher.accepting
    except GrammarError:
        taken = False
    if taken == valid:
        return "pass"
    return "false_negative" if valid else "false_positive"


def test_overly_permissive_grammar_is_detected(compiler):
    narrow = {"schema": {"maximum": 3}, "tests": [{"data": 4, "valid": False}]}
    assert outcomes(compiler, narrow) == ["pass"]
    assert outcomes(compiler, {**narrow, "schema": {}}) == ["false_positive"]
