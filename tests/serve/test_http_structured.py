"""Structured output over HTTP: every spelling of the request, and the results."""

import asyncio
import json
import re
from collections import Counter

import pytest
from conftest import running

from forge_jax.config import EngineConfig
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.thread import Engine

USER = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 1}
PROMPT = {"prompt": "hi", "max_tokens": 200, "seed": 1}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


def is_sized(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "size"} and 0 <= value["size"] <= 99


def is_yes_or_no(text: str) -> bool:
    return text in ("yes", "no")


def is_code(text: str) -> bool:
    return re.fullmatch(r"[a-f]{3}-\d{2}", text) is not None


CODE = r"[a-f]{3}-\d{2}"
LARK = 'start: LETTERS "-" DIGITS\nLETTERS: /[a-f]{3}/\nDIGITS: /[0-9]{2}/'
GBNF = 'root ::= hex hex hex "-" [0-9] [0-9]\nhex ::= [a-f]'
FORMS = {
    "openai": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        is_sized,
    ),
    "short": ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, is_sized),
    "top level": ({"json_schema": SCHEMA}, is_sized),
    "as text": ({"json_schema": json.dumps(SCHEMA)}, is_sized),
    "vllm json": ({"structured_outputs": {"json": SCHEMA}}, is_sized),
    "vllm json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_sized),
    "vllm compact": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        lambda text: is_sized(text) and '":"' in text,
    ),
    "vllm closed": (
        {
            "structured_outputs": {
                "json": {k: v for k, v in SCHEMA.items() if k != "additionalProperties"},
                "disable_additional_properties": True,
            }
        },
        is_sized,
    ),
    "vllm regex": ({"structured_outputs": {"regex": CODE}}, is_code),
    "vllm choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, is_yes_or_no),
    "vllm grammar": ({"structured_outputs": {"grammar": LARK}}, is_code),
    "guided_json": ({"guided_json": SCHEMA}, is_sized),
    "guided_regex": ({"guided_regex": CODE}, is_code),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, is_yes_or_no),
    "guided_grammar": ({"guided_grammar": GBNF}, is_code),
    "regex": ({"regex": CODE}, is_code),
    "ebnf": ({"ebnf": GBNF}, is_code),
    "grammar": ({"grammar": LARK}, is_code),
    "text": ({"response_format": {"type": "text"}, "max_tokens": 5}, lambda text: True),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.quick_cases(12)
async def test_every_spelling_of_structured_output_is_accepted(server, name, path):
    asked, valid = FORMS[name]
    body = {**(USER if "chat" in path else PROMPT), **asked}
    status, answer = await server.post(path, body)
    assert status == 200, answer
    [choice] = answer["choices"]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert valid(text), text
    assert choice["finish_reason"] == ("stop" if name != "text" else "length")


async def test_json_object_mode_returns_any_object(server):
    asked = {"response_format": {"type": "json_object"}, "max_tokens": 30}
    for seed in range(8):
        _, answer = await server.post("/v1/chat/completions", {**USER, **asked, "seed": seed})
        [choice] = answer["choices"]
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


async def test_generate_accepts_a_structural_tag(server):
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}],
        "triggers": ["<call"],
    }
    for asked in ({"response_format": tag}, {"structured_outputs": {"structural_tag": tag}}):
        body = {"prompt": "hi", "max_new_tokens": 20, **asked}
        assert (await server.post("/generate", body))[0] == 200


async def test_structured_streams_samples_and_logprobs_work(server):
    body = {**USER, "response_format": FORMS["openai"][0]["response_format"], "n": 4}
    _, whole = await server.post(
        "/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2}
    )
    texts = {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert all(map(is_sized, texts.values())) and len(set(texts.values())) > 1
    for choice in whole["choices"]:
        tokens = choice["logprobs"]["content"]
        text = b"".join(bytes(token["bytes"]) for token in tokens).decode()
        assert text == choice["message"]["content"]
    streamed: Counter = Counter()
    ends = {}
    *events, done = await server.events("/v1/chat/completions", {**body, "stream": True})
    assert done == "[DONE]"
    for event in map(json.loads, events):
        for choice in event["choices"]:
            streamed[choice["index"]] = streamed.get(choice["index"], "") + (
                choice["delta"].get("content") or ""
            )
            ends[choice["index"]] = choice["finish_reason"] or ends.get(choice["index"])
    assert dict(streamed) == texts and set(ends.values()) == {"stop"}


async def test_only_length_truncates_structured_output(server):
    for stop in ([], ['"', "}", "a"]):
        for max_tokens in (3, 200):
            body = {**USER, "json_schema": SCHEMA, "max_tokens": max_tokens, "stop": stop}
            _, answer = await server.post("/v1/chat/completions", body)
            [choice] = answer["choices"]
            assert (choice["finish_reason"] == "stop") == (max_tokens == 200)
            assert max_tokens == 3 or is_sized(choice["message"]["content"])


WRONG = {
    "two forms": ({"regex": "a", "guided_choice": ["a"]}, "guided_choice", "cannot be combined"),
    "no schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "requires a schema",
    ),
    "no object": ({"response_format": "json"}, "response_format", "type must be"),
    "two kinds": (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
        "exactly one of",
    ),
    "a keyword": (
        {"response_format": {"type": "json_schema", "schema": {"uniqueItems": True}}},
        "response_format",
        "not supported: uniqueItems",
    ),
    "a regex": ({"regex": "(secret"}, "regex", "regular expression"),
    "a bomb": ({"json_schema": {"multipleOf": 1000003, "type": "integer"}}, "json_schema", "too"),
    "spaces": (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "(?=a)"}},
        "structured_outputs",
        "cannot be used",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_impossible_structured_output_is_a_400_that_names_the_field(server, name):
    asked, param, why = WRONG[name]
    for more in ({}, {"stream": True}):
        status, answer = await server.post("/v1/chat/completions", {**USER, **asked, **more})
        error = answer["error"]
        assert (status, error["param"]) == (400, param), error
        assert why in error["message"] and "secret" not in error["message"]
        assert error["message"].startswith(param) or "cannot be combined" in error["message"]
    await server.idle()


async def test_unenforceable_keywords_are_ignored_only_if_not_strict(server):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "uniqueItems": True}
    for strict, status in ((None, 400), (True, 400), (False, 200)):
        asked = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
        got, answer = await server.post("/v1/completions", {**PROMPT, "response_format": asked})
        assert got == status
        if status == 200:
            assert len(json.loads(answer["choices"][0]["text"])) <= 3


async def test_other_requests_are_answered_while_costly_grammars_are_tried(server):
    bombs = [{"type": "integer", "multipleOf": 1000003 + 10 * i} for i in range(2)]
    tasks = [
        asyncio.create_task(server.post("/v1/completions", {**PROMPT, "json_schema": bomb}))
        for bomb in bombs
    ]
    answered = 0
    while not all(task.done() for task in tasks):
        status, _ = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 4})
        answered += status == 200
    assert [task.result()[0] for task in tasks] == [400] * 2 and answered > 20


async def test_structured_output_works_in_an_engine_process():
    engine = await asyncio.to_thread(EngineProcess.fake)
    async with running(engine) as server:  # type: ignore[arg-type]
        for name in ("openai", "vllm regex"):
            asked, valid = FORMS[name]
            status, answer = await server.post("/v1/completions", {**PROMPT, **asked})
            assert status == 200 and valid(answer["choices"][0]["text"])
        status, answer = await server.post("/v1/completions", {**PROMPT, **WRONG["a bomb"][0]})
        assert (status, answer["error"]["param"]) == (400, "json_schema")


async def test_bundled_model_works_with_the_openai_client():
    config = EngineConfig.from_options(max_num_seqs=4, max_num_batched_tokens=64)
    async with running(await asyncio.to_thread(Engine.load, config)) as server:
        form = FORMS["openai"][0]["response_format"]
        create = server.openai.chat.completions.create
        ask = [{"role": "user", "content": "Extract the name and age: John is 30 years old."}]
        extracted = {
            "type": "json_schema",
            "json_schema": {
                "name": "person",
                "strict": True,
                "schema": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                    "required": ["name", "age"],
                    "additionalProperties": False,
                },
            },
        }
        answer = await create(
            model="forge-tiny", messages=ask, temperature=0, response_format=extracted
        )
        assert json.loads(answer.choices[0].message.content) == {"name": "John", "age": 30}
        answers = await asyncio.gather(
            *[
                create(
                    model="forge-tiny",
                    messages=ask,
                    temperature=1.5,
                    seed=seed,
                    n=2,
                    response_format=form if seed % 2 else {"type": "text"},
                    max_tokens=120,
                )
                for seed in range(8)
            ]
        )
        for seed, answer in enumerate(answers):
            for choice in answer.choices:
                if seed % 2:
                    assert choice.finish_reason == "stop" and is_sized(choice.message.content)
        assert server.engine.stats().compilations_after_ready == 0
