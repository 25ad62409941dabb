"""The table of routes: aliases, trailing slashes, and unknown paths."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forge_jax.config.suggest import MAX_CHARS, nearest
from forge_jax.engine.thread import Engine
from forge_serve.anthropic.endpoints import MessagesEndpoints
from forge_serve.config import ServerConfig
from forge_serve.http.auth import OPEN_PATHS
from forge_serve.limits import Limits
from forge_serve.openai.endpoints import OpenAIEndpoints
from forge_serve.openapi.document import routes
from forge_serve.responses_api.endpoints import ResponsesEndpoints
from forge_serve.server.app import make_app
from forge_serve.server.endpoints import ServerEndpoints
from forge_serve.server.openapi import OPERATIONS
from forge_serve.server.routes import ROUTES
from forge_serve.server.service import Service
from forge_serve.server.weight_sync.endpoints import WeightSyncEndpoints

DOCS = Path(__file__).parent.parent.parent / "docs"
KEY = "sk-alpha-0123456789"
USER = {"role": "user", "content": "the dog"}
# The endpoint of unsupported transports rejects every request: see test_weight_sync.py.
ALIASED = [r for r in ROUTES if r.aliases and r.handler != "init_weight_transfer_engine"]
BODIES = {
    "completions": {"prompt": "a", "max_tokens": 2},
    "chat_completions": {"messages": [USER], "max_tokens": 2},
    "embeddings": {"input": "a"},
    "generate": {"prompt": "a", "max_tokens": 2},
    "score": {"text_1": "a", "text_2": "b"},
    "rerank": {"query": "a", "documents": ["b"]},
    "tokenize": {"prompt": "a"},
    "detokenize": {"tokens": [1]},
}  # fmt: skip


async def metrics(server) -> dict[tuple[str, str], float]:
    async with server.http.get(server.url + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    counts: dict[tuple[str, str], float] = {}
    for family in families:
        for sample in family.samples:
            if sample.name == "http_requests_total":
                key = sample.labels["handler"], sample.labels["code"]
                counts[key] = counts.get(key, 0) + sample.value
    return counts


def test_every_path_has_one_route():
    declared = [(path, route.method) for route in ROUTES for path in route.paths]
    assert len(set(declared)) == len(declared)
    of_page = {"page", "page_style", "page_script", "page_icon", "page_font"}
    assert {route.handler for route in ROUTES} | of_page == OPERATIONS.keys()


def test_every_handler_exists_and_its_name_is_unique():
    classes = (
        OpenAIEndpoints,
        ResponsesEndpoints,
        MessagesEndpoints,
        WeightSyncEndpoints,
        ServerEndpoints,
    )
    names = [(each, name) for each in classes for name in {r.handler for r in each.ROUTES}]
    assert all(callable(getattr(each, name)) for each, name in names)
    assert len({name for _, name in names}) == len(names)


def test_unversioned_paths_of_openai_endpoints_exist():
    paths = {path: route.handler for route in ROUTES for path in route.paths}
    for path in ("/chat/completions", "/completions", "/embeddings", "/models"):
        assert paths[path] == paths[f"/v1{path}"]


@pytest.mark.parametrize("route", ALIASED, ids=lambda route: route.handler)
async def test_alias_is_the_same_endpoint(start, route):
    """Compares answers, limits, API keys and metrics, each path under its own name."""
    config = ServerConfig(api_key=(KEY,), limits=Limits(body_bytes=4096))
    server = await start(Engine.fake(max_model_len=256), config)
    headers, shapes = {"X-Api-Key": KEY}, set()
    for path in route.paths:
        url = server.url + path.replace("{name:.*[^/]}", server.model)
        label = path.replace(":.*[^/]", "")
        async with server.http.request(route.method, url) as response:
            assert response.status == (200 if path in OPEN_PATHS else 401)
        body = BODIES.get(route.handler)
        async with server.http.request(route.method, url, json=body, headers=headers) as response:
            assert response.status == 200
            shapes.add(tuple(sorted(await response.json())))
        if body is not None:
            large = io.BytesIO(json.dumps({**body, "user": "a" * 5000}).encode())
            async with server.http.post(url, data=large, headers=headers) as response:
                assert response.status == 413
        async with server.http.get(server.url + "/metrics", headers=headers) as response:
            text = await response.text()
        assert f'http_requests_total{{code="200",handler="{label}"' in text
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models/", None),
        ("GET", "/v1/models/forge-fake/", None),
        ("GET", "/health/", None),
        ("POST", "/v1/chat/completions/", BODIES["chat_completions"]),
        ("POST", "/tokenize/?a=b", BODIES["tokenize"]),
    ],
)
async def test_trailing_slash_is_ignored(server, method, path, body):
    async with server.http.request(method, server.url + path, json=body) as response:
        assert response.status == 200
    label = path.partition("?")[0].removesuffix("/").replace("/forge-fake", "/{name}")
    assert (await metrics(server))[label, "200"] == 1


async def test_trailing_slash_changes_neither_keys_nor_methods(start):
    server = await start(Engine.fake(), ServerConfig(api_key=(KEY,)))
    assert (await server.get("/v1/models/"))[0] == 401
    assert (await server.get("/health/"))[0] == 200
    headers = {"Authorization": f"Bearer {KEY}"}
    for path, status in (("/v1/completions/", 405), ("/v1/models//", 404), ("/nowhere/", 404)):
        async with server.http.get(server.url + path, headers=headers) as response:
            assert response.status == status
            assert response.headers.get("Allow") == ("POST" if status == 405 else None)


@pytest.mark.parametrize(
    ("path", "label", "hint"),
    [
        ("/v1/chat/completion", "/v1/chat/*", "did you mean /v1/chat/completions?"),
        ("/v1/v1/completions", "/v1/*", "did you mean /v1/completions?"),
        ("/v1/chat/completions/extra", "/v1/chat/completions/*", "/v1/chat/completions?"),
        ("/metric", "/*", "did you mean /metrics?"),
        ("/wp-login.php", "/*", "see /openapi.json"),
        ("/" + "x" * 3000, "/*", "see /openapi.json"),
    ],
)
async def test_unknown_path_has_a_bounded_label_and_a_hint(server, path, label, hint):
    status, answer = await server.post(path, {})
    assert status == 404 and answer["error"]["code"] == "not_found"
    assert hint in answer["error"]["message"]
    counted = {handler for handler, code in await metrics(server) if code == "404"}
    assert counted == {label}


async def test_clients_cannot_create_metric_labels(server):
    for number in range(40):
        await server.post(f"/v1/{number}/{number}", {})
        await server.post(f"/{number}", {})
        await server.post(f"/v1/models/a/{number}", {})  # a method that the path does not support
    counted = {handler for handler, _ in await metrics(server)}
    assert counted <= {"/v1/*", "/*", "/v1/models/{name}", "/metrics"}


async def test_wrong_method_is_counted_for_its_path(server):
    status, answer = await server.get("/v1/completions")
    assert status == 405 and "POST" in answer["error"]["message"]
    assert (await metrics(server))["/v1/completions", "405"] == 1


def test_only_short_names_are_compared():
    assert nearest("max_tokns", ["max_tokens", "n"]) == "max_tokens"
    assert nearest("zebra", ["max_tokens"]) is None
    assert nearest("a" * MAX_CHARS, ["a" * MAX_CHARS]) is not None
    assert nearest("a" * (MAX_CHARS + 1), ["a" * (MAX_CHARS + 1)]) is None


async def test_unknown_model_error_lists_the_served_ones(server):
    body = {"prompt": "a", "model": "forge-fke"}
    status, answer = await server.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "forge-fake" in answer["error"]["message"]
    assert "forge-fke" not in answer["error"]["message"]


async def test_any_model_name_is_served_if_configured(start):
    server = await start(Engine.fake(), ServerConfig(accept_any_model=True))
    for model in ("gpt-4o", "forge-fake", None):
        status, answer = await server.post("/v1/completions", {"prompt": "a", "model": model})
        assert status == 200 and answer["model"] == "forge-fake"
    document = (await server.get("/openapi.json"))[1]
    model = document["components"]["schemas"]["CompletionRequest"]["properties"]["model"]
    assert model["anyOf"][0] == {"type": "string"}
    assert (await server.get("/v1/models/gpt-4o"))[0] == 404


@pytest.mark.parametrize(
    ("body", "object"),
    [
        ({"messages": [USER], "max_tokens": 2}, "chat.completion"),
        ({"prompt": "a", "max_tokens": 2}, "text_completion"),
        ({"input": "a"}, "list"),
        ({"text_1": "a", "text_2": "b"}, "list"),
        ({"query": "a", "documents": ["b", "c"]}, None),
    ],
)
async def test_invocation_is_dispatched_by_its_fields(server, body, object):
    status, answer = await server.post("/invocations", body)
    assert status == 200 and answer.get("object") == object


@pytest.mark.parametrize("body", [{}, {"max_tokens": 3}, [], b"{", b'{"a": ' + b"[" * 500])
async def test_empty_invocation_is_rejected(server, body):
    status, answer = await server.post("/invocations", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


async def test_invocation_may_stream_and_container_answers_pings(server):
    events = await server.events("/invocations", {"prompt": "a", "max_tokens": 2, "stream": True})
    assert events[-1] == "[DONE]" and len(events) > 1
    for method in ("GET", "POST"):
        async with server.http.request(method, server.url + "/ping") as response:
            assert response.status == 200


async def test_open_webui_finds_the_models(start):
    server = await start(Engine.fake(), ServerConfig(served_model_name="org/model"))
    status, tags = await server.get("/api/tags")
    assert status == 200 and [model["name"] for model in tags["models"]] == ["org/model"]
    assert tags["models"][0]["details"].keys() >= {"family", "parameter_size"}
    assert (await server.get("/api/version"))[1] == (await server.get("/version"))[1]


def test_documentation_lists_every_path():
    text = (DOCS / "http.md").read_text() + (DOCS / "responses.md").read_text()
    for path, method, name in routes(make_app(Service(ServerConfig())).router):
        if method != "HEAD" and not path.startswith("/static/"):
            assert f"`{path}`" in text or f" {path}`" in text, (name, path)
