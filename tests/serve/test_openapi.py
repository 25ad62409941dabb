"""`/openapi.json`: it documents all routes, and all answers match it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest

from forge_jax.engine.thread import Engine
from forge_jax.text import ChatTemplate
from forge_serve.anthropic.response_types import CountAnswer
from forge_serve.config import ServerConfig
from forge_serve.http.auth import OPEN_PATHS
from forge_serve.limits import Limits
from forge_serve.openapi.document import routes
from forge_serve.openapi.operation import Operation
from forge_serve.openapi.payload import Payload
from forge_serve.server.app import make_app
from forge_serve.server.openapi import OPERATIONS
from forge_serve.server.service import Service
from forge_serve.server.weight_sync.endpoints import WeightSyncEndpoints
from tests.serve import families
from tests.serve.conftest import Server, scripted_engine

HANDLED = {
    (path, method): OPERATIONS[name]
    for path, method, name in routes(make_app(Service(ServerConfig())).router)
}
SYNC = {path for route in WeightSyncEndpoints.ROUTES for path in route.paths}
ROOT = Path(__file__).parent.parent.parent
USER = {"role": "user", "content": "the dog"}
TAKES_TOOLS = "{{ messages[0].content }}{% if tools %}<tool_call>{% endif %}"
ANY = {"type": "any"}
TOOL = {"type": "function", "function": {"name": "bark", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", **TOOL["function"]}


async def served(server) -> dict[str, Any]:
    status, document = await server.get("/openapi.json")
    assert status == 200
    return document


def refs(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        own = {schema["$ref"]} if isinstance(schema.get("$ref"), str) else set()
        return own.union(*map(refs, schema.values()))
    return set().union(*map(refs, schema)) if isinstance(schema, list) else set()


def inlined(schema: Any, components: dict[str, Any]) -> Any:
    """Inline the references of a schema, so that a validator does not resolve them again."""
    if isinstance(schema, list):
        return [inlined(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inlined(components[schema["$ref"].rpartition("/")[2]], components)
    return {key: inlined(value, components) for key, value in schema.items()}


def judge(document: dict[str, Any]) -> Callable[[dict[str, Any]], jsonschema.protocols.Validator]:
    components = document["components"]["schemas"]
    return lambda schema: jsonschema.Draft202012Validator(inlined(schema, components))


def test_every_route_has_an_operation_and_every_operation_a_route():
    router = make_app(Service(ServerConfig())).router
    assert {name for _, _, name in routes(router)} == set(OPERATIONS)


async def test_openapi_document_lists_exactly_the_routes(server):
    document = await served(server)
    router = make_app(Service(ServerConfig())).router
    named = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    assert named == {(path, method) for path, method, _ in routes(router)}
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)


async def test_every_schema_is_valid_and_every_reference_resolves(server):
    document = await served(server)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    used = refs(document)
    assert used <= {f"#/components/schemas/{name}" for name in schemas}


async def test_bodies_have_the_fields_of_their_structs(server):
    document = await served(server)
    for operation in OPERATIONS.values():
        if operation.request is None:
            continue
        schema = document["components"]["schemas"][operation.request.__name__]
        fields = {field.encode_name for field in msgspec.structs.fields(operation.request)}
        assert schema["properties"].keys() == fields
        for name, of in schema["properties"].items():
            assert of, f"nothing is said of {name}"


async def test_openapi_document_has_this_servers_limits(start):
    limits = Limits(n=5, prompts=7, messages=9, tools=3)
    config = ServerConfig(served_model_name="org/m", limits=limits)
    document = await served(await start(Engine.fake(max_model_len=640), config))
    schemas = document["components"]["schemas"]
    completion = schemas["CompletionRequest"]["properties"]
    chat = schemas["ChatRequest"]["properties"]
    assert completion["n"]["maximum"] == 5
    assert completion["prompt"]["anyOf"][1]["maxItems"] == 7
    assert chat["messages"]["maxItems"] == 9
    assert chat["tools"]["anyOf"][0]["maxItems"] == 3
    assert completion["max_tokens"]["maximum"] == 640
    assert chat["model"]["enum"] == ["org/m", None]
    assert document["info"]["x-model"] == {"id": "org/m", "max_model_len": 640}
    assert document["info"]["x-limits"]["n"]["at_most"] == 5


async def test_openapi_document_states_who_may_use_the_server(start, server):
    open_to_all = await served(server)
    assert "security" not in open_to_all and "securitySchemes" not in open_to_all["components"]
    closed = await start(Engine.fake(), ServerConfig(api_key=("k",)))
    status, _ = await closed.get("/openapi.json")
    assert status == 401
    headers = {"Authorization": "Bearer k"}
    async with closed.http.get(closed.url + "/openapi.json", headers=headers) as response:
        document = await response.json()
    assert document["security"] == [{"bearer": []}, {"key": []}]
    assert set(document["components"]["securitySchemes"]) == {"bearer", "key"}
    for path, item in document["paths"].items():
        for operation in item.values():
            assert ("401" in operation["responses"]) == (path not in OPEN_PATHS)
            assert (operation.get("security") == []) == (path in OPEN_PATHS)


async def test_openapi_document_needs_a_loaded_model(listening):
    async with (
        listening(Service(ServerConfig())) as url,
        aiohttp.ClientSession() as http,
        http.get(url + "/openapi.json") as response,
    ):
        assert response.status == 503


ANSWERED = [  # requests, and the kind of all their answers
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", [1, 2]][:1], "n": 2, "stop": "e", "max_tokens": 40}),
    ("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 2, "return_token_ids": True}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "prompt_logprobs": 1}),
    ("/v1/chat/completions", {"messages": [USER]}),
    ("/v1/chat/completions", {"messages": [USER], "prompt_logprobs": 0}),
    ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", {"messages": [USER], "return_token_ids": True, "max_tokens": 5}),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}),
    ("/generate", {"prompt": "a"}),
    ("/v1/generate", {"prompt": [1, 2], "return_token_ids": True, "max_new_tokens": 3}),
    ("/v1/messages", {"messages": [USER]}),
    ("/v1/messages", {"messages": [USER], "stop_sequences": ["e"], "max_tokens": 90}),
    ("/v1/messages", {"messages": [USER], "tools": [{"name": "f"}], "tool_choice": ANY}),
    ("/v1/messages/count_tokens", {"messages": [USER]}),
    ("/v1/responses", {"input": "the dog", "metadata": {"a": "b"}}),
    ("/v1/responses", {"input": [USER], "top_logprobs": 2, "max_output_tokens": 5}),
    ("/v1/responses", {"input": [USER], "tools": [FLAT_TOOL], "tool_choice": "required"}),
    ("/v1/responses/input_tokens", {"input": [USER], "instructions": "bark"}),
    ("/v1/embeddings", {"input": ["the dog", "a"]}),
    ("/v1/embeddings", {"input": [1, 2], "encoding_format": "base64", "pooling": "mean"}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/v1/score", {"queries": "a", "documents": "b"}),
    ("/rerank", {"query": "a", "documents": ["b", "a"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "a"], "return_documents": False}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/v1/tokenize", {"prompt": ["a", "the dog"], "return_token_strs": True}),
    ("/tokenize", {"messages": [USER]}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/detokenize", {"tokens": [[1, 2], []]}),
]  # fmt: skip


def check_bytes(kind: Any, data: str) -> None:
    """Fail unless `data` is msgspec's encoding of the struct behind the schema."""
    decoded = msgspec.json.decode(data, type=kind)
    assert msgspec.json.encode(decoded).decode() == data


def test_byte_check_detects_another_order_or_field():
    for wrong in ('{"num": 1}', '{"input_tokens":1,"a":2}', '{"input_tokens": 1}'):
        with pytest.raises((AssertionError, msgspec.ValidationError)):
            check_bytes(CountAnswer, wrong)
    check_bytes(CountAnswer, '{"input_tokens":1}')


async def test_answers_and_events_match_the_openapi_document(start):
    engine = Engine.fake(max_model_len=128)
    engine.chat_template = ChatTemplate(TAKES_TOOLS)
    server = await start(engine)
    document = await served(server)
    validator = judge(document)
    for path, body in ANSWERED:
        post, operation = document["paths"][path]["post"], HANDLED[path, "POST"]
        content = post["responses"]["200"]["content"]
        validator(post["requestBody"]["content"]["application/json"]["schema"]).validate(body)
        async with server.http.post(server.url + path, json=body) as response:
            text = await response.text()
        assert response.status == 200, text
        validator(content["application/json"]["schema"]).validate(json.loads(text))
        check_bytes(operation.answer, text)
        if "text/event-stream" not in content or "prompt_logprobs" in body:
            continue
        options = {"include_usage": True, "continuous_usage_stats": True}
        streamed = {**body, "stream": True, "stream_options": options}
        async with server.http.post(server.url + path, json=streamed) as response:
            events = data_of(await response.text())
        if not path.startswith(("/v1/messages", "/v1/responses")):
            assert events.pop() == "[DONE]"
        check_events(validator, content, events, operation)


async def test_documented_examples_are_served(server):
    document = await served(server)
    validator, tried = judge(document), 0
    for path, item in document["paths"].items():
        if "requestBody" not in item.get("post", {}) or "lora" in path or path in SYNC:
            continue  # test_http_lora.py and test_weight_sync.py cover them, with files
        body = item["post"]["requestBody"]["content"]["application/json"]
        events = "text/event-stream" in item["post"]["responses"]["200"]["content"]
        assert list(body["examples"]) == ["whole", "streamed"][: 1 + events]
        for example in body["examples"].values():
            validator(body["schema"]).validate(example["value"])
            async with server.http.post(server.url + path, json=example["value"]) as response:
                assert response.status == 200, await response.text()
                streamed = response.content_type == "text/event-stream"
                assert streamed == example["value"].get("stream", False)
            tried += 1
    assert tried > 20


def data_of(text: str) -> list[str]:
    lines = text.splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def check_events(
    validator: Any, content: dict[str, Any], events: list[str], operation: Operation
) -> None:
    of = validator(content["text/event-stream"]["x-event-schema"])
    assert events
    for event in events:
        of.validate(json.loads(event))
        check_bytes(operation.events, event)


class Documented:
    """Requests of one path, whose answers are checked against the document."""

    def __init__(self, server: Server, document: dict[str, Any]):
        self._server, self._document, self._judge = server, document, judge(document)

    async def ask(self, method: str, path: str, query: str = "", **names: str) -> Any:
        """Return the JSON answer, or the data of each event."""
        operation = self._document["paths"][path][method.lower()]
        for parameter in operation["parameters"]:
            given = names.get(parameter["name"])
            if given is not None:
                self._judge(parameter["schema"]).validate(given)
        url = self._server.url + path.format(**names) + query
        async with self._server.http.request(method, url) as response:
            content = operation["responses"][str(response.status)]["content"]
            if response.content_type == "text/event-stream":
                events = data_of(await response.text())
                check_events(self._judge, content, events, HANDLED[path, method])
                return [json.loads(event) for event in events]
            answer = await response.json()
            self._judge(content["application/json"]["schema"]).validate(answer)
            return answer


async def test_stored_responses_match_the_openapi_document(start):
    call = '<tool_call>\n{"name": "bark", "arguments": {}}\n</tool_call>'
    answer = f"<think>\nHm.\n</think>\n\nSo:{call}"
    special = ["<think>", "</think>"]
    server = await start(scripted_engine(answer, template=families.QWEN, special_tokens=special))
    documented = Documented(server, await served(server))
    body = {"input": [USER], "tools": [FLAT_TOOL], "top_logprobs": 1}
    background = {**body, "background": True, "stream": True}
    async with server.http.post(server.url + "/v1/responses", json=background) as response:
        first = json.loads(data_of(await response.text())[-1])["response"]
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    result = {
        "type": "function_call_output",
        "call_id": first["output"][2]["call_id"],
        "output": "woof",
    }
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}
    status, second = await server.post(
        "/v1/responses",
        {"input": [result, thought, said, USER], "previous_response_id": first["id"]},
    )
    assert status == 200, second

    path = "/v1/responses/{id}"
    assert await documented.ask("GET", path, id=first["id"]) == first
    events = await documented.ask("GET", path, "?stream=true&starting_after=1", id=first["id"])
    assert events[0]["sequence_number"] == 2 and events[-1]["response"] == first
    page = await documented.ask("GET", f"{path}/input_items", id=second["id"])
    assert len(page["data"]) == 8
    for query in ("?limit=0", "?order=up", "?after=a"):
        page = await documented.ask("GET", f"{path}/input_items", query, id=second["id"])
        assert page["error"]["param"] in query
    assert await documented.ask("POST", f"{path}/cancel", id=first["id"]) == first
    refused = await documented.ask("POST", f"{path}/cancel", id=second["id"])
    assert "error" in refused
    assert (await documented.ask("DELETE", path, id=first["id"]))["deleted"]
    for method in ("GET", "DELETE"):
        gone = await documented.ask(method, path, id=first["id"])
        assert gone["error"]["code"] == "response_not_found"


async def test_read_endpoints_match_the_openapi_document(start, tmp_path):
    server = await start(Engine.fake(), ServerConfig(weight_sync_dir=str(tmp_path)))
    document = await served(server)
    validator = judge(document)
    for path, item in document["paths"].items():
        if "get" not in item or "{id}" in path:
            continue
        named, path = path, path.replace("{name}", server.model)
        async with server.http.get(server.url + path) as response:
            content = item["get"]["responses"][str(response.status)].get("content")
            if content is None:
                assert path == "/ping" and not await response.read()
                continue
            assert list(content) == [response.content_type]
            if response.content_type == "application/json":
                schema, text = content[response.content_type]["schema"], await response.text()
                validator(schema).validate(json.loads(text))
                kind = HANDLED[named, "GET"].answer
                if isinstance(kind, type) and issubclass(kind, Payload):
                    check_bytes(kind, text)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_errors_match_the_openapi_document(server, path):
    document = await served(server)
    responses = document["paths"][path]["post"]["responses"]
    validator = judge(document)
    for body in ({"messages": []}, {"messages": [USER], "model": "another"}, b"{"):
        status, answer = await server.post(path, body)
        assert status in (400, 404)
        schema = responses[str(status)]["content"]["application/json"]["schema"]
        validator(schema).validate(answer)


def documented_requests() -> list[tuple[str, Any]]:
    """Return the path and the body of every curl in the documents."""
    curl = re.compile(r"curl (?:-N )?http://127\.0\.0\.1:8000(/\S+)[^']*'[^']*'[\s\\]*-d '([^']*)'")
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    found = [match for page in pages for match in curl.findall(page.read_text())]
    return [(path, json.loads(body)) for path, body in found]


async def test_documented_requests_match_the_openapi_document(start):
    config = ServerConfig(served_model_name="forge-tiny")
    document = await served(await start(Engine.fake(), config))
    requests, validator = documented_requests(), judge(document)
    assert {path for path, _ in requests} >= {"/v1/chat/completions"} and len(requests) >= 3
    for path, body in requests:
        if body.get("model") == "sql":
            body["model"] = "forge-tiny"  # the server of docs/lora.md has an adapter of this name
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        validator(schema["schema"]).validate(body)
