"""Thousands of odd structured-output requests: each is served or refused with a 400."""

import json
import random
from typing import Any

from forge_jax.engine.fake import fake_tokenizer
from forge_jax.errors import RequestError
from forge_jax.grammar import GrammarCompiler
from forge_serve.limits import Limits
from forge_serve.openai.requests import CompletionRequest
from forge_serve.openai.validation import decode

COUNT = 3000
FIELDS = (
    "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar "
    "json_schema regex ebnf grammar"
).split()
KEYS = (
    "type json_schema schema strict structures triggers begin end format tags content json regex "
    "choice grammar json_object structural_tag disable_any_whitespace whitespace_pattern "
    "disable_additional_properties properties required items enum const anyOf oneOf allOf $ref "
    "$defs pattern minLength maxLength minimum multipleOf additionalProperties prefixItems "
    "patternProperties x-guidance name"
).split()
ATOMS: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**18, "", "a", [], {}, ["a"], ["a", 1]),
    *("json_schema", "json_object", "structural_tag", "triggered_tags", "text"),
    *("object", "array", "string", "integer", "#/a", "#", "(?=a)", "[", "\\", "\ufffd", "<f"),
    *('start: "a"', 'root ::= "a"'),
]


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 4 or kind < 0.35:
        return rng.choice(ATOMS)
    if kind < 0.45:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randint(1, 4))}


def test_odd_structured_outputs_are_served_or_rejected():
    tokenizer, rng = fake_tokenizer(), random.Random(1)
    assert tokenizer.eos_token_id is not None
    ends = [tokenizer.eos_token_id]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, ends, limits=None)
    served, refused = 0, []
    for _ in range(COUNT):
        field, demanded = rng.choice(FIELDS), value(rng)
        if field == "response_format" and isinstance(demanded, dict):
            demanded["type"] = rng.choice(("json_schema", "json_object", "structural_tag"))
        body = json.dumps({"prompt": "a", field: demanded}).encode()
        try:
            params = decode(body, CompletionRequest, Limits()).sampling_params()
            if params.structured_outputs is not None:
                compiler.compile(params.structured_outputs)
                served += 1
        except RequestError as error:
            refused.append(error.param)
    compiler.close()
    assert served > COUNT // 20 and len(refused) > COUNT // 2
    assert None not in refused
