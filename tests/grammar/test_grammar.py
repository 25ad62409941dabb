"""Grammars: compilation within limits, and the matchers' allowed tokens."""

import asyncio
import contextlib
import json
import random
import threading
import time

import numpy as np
import pytest

from forge_jax.engine.fake import fake_tokenizer
from forge_jax.errors import GrammarError, GrammarLimitError, RequestError
from forge_jax.grammar import GrammarCompiler, GrammarSpec, Matcher
from forge_jax.grammar import matcher as matchers
from forge_jax.grammar.build import build
from forge_jax.grammar.masks import mask_width
from forge_jax.grammar.matcher import MaskPool
from forge_jax.grammar.probe import ProbeLimits
from forge_jax.grammar.trial import try_out
from forge_jax.grammar.vocabulary import Vocabulary, canonical_tokenizer
from forge_jax.text import Tokenizer

TINY = "forge_jax/checkpoint/bundled/forge-tiny"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Texts that are valid outputs, and texts that are not.
EXAMPLES = {
    "object": (GrammarSpec.json_object(), ["{}", '{"a": [1, 2.5e3, null]}'], ["[]", "{", "1"]),
    "schema": (
        GrammarSpec.json_schema(PERSON),
        ['{"name": "Zoë", "age": 3}', '{"name":"","age":0}'],
        ['{"age": 3, "name": "x"}', '{"name": "x", "age": -1}', '{"name": "x"}', "{}"],
    ),
    "compact": (GrammarSpec.json_schema(PERSON, whitespace=""), ['{"name":"a","age":1}'], []),
    "spacious": (
        GrammarSpec.json_schema(PERSON, whitespace=r"[ \n]+"),
        ['{\n  "name": "a",\n  "age": 1\n}'],
        ['{\t"name": "a", "age": 1}'],
    ),
    "closed": (
        GrammarSpec.json_schema(
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            additional_properties=False,
        ),
        ["{}", '{"a":1}'],
        ['{"b":1}', '{"a":1,"b":1}'],
    ),
    "anything": (GrammarSpec.json_schema("true"), ["1", '"x"', "[{}]"], ["x", ""]),
    "regex": (GrammarSpec.regex(r"^\d{3}-[a-c]+$"), ["123-abc"], ["12-a", "123-d", "123-"]),
    "choice": (
        GrammarSpec.choice(["yes", "no", 'a "quote"\n\\', "naïve 🙂"]),
        ["yes", 'a "quote"\n\\', "naïve 🙂"],
        ["y", "yesno", "maybe"],
    ),
    "lark": (
        GrammarSpec.grammar('start: NAME ("," NAME)*\nNAME: /[a-z]+/'),
        ["a", "ab,c"],
        ["", "a,", "A"],
    ),
    "gbnf": (
        GrammarSpec.grammar('root ::= "x" digit+\ndigit ::= [0-9]'),
        ["x1", "x12"],
        ["x", "y1"],
    ),
    "tag": (
        GrammarSpec.structural_tag(
            {
                "type": "structural_tag",
                "structures": [{"begin": "<f=a>", "schema": PERSON, "end": "</f>"}],
                "triggers": ["<f="],
            }
        ),
        ["Just text.", 'So: <f=a>{"name":"b","age":2}</f> and text'],
        ['<f=a>{"name":"b"}</f>', "<f=b>{}</f>"],
    ),
    "new tag": (
        GrammarSpec.structural_tag(
            {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<f="],
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<f=a>",
                            "content": {"type": "json_schema", "json_schema": PERSON},
                            "end": "</f>",
                        }
                    ],
                },
            }
        ),
        ['<f=a>{"name":"b","age":2}</f>'],
        ["<f=a>{}</f>"],
    ),
}
REFUSED = {
    "not JSON": (lambda: GrammarSpec.json_schema("{"), "not valid JSON"),
    "a list": (lambda: GrammarSpec.json_schema("[]"), "must be an object"),
    "a wrong type": (lambda: GrammarSpec.json_schema({"type": "strng"}), "is not a JSON type"),
    "a keyword": (lambda: GrammarSpec.json_schema({"not": {}}), "not supported: not$"),
    "an overlap": (
        lambda: GrammarSpec.json_schema({"oneOf": [{"type": "string"}, {"minLength": 3}]}),
        "exclude each other",
    ),
    "x-guidance": (
        lambda: GrammarSpec.json_schema({"not": {}, "x-guidance": {"lenient": True}}),
        "not supported: not$",
    ),
    "a cycle with more beside it": (
        lambda: GrammarSpec.json_schema(
            {
                "$ref": "#/$defs/limit",
                "$defs": {"limit": {"properties": {"a": {"$ref": "#/$defs/limit", "minItems": 1}}}},
            }
        ),
        r"not supported: other keywords next to a \$ref that refers to itself$",
    ),
    "another document": (
        lambda: GrammarSpec.json_schema({"items": {"$ref": "https://a.example/nested.json#/max"}}),
        r"a \$ref \(or \$schema\) refers to another document, which is not fetched: put its target",
    ),
    "a place that is not there": (
        lambda: GrammarSpec.json_schema({"$ref": "#/$defs/limit"}),
        r"the target of a \$ref does not exist in the schema$",
    ),
    "nothing": (lambda: GrammarSpec.json_schema(False), "must be an object"),
    "no text": (
        lambda: GrammarSpec.json_schema({"type": "number", "minimum": 5, "maximum": 1}),
        "no text satisfies it",
    ),
    "look-ahead": (lambda: GrammarSpec.regex("(?=a)b"), "regular expression is invalid"),
    "no regex": (lambda: GrammarSpec.regex(""), "non-empty string"),
    "no choices": (lambda: GrammarSpec.choice([]), "non-empty strings"),
    "a number": (lambda: GrammarSpec.choice(5), "non-empty strings"),
    "one text": (lambda: GrammarSpec.choice("ab"), "non-empty strings"),
    "broken lark": (lambda: GrammarSpec.grammar("start: secret secret("), "line 1, column 22"),
    "broken gbnf": (lambda: GrammarSpec.grammar('root ::= "secret'), "GBNF grammar is invalid"),
    "a tag without a trigger": (
        lambda: GrammarSpec.structural_tag(
            {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}
        ),
        "must start with one of the triggers",
    ),
}
BOMBS = {
    "a chain of rules overflows the stack": GrammarSpec.grammar(
        "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000)), 'r3000: "a"'])
    ),
    "multiples take seconds": GrammarSpec.json_schema({"type": "integer", "multipleOf": 1000003}),
    "intersections": GrammarSpec.json_schema(
        {"allOf": [{"type": "string", "pattern": f"^.*{i}.{{10}}x.*$"} for i in range(60)]}
    ),
    "alternatives of alternatives": GrammarSpec.json_schema(
        {"allOf": [{"anyOf": [{"type": "string", "minLength": i} for i in range(20)]}] * 6}
    ),
    "nested groups": GrammarSpec.regex("(" * 900 + "a" + ")" * 900),
    "nested rules": GrammarSpec.grammar("start: " + "(" * 30000 + '"a"' + ")" * 30000),
    "a cycle": GrammarSpec.json_schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer.from_folder(TINY)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 5, [tokenizer.eos_token_id])
    yield compiler
    compiler.close()


def allowed(matcher: Matcher, vocab_size: int) -> set[int]:
    row = np.zeros(mask_width(vocab_size), np.int32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def takes(matcher: Matcher, ids: list[int]) -> bool:
    """Return True if the tokens are a complete output."""
    try:
        matcher.accept(ids)
    except GrammarError:
        return False
    return matcher.accepting


@pytest.mark.parametrize("name", EXAMPLES)
def test_grammar_accepts_only_its_texts(compiler, tokenizer, name):
    spec, texts, others = EXAMPLES[name]
    grammar = compiler.compile(spec)
    for text in texts:
        assert takes(grammar.matcher(), tokenizer.encode(text, False)), text
    for text in others:
        assert not takes(grammar.matcher(), tokenizer.encode(text, False)), text


@pytest.mark.parametrize("name", EXAMPLES)
def test_random_allowed_tokens_form_valid_text(compiler, tokenizer, name):
    spec = EXAMPLES[name][0]
    rng = random.Random(name)
    for _ in range(5):
        matcher, ids = compiler.compile(spec).matcher(), []
        end = tokenizer.eos_token_id
        while not matcher.stopped and len(ids) < 300:
            may = allowed(matcher, compiler.vocab_size)
            assert max(may) < tokenizer.vocab_size and not (may & tokenizer.special_ids) - {end}
            assert (end in may) == matcher.accepting
            ids.append(end if end in may and len(ids) > 20 else rng.choice(sorted(may)))
            matcher.accept(ids[-1:])
        text = tokenizer.decode([i for i in ids if i != end])
        if matcher.accepting and spec.kind == "json_schema":
            json.loads(text)
        if matcher.accepting and spec.kind == "choice":
            assert text in json.loads(spec.text)


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_grammar_is_rejected_without_being_quoted(compiler, name):
    make, why = REFUSED[name]
    with pytest.raises(RequestError, match=why) as caught:
        compiler.compile(make())
    assert caught.value.param == "structured_outputs"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", BOMBS)
def test_costly_grammar_is_rejected_and_the_next_one_compiles(compiler, name):
    with pytest.raises(RequestError, match=r"too|memory|no text|is invalid"):
        compiler.check(BOMBS[name])
    with pytest.raises(RequestError):  # and is not tried again
        compiler.check(BOMBS[name])
    compiler.check(GrammarSpec.regex(f"after {name}"))


def test_event_loop_runs_while_a_grammar_compiles(compiler):
    slow = GrammarSpec.json_schema({"type": "integer", "multipleOf": 1000007})

    async def longest_pause() -> float:
        task = asyncio.ensure_future(compiler.compile_soon(slow))
        longest, before = 0.0, time.monotonic()
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.monotonic()
            longest, before = max(longest, now - before), now
        with pytest.raises(RequestError, match=r"too long|memory"):
            await task
        return longest

    assert asyncio.run(longest_pause()) < 0.4


def test_lenient_schema_ignores_unenforceable_keywords(compiler, tokenizer):
    spec = GrammarSpec.json_schema({"type": "integer", "not": {"const": 3}}, lenient=True)
    assert takes(compiler.compile(spec).matcher(), tokenizer.encode("3", False))


def test_eos_is_allowed_only_where_the_grammar_is_complete(compiler, tokenizer):
    end = tokenizer.eos_token_id
    matcher = compiler.compile(GrammarSpec.regex("ab+")).matcher()
    [a], [b] = tokenizer.encode("a", False), tokenizer.encode("b", False)
    assert end not in allowed(matcher, compiler.vocab_size) and not matcher.accepting
    matcher.accept([a, b])
    assert end in allowed(matcher, compiler.vocab_size)
    assert matcher.accepting and not matcher.stopped
    matcher.accept([end])
    assert matcher.stopped


def test_drafts_are_truncated_before_an_error_and_before_the_end(compiler, tokenizer):
    grammar = compiler.compile(GrammarSpec.json_schema(PERSON))
    ids = tokenizer.encode('{"name": "b", "age": 12}', False)
    matcher = grammar.matcher()
    assert matcher.valid_drafts(ids) == len(ids) - 1
    assert matcher.valid_drafts([*ids, tokenizer.eos_token_id]) == len(ids) - 1
    assert matcher.valid_drafts([*ids[:3], tokenizer.eos_token_id]) == 3
    wrong = [*ids[:4], ids[0], *ids[4:]]
    assert 4 <= matcher.valid_drafts(wrong) <= len(wrong)
    matcher.accept(ids)  # the failed attempt left no trace
    assert matcher.stopped
    matcher.rollback(2)
    assert not matcher.accepting
    matcher.accept(ids[-2:])
    assert matcher.stopped


@pytest.mark.parametrize("timed", [False, True])
def test_batched_masks_equal_single_ones(compiler, tokenizer, timed):
    specs = [EXAMPLES[name][0] for name in ("schema", "lark", "choice", "object")]
    matchers = [compiler.compile(spec).matcher() for spec in specs]
    ids = tokenizer.encode('{"name": "b", "age": 12}', False)
    work = [(matchers[0], 0, ids[:4]), (matchers[1], 5, ()), (matchers[2], 6, ())]
    work += [(matchers[3], 7, ids[:2])]
    masks = np.full((10, mask_width(compiler.vocab_size)), -1, np.int32)
    pool = MaskPool(2)
    pool._slow = timed
    assert pool.fill(work, masks) == []
    one = np.zeros_like(masks[0])
    for matcher, first, drafts in work:
        for row, token in enumerate([*drafts, None], first):
            matcher.fill(one)
            assert (masks[row] == one).all(), (first, row)
            if token is not None:
                matcher.accept([token])


def test_failing_matcher_raises(compiler, tokenizer):
    spec = GrammarSpec.regex("a?" * 1000 + "a{1000}")
    matcher = build(spec, compiler._llguidance_tokenizer, compiler.vocab_size).matcher()
    row = np.zeros((1, mask_width(compiler.vocab_size)), np.int32)
    with pytest.raises(GrammarLimitError, match="too complex"):
        matcher.accept(tokenizer.encode("a", False))
    with pytest.raises(GrammarError):
        matcher.fill(row[0])
    assert MaskPool(1).fill([(matcher, 0, ())], row) == [matcher]
    with pytest.raises(GrammarError):
        matcher.accept(tokenizer.encode("b", False))


def properties(number):
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(number)}}


TOO_COSTLY = {
    "enum": (GrammarSpec.json_schema({"enum": ["x" * 60_000]}), "forces 600.. bytes .* 8192"),
    "repetition": (GrammarSpec.regex("a{60000}"), "forces 59... bytes .* 8192"),
    "product": (GrammarSpec.regex("(a{120}){100}"), "forces 119.. bytes .* 8192"),
    "literals": (
        GrammarSpec.grammar("start: " + " ".join(['"' + "x" * 1000 + '"'] * 60)),
        "forces 59... bytes .* 8192",
    ),
    "properties": (GrammarSpec.json_schema(properties(600)), "at most 2000.*optional properties"),
    "lexer": (GrammarSpec.regex("(a?){1000}a{1000}"), "more than 500000 steps of the lexer"),
}


@pytest.mark.parametrize("name", TOO_COSTLY)
def test_costly_grammar_is_rejected_with_the_limit_before_it_runs(tokenizer, name):
    spec, why = TOO_COSTLY[name]
    limits = ProbeLimits(cpu_s=10.0)  # on slow CPUs, compiling some of these exceeds the default
    compiler = GrammarCompiler(
        tokenizer, tokenizer.vocab_size + 5, [tokenizer.eos_token_id], limits=limits
    )
    with contextlib.closing(compiler), pytest.raises(RequestError, match=why):
        compiler.check(spec)


def test_many_plain_choices_can_be_followed(compiler, tokenizer):
    choices = [f"choice {i * 7919 % 100_003} (of many)" for i in range(2000)]
    grammar = compiler.compile(GrammarSpec.choice(choices))
    for text in choices[::400]:
        assert takes(grammar.matcher(), tokenizer.encode(text, False))
    assert not takes(grammar.matcher(), tokenizer.encode("choice x", False))


def test_choices_are_literal_in_any_characters(compiler, tokenizer):
    choices = [*(chr(i) for i in range(32, 127)), "a|b", "\\d", "[x]{2}", "(?i)y", "ß\t\r\n#"]
    grammar = compiler.compile(GrammarSpec.choice(choices))
    for text in choices:
        assert takes(grammar.matcher(), tokenizer.encode(text, False)), text
    for text in ("5d", "xx", "é", "ab"):
        assert not takes(grammar.matcher(), tokenizer.encode(text, False)), text


class Clock:
    """A CPU clock that advances by `tick_s` at each read."""

    def __init__(self, tick_s):
        self.tick_s, self.now_s = tick_s, 0.0

    def __call__(self):
        self.now_s += self.tick_s
        return self.now_s


def test_trial_rejects_masks_that_are_slow_on_average(compiler):
    grammar = compiler.compile(EXAMPLES["schema"][0])
    assert try_out(grammar, compiler.vocab_size, compiler.end_ids, clock=Clock(0.001)) is None
    why = try_out(grammar, compiler.vocab_size, compiler.end_ids, clock=Clock(0.1))
    assert why == "its masks take 100 ms of CPU time each; at most 25 are allowed"


def test_slow_masks_are_timed_individually_from_the_next_step(compiler, monkeypatch):
    monkeypatch.setattr(matchers, "SLOW_S", 0.0)  # so that every step counts as slow
    pool = MaskPool(2, clock=Clock(1.0))
    several = [compiler.compile(EXAMPLES["schema"][0]).matcher() for _ in range(3)]
    masks = np.zeros((3, mask_width(compiler.vocab_size)), np.int32)
    work = [(matcher, row, ()) for row, matcher in enumerate(several)]
    pool.fill(work, masks)
    assert [matcher.spent_s for matcher in several] == [0.0] * 3
    pool.fill(work, masks)
    assert all(matcher.spent_s >= 1.0 for matcher in several)


def test_cache_is_bounded_in_bytes_and_evicts_the_least_recently_used(tokenizer):
    compiler = GrammarCompiler(
        tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id], limits=None, cache_bytes=300_000
    )
    first = GrammarSpec.regex("first")
    compiler.compile(first)
    for i in range(50):
        compiler.compile(GrammarSpec.regex(f"x{i}"))
        assert compiler.kept(first) is not None
        assert compiler.num_bytes <= 300_000
    assert compiler.kept(GrammarSpec.regex("x0")) is None
    compiler.close()


def test_compiler_is_thread_safe(compiler):
    found, specs = [], [GrammarSpec.regex(f"[a-z]{{{i + 1}}}") for i in range(12)]

    def ask(spec):
        found.append(compiler.compile(spec))

    threads = [threading.Thread(target=ask, args=(specs[i % 12],)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24


def test_grammar_needs_a_tokenizer_and_an_eos_token(tokenizer):
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(None, 100, [1]).compile(GrammarSpec.json_object())
    with pytest.raises(RequestError, match="the model has no EOS token"):
        GrammarCompiler(tokenizer, 100, []).compile(GrammarSpec.json_object())


@pytest.mark.parametrize("folder", ["tests/fixtures/text/stories260k", None])
def test_other_vocabularies_write_valid_json(folder):
    other = Tokenizer.from_folder(folder) if folder else fake_tokenizer()
    assert other is not None and other.eos_token_id is not None
    compiler = GrammarCompiler(other, other.vocab_size, [other.eos_token_id], limits=None)
    grammar, rng = compiler.compile(GrammarSpec.json_schema(PERSON)), random.Random(0)
    for _ in range(5):
        matcher, ids = grammar.matcher(), []
        while not matcher.stopped and len(ids) < 200:
            ids.append(rng.choice(sorted(allowed(matcher, other.vocab_size))))
            matcher.accept(ids[-1:])
        if matcher.accepting:
            text = b"".join(map(other.token_bytes, ids)).decode()
            assert set(json.loads(text)) == {"name", "age"}
    compiler.close()


def test_eos_token_spelled_as_text_is_not_treated_as_text(tokenizer):
    [brace] = tokenizer.encode("}", False)  # EOS token of the model
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [brace], limits=None)
    matcher = compiler.compile(GrammarSpec.regex(".*x")).matcher()
    assert brace not in allowed(matcher, tokenizer.vocab_size)
    compiler.close()


def test_tokenizer_with_deviating_bytes_is_not_used_by_llguidance(tokenizer):
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    assert canonical_tokenizer(tokenizer, vocabulary) is not None
    vocabulary.tokens[500] += b"?"
    assert canonical_tokenizer(tokenizer, vocabulary) is None
