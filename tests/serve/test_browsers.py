"""Cross-site requests from browsers: exactly those are refused."""

from __future__ import annotations

import asyncio

import pytest

from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError
from forge_serve.config import ServerConfig

PAGE = "https://page.example"
BODY = b'{"prompt": "a", "max_tokens": 1}'


async def status_of(server, method="POST", path="/v1/completions", **headers) -> tuple[int, str]:
    """Return the status and the error's code."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    data = BODY if method == "POST" else None
    async with server.http.request(method, server.url + path, data=data, headers=headers) as got:
        answer = await got.json() if got.content_type == "application/json" else {}
    return got.status, answer.get("error", {}).get("code", "")


def port_of(server) -> str:
    return server.url.rpartition(":")[2]


# ---- Host ----------------------------------------------------------------------------------------


FOREIGN_HOSTS = (
    *("rebound.example", "rebound.example:8000", "localhost.rebound.example", "127.0.0.1.example"),
    *("2130706433", "local", "", "[::1].rebound.example", "127.0.0.1@rebound.example"),
)


async def test_unknown_host_name_is_rejected(server):
    for host in FOREIGN_HOSTS:
        for path in ("/", "/v1/models", "/health", "/metrics", "/nowhere"):
            got = await status_of(server, "GET", path, Host=host)
            assert got == (403, "host_not_allowed"), (host, path)


async def test_unknown_host_name_runs_nothing(server):
    assert await status_of(server, Host="rebound.example") == (403, "host_not_allowed")
    assert await status_of(server, "OPTIONS", Host="rebound.example") == (403, "host_not_allowed")
    assert server.engine.stats().steps == 0


async def test_localhost_and_addresses_are_accepted(server):
    for host in (
        *("localhost", "LOCALHOST:1234", "localhost.", "127.0.0.1", "127.8.9.1:1"),
        *("[::1]", "[::1]:8000", "192.168.1.5:8000"),
    ):
        assert (await status_of(server, Host=host))[0] == 200, host


async def test_two_host_headers_are_rejected(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port_of(server)))
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
    assert (await reader.readline()).split()[1] in (b"400", b"403")
    writer.close()


async def test_http_1_0_request_needs_no_host(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port_of(server)))
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()


async def test_allowed_host_names_are_accepted(start):
    server = await start(Engine.fake(), ServerConfig(allowed_host=("Proxy.Example", "other")))
    for host in ("proxy.example", "proxy.example:443", "other:80", "localhost", "127.0.0.1"):
        assert (await status_of(server, Host=host))[0] == 200
    assert await status_of(server, Host="rebound.example") == (403, "host_not_allowed")


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"allowed_host": ("*",)}, 200),
        ({"host": "0.0.0.0"}, 200),  # its host names are unknown
        ({"host": "gpu1.example"}, 200),
        ({"host": "0.0.0.0", "allowed_host": ("gpu1.example",)}, 403),
        ({"host": "::1"}, 403),
        ({"host": "localhost"}, 403),
        ({"host": "127.0.0.2"}, 403),
        ({"api_key": ("sk-1",)}, 200),  # a page has no key
        ({"api_key": ("sk-1",), "allowed_host": ("gpu1.example",)}, 403),
    ],
)
async def test_host_names_are_checked_unless_open_to_all_or_keyed(start, options, status):
    server = await start(Engine.fake(), ServerConfig(**options))
    got, _ = await status_of(server, "GET", "/health", Host="name.example")
    assert got == status


@pytest.mark.parametrize(
    "name", ["", "http://example.org", "a:80", "a b", "*.example.org", "[::1]"]
)
def test_allowed_host_must_be_a_plain_name(name):
    with pytest.raises(ConfigError, match="--allowed-host must be"):
        ServerConfig(allowed_host=(name,))


# ---- Origin --------------------------------------------------------------------------------------


FOREIGN_PAGES = (
    {"Origin": PAGE},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Origin": "https://127.0.0.1.example"},
    {"Origin": PAGE, "Sec_Fetch_Site": "cross-site"},
    {"Origin": PAGE, "Sec_Fetch_Site": "same-site"},
    {"Sec_Fetch_Site": "cross-site"},
)


async def test_cross_site_post_is_rejected(server):
    for headers in FOREIGN_PAGES:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
            got = await status_of(server, **headers, Content_Type=kind)
            assert got == (403, "origin_not_allowed"), (headers, kind)
    assert server.engine.stats().steps == 0


async def test_cross_site_request_cannot_change_the_server(server):
    for path in ("/start_profile", "/v1/load_lora_adapter", "/v1/responses/r/cancel"):
        assert await status_of(server, path=path, Origin=PAGE) == (403, "origin_not_allowed")


async def test_cross_site_delete_is_rejected(server):
    status = await status_of(server, "DELETE", "/v1/responses/r", Origin=PAGE)
    assert status == (403, "origin_not_allowed")


async def test_other_clients_and_the_servers_own_page_may_post(server):
    port = port_of(server)
    for headers in (
        {},
        {"Origin": f"http://127.0.0.1:{port}"},
        {"Origin": f"http://127.0.0.1:{port}", "Sec_Fetch_Site": "same-origin"},
        {"Origin": "http://localhost", "Host": "localhost:80"},
        {"Origin": "http://localhost:80", "Host": "localhost"},
        {"Sec_Fetch_Site": "none"},
        # A TLS-terminating proxy may not forward the host, but the browser reports the same site.
        {"Origin": "https://proxy.example", "Sec_Fetch_Site": "same-origin"},
    ):
        assert await status_of(server, **headers) == (200, ""), headers


async def test_cross_site_get_is_left_to_cors(server):
    assert (await status_of(server, "GET", "/health", Origin=PAGE))[0] == 200


async def test_cors_origin_may_post(start):
    server = await start(Engine.fake(), ServerConfig(cors_origin=(PAGE,)))
    assert (await status_of(server, Origin=PAGE, Sec_Fetch_Site="cross-site"))[0] == 200
    other = await status_of(server, Origin="https://other.example", Sec_Fetch_Site="cross-site")
    assert other == (403, "origin_not_allowed")
    server = await start(Engine.fake(), ServerConfig(cors_origin=("*",)))
    assert (await status_of(server, Origin="https://other.example"))[0] == 200


async def test_cross_site_page_needs_a_key_if_keys_are_set(start):
    server = await start(Engine.fake(), ServerConfig(api_key=("sk-1",)))
    assert (await status_of(server, Origin=PAGE))[0] == 401
    assert (await status_of(server, Origin=PAGE, Authorization="Bearer sk-1"))[0] == 200


async def test_openai_client_is_not_treated_as_a_browser(server):
    answer = await server.openai.completions.create(model=server.model, prompt="a", max_tokens=1)
    assert answer.usage is not None and answer.usage.completion_tokens == 1
