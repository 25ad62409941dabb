"""API keys: access, and tenants that do not share prefixes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import re
import socket
import subprocess
import sys
from typing import Any

import openai
import pytest
from aiohttp import hdrs

from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError
from forge_serve.cli import main as cli
from forge_serve.config import ServerConfig
from forge_serve.http import auth
from forge_serve.http.auth import OPEN_PATHS, ApiKeys
from forge_serve.server import process as server
from forge_serve.server.app import make_app
from forge_serve.server.service import Service

KEY_A, KEY_B = "sk-alpha-0123456789", "sk-beta-0123456789"
KEYS = ServerConfig(api_key=(KEY_A, KEY_B))
PROMPT = {"prompt": list(range(200)), "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {hdrs.AUTHORIZATION: f"Bearer {key}"}


def routes() -> list[tuple[str, str]]:
    """Return every method and path of the application, with parameters filled in."""
    table = make_app(Service(KEYS)).router.routes()
    found = [(r.method, r.resource.canonical) for r in table if r.resource is not None]
    assert len(found) > 10
    return found


@pytest.fixture
async def closed(start):
    return await start(Engine.fake(), KEYS)


async def test_every_route_but_health_and_the_page_is_closed(closed):
    for method, path in [
        *routes(),
        ("GET", "/nowhere"),
        ("POST", "/nowhere"),
        ("OPTIONS", "/stats"),
    ]:
        url = closed.url + re.sub(r"\{.*?\}", "x", path)
        for headers in ({}, bearer("sk-wrong"), bearer("")):
            async with closed.http.request(method, url, json={}, headers=headers) as response:
                if path in OPEN_PATHS:
                    assert response.status == 200
                    continue
                assert response.status == 401, (method, path)
                assert response.headers["WWW-Authenticate"] == "Bearer"
                if method != "HEAD":
                    error = (await response.json())["error"]
                    if path.startswith("/v1/messages"):
                        assert error["type"] == "authentication_error"
                        continue
                    assert error["code"] == "invalid_api_key"
                    assert set(error) == {"message", "type", "param", "code"}


def test_only_the_listed_routes_are_open():
    page = [path for path in OPEN_PATHS if path == "/" or path.startswith("/static/")]
    assert sorted(OPEN_PATHS - set(page)) == ["/health", "/healthz"]


@pytest.mark.parametrize(
    "path",
    ["//health/", "//health", "/health/../stats", "/%68ealth/x", "/stats?/health", "/Health"],
)
async def test_paths_that_resemble_an_open_one_are_closed(closed, path):
    async with closed.http.get(closed.url + path) as response:
        assert response.status == 401


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer")],
        [("Authorization", KEY_A)],
        [("Authorization", f"Basic {KEY_A}")],
        [("Authorization", f"Bearer {KEY_A}x")],
        [("Authorization", f"Bearer {KEY_A[:-1]}")],
        [("Authorization", f"Bearer {KEY_A} {KEY_B}")],
        [("Authorization", "Bearer \udcff\udcfe")],
        [("Authorization", "Bearer é")],
        [("X-Api-Key", f"Bearer {KEY_A}")],
        [("X-Api-Key", KEY_A), ("X-Api-Key", KEY_A)],
        [("Authorization", "Bearer sk-wrong"), ("X-Api-Key", KEY_A)],
        [("Authorization", f"Bearer {KEY_A}"), ("Authorization", f"Bearer {KEY_A}")],
    ],
)
async def test_malformed_keys_open_nothing(closed, headers):
    port = int(closed.url.rpartition(":")[2])
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    request = f"GET /stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n"
    answer = await _raw(port, request.encode("utf-8", "surrogateescape"))
    assert answer.split()[1] in (b"401", b"400")
    assert KEY_A.encode() not in answer


async def test_each_key_opens_every_route(closed):
    for headers in (
        bearer(KEY_A),
        bearer(KEY_B),
        {hdrs.AUTHORIZATION: f"bearer  {KEY_A} "},
        {"X-Api-Key": KEY_A},
        {**bearer(KEY_A), "X-Api-Key": "of a gateway"},
    ):
        for path in ("/stats", "/metrics", "/v1/models", "/forge/v1/health"):
            async with closed.http.get(closed.url + path, headers=headers) as response:
                assert response.status == 200
    client = closed.openai.with_options(api_key=KEY_A)
    assert (await client.completions.create(model=closed.model, prompt="a", max_tokens=1)).choices
    with pytest.raises(openai.AuthenticationError) as refused:
        await closed.openai.completions.create(model=closed.model, prompt="a")
    assert refused.value.code == "invalid_api_key"


async def test_body_is_not_read_without_a_key(closed):
    port = int(closed.url.rpartition(":")[2])
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{"
    assert (await _raw(port, head, until=b"\r\n")).split()[1] == b"401"


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    keys = ApiKeys([KEY_A, KEY_B, "c"])
    monkeypatch.setattr(auth.hmac, "compare_digest", counted)
    for key in (KEY_A, "c", "", "x" * 10_000):
        compared.clear()
        keys.tenant(key)
        assert compared == [(32, 32)] * 3, "it stops at none, and lengths are equal"


def test_tenant_names_are_distinct_and_stable():
    keys, others = ApiKeys([KEY_A, KEY_B, KEY_A]), ApiKeys([KEY_B])
    assert keys.tenant(KEY_A) != keys.tenant(KEY_B) == others.tenant(KEY_B)
    assert re.fullmatch("[0-9a-f]{32}", keys.tenant(KEY_A) or "")
    assert keys.tenant("") is None and others.tenant(KEY_A) is None
    assert keys and not ApiKeys()


async def test_tenants_do_not_share_cached_prefixes(closed):
    async def cached(key: str, **more: Any) -> int:
        url = closed.url + "/v1/completions"
        async with closed.http.post(url, json={**PROMPT, **more}, headers=bearer(key)) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    for more in ({}, {"cache_salt": "same"}):
        assert await cached(KEY_A, **more) == 0
        assert await cached(KEY_A, **more) == 192, "whole blocks of 16"
        assert await cached(KEY_B, **more) == 0
        assert await cached(KEY_B, **more) == 192
    assert await cached(KEY_A, cache_salt="another") == 0
    tenant = closed.service.api_keys.tenant(KEY_A)
    assert await cached(KEY_B, cache_salt=tenant) == 0
    assert await cached(KEY_B, cache_salt=f"{tenant}same") == 0


async def test_clients_share_cached_prefixes_without_keys(start):
    server = await start(Engine.fake())
    for headers, cached in (({}, 0), (bearer("whatever"), 192)):
        url = server.url + "/v1/completions"
        async with server.http.post(url, json=PROMPT, headers=headers) as response:
            usage = (await response.json())["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


async def test_keys_are_neither_logged_nor_shown(start, caplog, capsys, tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY_B}\n")
    caplog.set_level(logging.DEBUG)
    config = ServerConfig(api_key=(KEY_A,), api_key_file=str(file), fake=True)
    running = await start(Engine.fake(), config)
    for key in (KEY_A, KEY_B, "sk-wrong-key"):
        url = running.url + "/v1/completions"
        async with running.http.post(url, json={}, headers=bearer(key)) as response:
            assert "sk-" not in await response.text()
        async with running.http.get(running.url + "/stats", headers=bearer(key)) as response:
            assert "sk-" not in await response.text()
    server.warn_of_ignored(EngineConfig())
    with socket.create_server(("127.0.0.1", 0)) as sock:
        print(server.serving_line(sock, running.service))
    with pytest.raises(SystemExit):
        cli.main(["serve", "--api-key", KEY_A, "--help"])
    shown = capsys.readouterr().out + caplog.text + repr(config) + repr(running.service.__dict__)
    assert "$API_KEY" in shown
    for key in (KEY_A, KEY_B, "sk-wrong-key"):
        assert key not in shown


def test_keys_never_leave_the_process():
    command = [sys.executable, "-m", "forge_serve.cli.main", "serve", "--fake", "--api-key", KEY_A]
    for more in (["--port", "-1"], ["--tls-cert", "x"], ["--api-key", f"{KEY_A} with a space"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "sk-" not in done.stdout + done.stderr


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "é", "x" * 513, "\x7f"])
def test_key_that_no_client_could_send_is_rejected(key, tmp_path):
    with pytest.raises(ConfigError, match="--api-key") as refused:
        ServerConfig(api_key=(KEY_A, key))
    assert KEY_A not in str(refused.value)
    if len(key.strip()) > 1:
        (tmp_path / "keys").write_text(f"# ours\n\n{KEY_A}\n{key}x y\n")
        with pytest.raises(ConfigError, match=r"--api-key-file: .*keys, line 4") as refused:
            ApiKeys.of(ServerConfig(api_key_file=str(tmp_path / "keys")))
        assert key not in str(refused.value)


def test_keys_from_a_file_and_from_flags_are_combined(tmp_path):
    (tmp_path / "keys").write_text(f"# ours\n\n  {KEY_B}  \n")
    keys = ApiKeys.of(ServerConfig(api_key=(KEY_A,), api_key_file=str(tmp_path / "keys")))
    assert keys.tenant(KEY_A) and keys.tenant(KEY_B)
    assert keys.tenant("# ours") is None and keys.tenant("") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        (b"", "has no key"),
        (b"# only\n", "no key"),
        (b"\xff", "not a text"),
    ],
)
def test_invalid_key_file_ends_the_start(content, message, tmp_path):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file: .*{message}"):
        Service(ServerConfig(api_key_file=str(file)))


def test_keys_come_from_repeated_flags(monkeypatch):
    seen: list[ServerConfig] = []
    monkeypatch.setattr(
        "forge_serve.server.process.serve", lambda _, server, __: seen.append(server)
    )
    cli.main(["serve", "--api-key", KEY_A, "--api-key", KEY_B])
    cli.main(["serve"])
    assert seen == [KEYS, ServerConfig()]
    with pytest.raises(ConfigError, match="tuple"):
        dataclasses.replace(KEYS, api_key=KEY_A)


@pytest.mark.parametrize(
    ("host", "config", "warned"),
    [
        ("127.0.0.1", ServerConfig(), False),
        ("localhost", ServerConfig(), False),
        ("0.0.0.0", ServerConfig(), True),
        ("0.0.0.0", KEYS, False),
    ],
)
def test_server_open_to_other_machines_logs_a_warning(host, config, warned, caplog):
    with contextlib.closing(server.bind(host, 0)) as sock:
        server.warn_of_exposure(sock, config)
    assert ("without API keys" in caplog.text) is warned


def test_default_address_is_the_local_machine():
    assert ServerConfig().host == "127.0.0.1"


async def _raw(port: int, request: bytes, until: bytes | None = None) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await (reader.read() if until is None else reader.readuntil(until))
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer
