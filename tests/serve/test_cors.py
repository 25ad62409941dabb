"""CORS: web pages of other origins are rejected unless listed."""

from __future__ import annotations

import pytest

from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError
from forge_serve.config import ServerConfig

ORIGIN, OTHER = "https://app.example.org", "https://example.org"
BODY = {"prompt": "a", "max_tokens": 1}
ASK = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def asked(server, path="/v1/completions", **headers):
    async with server.http.options(server.url + path, headers={**ASK, **headers}) as response:
        return response.status, dict(response.headers)


async def answered(server, method="POST", path="/v1/completions", body=None, **headers):
    url = server.url + path
    async with server.http.request(method, url, json=body or BODY, headers=headers) as response:
        await response.read()
        return response.status, dict(response.headers)


def of_cors(headers: dict[str, str]) -> set[str]:
    return {name for name in headers if name.startswith("Access-Control-")}


async def test_no_cors_headers_by_default(server):
    for status, headers in (
        await asked(server, Origin=ORIGIN),
        await answered(server, Origin=ORIGIN),
    ):
        assert status in (405, 403)
        assert not of_cors(headers) and "Vary" not in headers


async def test_listed_origin_preflights_without_a_key_and_reads_answers(start):
    config = ServerConfig(api_key=("sk-1",), cors_origin=(ORIGIN, "http://localhost:3000"))
    server = await start(Engine.fake(), config)
    key = {"Authorization": "Bearer sk-1"}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/nowhere"):
        status, headers = await asked(server, path, Origin=ORIGIN)
        assert status == 204
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "POST" in headers["Access-Control-Allow-Methods"]
        allowed = headers["Access-Control-Allow-Headers"]
        assert allowed == ASK["Access-Control-Request-Headers"]
        assert headers["Vary"] == "Origin"
    stream = {**BODY, "stream": True}
    for status, body, more in (
        (200, BODY, key), (200, stream, key), (401, BODY, {}), (400, {"prompt": 5}, key),
    ):  # fmt: skip
        got, headers = await answered(server, body=body, Origin=ORIGIN, **more)
        assert got == status
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "X-Request-Id" in headers["Access-Control-Expose-Headers"]
        assert headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in headers
    status, headers = await answered(server, Origin="http://localhost:3000", **key)
    assert headers["Access-Control-Allow-Origin"] == "http://localhost:3000"


@pytest.mark.parametrize(
    "origin",
    [
        OTHER,
        "http://app.example.org",
        ORIGIN + ":444",
        ORIGIN + ".evil.org",
        "null",
        ORIGIN.upper(),
    ],
)
async def test_other_origins_get_no_cors_headers(start, origin):
    server = await start(Engine.fake(), ServerConfig(api_key=("sk-1",), cors_origin=(ORIGIN,)))
    status, headers = await asked(server, Origin=origin)
    assert status == 401
    assert not of_cors(headers)
    status, headers = await answered(server, Origin=origin, Authorization="Bearer sk-1")
    assert status == 200
    assert not of_cors(headers) and headers["Vary"] == "Origin"


async def test_wildcard_origin_allows_all_without_credentials(start):
    server = await start(Engine.fake(), ServerConfig(cors_origin=("*",)))
    for status, headers in (
        await asked(server, Origin=OTHER),
        await answered(server, Origin=OTHER),
    ):
        assert status in (204, 200)
        assert headers["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Credentials" not in headers


async def test_malformed_preflight_is_an_ordinary_request(start):
    server = await start(Engine.fake(), ServerConfig(api_key=("sk-1",), cors_origin=(ORIGIN,)))
    async with server.http.options(server.url + "/stats", headers={"Origin": ORIGIN}) as response:
        assert response.status == 401
    status, headers = await asked(
        server, Origin=ORIGIN, **{"Access-Control-Request-Headers": "a: b; c\t(d)"}
    )
    assert status == 204 and "Access-Control-Allow-Headers" not in headers


@pytest.mark.parametrize(
    "origin",
    ["", "example.org", "https://example.org/", "https://*", "https://a b", "null", "https://"],
)
def test_invalid_origin_is_rejected(origin):
    with pytest.raises(ConfigError, match="--cors-origin"):
        ServerConfig(cors_origin=(ORIGIN, origin))
