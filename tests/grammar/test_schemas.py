"""Three hundred JSON schemas, with `jsonschema` as the reference for llguidance."""

import copy
import json
import random
import re
import zlib

import jsonschema
import numpy as np
import pytest

from forge_jax.errors import GrammarError, RequestError
from forge_jax.grammar import GrammarCompiler, GrammarSpec
from forge_jax.grammar.masks import mask_width
from forge_jax.text import Tokenizer

COUNT = 300
WORDS = ("id", "name", "note é", "a b", "x-1", 'q"t', "type", "日本")
PATTERNS = ("^[a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(yes|no)$", "[A-Z]")
FORMATS = {"date": "2024-02-29", "uuid": "123e4567-e89b-12d3-a456-426614174000", "ipv4": "1.2.3.4"}


class Maker:
    """A generator of schemas and of values that they accept."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def schema(self, depth: int = 0) -> dict:
        rng = self.rng
        simple = ("string", "integer", "number", "boolean", "null", "enum", "const")
        nested = ("object", "object", "array", "tuple", "anyOf", "ref", "map")
        kind = rng.choice(nested if depth == 0 else simple + nested if depth < 3 else simple)
        return getattr(self, f"_{kind}")(depth)

    def _string(self, depth):
        match self.rng.randrange(4):
            case 0:
                low, more = self.rng.randint(0, 3), self.rng.randint(0, 9)
                return {"type": "string", "minLength": low, "maxLength": low + more}
            case 1:
                return {"type": "string", "pattern": self.rng.choice(PATTERNS)}
            case 2:
                return {"type": "string", "format": self.rng.choice(list(FORMATS))}
        return {"type": "string", "maxLength": 20}

    def _integer(self, depth):
        low = self.rng.randint(-50, 50)
        if self.rng.random() < 0.2:
            step = self.rng.choice((2, 5))
            return {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": step}
        return {"type": "integer", "minimum": low, "maximum": low + self.rng.randint(0, 200)}

    def _number(self, depth):
        low = self.rng.randint(-5, 5)
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + 2}

    def _boolean(self, depth):
        return {"type": "boolean"}

    def _null(self, depth):
        return {"type": ["null", "boolean"]}

    def _enum(self, depth):
        return {"enum": self.rng.sample(["a", 1, None, True, "z é", 2.5, [1], {"k": "v"}], 3)}

    def _const(self, depth):
        return {"const": self.rng.choice(["fixed", 7, {"a": [1, "b"]}])}

    def _object(self, depth):
        names = self.rng.sample(WORDS, self.rng.randint(1, 4))
        required = [name for name in names if self.rng.random() < 0.6]
        return {
            "type": "object",
            "properties": {name: self.schema(depth + 1) for name in names},
            "required": required,
            "additionalProperties": False,
        }

    def _map(self, depth):
        return {"type": "object", "additionalProperties": self.schema(depth + 1)}

    def _array(self, depth):
        low = self.rng.randint(0, 2)
        items = self.schema(depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}

    def _tuple(self, depth):
        items = [self.schema(depth + 1) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}

    def _anyOf(self, depth):
        return {"anyOf": [self.schema(depth + 1), self.schema(depth + 1)]}

    def _ref(self, depth):
        leaf = {"type": "object", "properties": {"v": self._integer(0)}, "required": ["v"]}
        leaf["additionalProperties"] = False
        name = f"leaf{self.rng.randrange(10**6)}"
        self.definitions[name] = leaf
        return {"$ref": f"#/$defs/{name}"}

    def whole(self) -> dict:
        self.definitions: dict = {}
        schema = self.schema()
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    # ---- values --------------------------------------------------------------------------------

    def value(self, schema: dict):
        rng = self.rng
        if "$ref" in schema:
            return self.value(self.definitions[schema["$ref"].rpartition("/")[2]])
        if "enum" in schema:
            return copy.deepcopy(rng.choice(schema["enum"]))
        if "const" in schema:
            return copy.deepcopy(schema["const"])
        if "anyOf" in schema:
            return self.value(rng.choice(schema["anyOf"]))
        match schema["type"]:
            case "string":
                return self._text(schema)
            case "integer":
                step = schema.get("multipleOf", 1)
                return rng.randrange(schema["minimum"], schema["maximum"] + 1, step)
            case "number":
                return round(schema["minimum"] + rng.random(), 2)
            case "object" if "properties" in schema:
                return {
                    name: self.value(each)
                    for name, each in schema["properties"].items()
                    if name in schema["required"] or rng.random() < 0.5
                }
            case "object":
                inner = schema["additionalProperties"]
                return {word: self.value(inner) for word in WORDS[: rng.randint(0, 2)]}
            case "array" if "prefixItems" in schema:
                return [self.value(each) for each in schema["prefixItems"]]
            case "array":
                count = rng.randint(schema["minItems"], schema["maxItems"])
                return [self.value(schema["items"]) for _ in range(count)]
            case "boolean":
                return rng.random() < 0.5
        return None

    def _text(self, schema):
        if "pattern" in schema:
            examples = ("abc", "123-4567", "yes", "xAy")
            return next(e for e in examples if re.search(schema["pattern"], e))
        if "format" in schema:
            return FORMATS[schema["format"]]
        low, high = schema.get("minLength", 0), schema["maxLength"]
        letters = 'ab é\n"\\/日\U0001f642'
        return "".join(self.rng.choice(letters) for _ in range(self.rng.randint(low, min(high, 9))))


def spoiled(value, rng: random.Random):
    """Return another value, which a schema for the first one probably rejects."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        match rng.randrange(3):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, "unknown": 1}
        return {**value, key: spoiled(value[key], rng)}
    if isinstance(value, list) and value:
        return [*value, *value, *value, "more"] if rng.random() < 0.5 else value[:-1]
    return rng.choice([10**6, -(10**6), "no such thing at all, and far too long", 1.5, [], {}])


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer.from_folder("forge_jax/checkpoint/bundled/forge-tiny")
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id], limits=None)
    yield made
    made.close()


def judge(schema, text: str) -> bool:
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return checker.is_valid(json.loads(text))


def takes(matcher, ids) -> bool:
    try:
        matcher.accept(ids)
    except GrammarError:
        return False
    return matcher.accepting


@pytest.mark.timeout(200)
def test_schemas_accept_and_write_only_valid_values(compiler, tokenizer):
    rng, vocab_size = random.Random(0), tokenizer.vocab_size
    refused = accepted = rejected = written = 0
    for seed in range(COUNT):
        maker = Maker(seed)
        schema = maker.whole()
        try:
            grammar = compiler.compile(GrammarSpec.json_schema(schema))
        except RequestError:
            refused += 1
            continue
        for _ in range(4):
            value = maker.value(schema)
            wrong = spoiled(value, rng)
            for given in (value, wrong):
                text = json.dumps(given, ensure_ascii=False)
                valid = judge(schema, text)
                took = takes(grammar.matcher(), tokenizer.encode(text, False))
                assert given is wrong or valid, (seed, schema, text)
                assert took == valid or (valid and given is wrong), (seed, schema, text)
                accepted += took
                rejected += not valid
        for _ in range(2):  # and a model that writes nonsense
            matcher, ids = grammar.matcher(), []
            row = np.zeros(mask_width(vocab_size), np.int32)
            while not matcher.stopped and len(ids) < 120:
                matcher.fill(row)
                may = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
                ids.append(int(may[zlib.crc32(bytes(str((seed, ids)), "ascii")) % len(may)]))
                matcher.accept(ids[-1:])
            if matcher.accepting:
                text = tokenizer.decode(ids)
                assert judge(schema, text), (seed, schema, text)
                written += 1
    assert refused < COUNT // 20, refused
    assert accepted > 3 * COUNT and rejected > 2 * COUNT and written > COUNT // 2


def test_validator_detects_a_grammar_without_bounds():
    schema = {"type": "integer", "minimum": 3, "maximum": 4}
    assert judge(schema, "3") and not judge(schema, "7")
    assert not judge({"type": "string", "format": "date"}, '"2024-02-30"')
    maker, rng = Maker(5), random.Random(1)
    whole = maker.whole()
    verdicts = {judge(whole, json.dumps(spoiled(maker.value(whole), rng))) for _ in range(20)}
    assert False in verdicts
