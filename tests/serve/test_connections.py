"""Malformed HTTP: answered like other errors, and bounded."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
from contextlib import suppress

import pytest

from forge_jax.engine.thread import Engine
from forge_serve.config import ServerConfig
from forge_serve.http.connections import WIRE_BYTES_PER_BODY_BYTE
from forge_serve.limits import Limits
from forge_serve.server import process as server_module

BODY = b'{"prompt": "a", "max_tokens": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def exchange(server, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"".join(parts))
    answer = b""
    with suppress(ConnectionError):  # unread input causes a reset after its answer
        while data := await reader.read(65536):
            answer += data
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


MALFORMED = {
    "no method": b"\x00\x01secret\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00secret",
    "method": b"SE CRET / HTTP/1.1\r\n\r\n",
    "header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nBad Header: secret\r\n\r\n",
    "value": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: sec\x00ret\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"secret" * 10_000,
    "long target": b"GET /" + b"secret" * 10_000 + b" HTTP/1.1\r\n",
    "version": b"GET / HTTP/secret\r\n\r\n",
    "lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nsecret",
    "length": HEAD + b"Content-Length: secret\r\n\r\n",
    "both": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}


async def test_malformed_http_gets_a_json_error(server):
    for name, data in MALFORMED.items():
        status, headers, body = await exchange(server, data)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (400, "invalid_http"), name
        assert error["type"] == "invalid_request_error" and error["param"] is None
        assert headers["content-type"].startswith("application/json"), name
        assert headers["server"] == "forge-jax", name
        assert b"secret" not in body.lower() and b"b'" not in body, name
        if name.startswith("long"):
            assert "exceeds the server's limit" in error["message"], name


async def test_chunked_body_is_read(server):
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert (await exchange(server, CHUNKED, chunks))[0] == 200
    bytewise = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    assert (await exchange(server, CHUNKED, bytewise))[0] == 200


@pytest.mark.parametrize("coding", ["gzip, chunked", "x, Chunked", "br,chunked"])
async def test_transfer_coding_other_than_chunked_is_rejected(server, coding):
    head = HEAD + f"Transfer-Encoding: {coding}\r\n\r\n".encode()
    data = gzip.compress(BODY)
    status, headers, body = await exchange(
        server, head, b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    )
    assert status == 400 and headers["connection"] == "close"
    assert json.loads(body)["error"]["code"] == "transfer_coding_not_supported"


async def test_transfer_codings_in_two_headers_are_rejected(server):
    head = HEAD + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert (await exchange(server, head, b"0\r\n\r\n"))[0] == 400


async def test_chunk_extensions_are_limited(start):
    limits = Limits(body_bytes=1024)
    server = await start(Engine.fake(), ServerConfig(limits=limits))
    few = b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(BODY), b"e" * 1000, BODY)
    assert (await exchange(server, CHUNKED, few))[0] == 200
    most = WIRE_BYTES_PER_BODY_BYTE * limits.body_bytes + 64 * 1024
    # The chunk never ends, so only this limit can end the request.
    status, _, body = await exchange(server, CHUNKED, b"1;", b"e" * (most + 2**19))
    assert status == 400
    assert "does not match its headers" in json.loads(body)["error"]["message"]
    status, _ = await server.post("/v1/completions", BODY)
    assert status == 200, "others are served"


class Loop:
    """An event loop that records signal handlers."""

    def __init__(self) -> None:
        self.handlers: dict[int, tuple] = {}

    def add_signal_handler(self, number: int, *call) -> None:
        self.handlers[number] = call


@pytest.mark.parametrize("ignored", [False, True], ids=["", "nohup"])
async def test_hangup_drains_and_a_second_one_changes_nothing(monkeypatch, ignored):
    before = signal.SIG_IGN if ignored else signal.SIG_DFL
    monkeypatch.setattr(signal, "getsignal", lambda number: before)
    loop, stop = Loop(), asyncio.Event()
    service = server_module.Service(ServerConfig())
    server_module.handle_signals(loop, stop, service, [])  # type: ignore[arg-type]
    assert {signal.SIGTERM, signal.SIGINT} <= loop.handlers.keys()
    assert (signal.SIGHUP in loop.handlers) is not ignored
    if not ignored:
        for _ in range(2):  # without an engine, the second SIGTERM would end a process at once
            call, *arguments = loop.handlers[signal.SIGHUP]
            call(*arguments)
        assert stop.is_set()
