"""HTTPS: with the test's own certificate, and errors of invalid files."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from pathlib import Path

import aiohttp
import pytest

from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError
from forge_serve.config import ServerConfig
from forge_serve.http.tls import ssl_context
from forge_serve.server import process as server

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tls"  # for 127.0.0.1, until 2126
CERT, KEY = str(FIXTURES / "cert.pem"), str(FIXTURES / "key.pem")
OTHER_KEY, LOCKED_KEY = str(FIXTURES / "other_key.pem"), str(FIXTURES / "locked_key.pem")


async def test_server_with_a_certificate_speaks_only_https(capsys, caplog):
    sock = server.bind("127.0.0.1", 0)
    host = "{}:{}".format(*sock.getsockname())
    config = ServerConfig(tls_cert=CERT, tls_key=KEY, drain_timeout_s=1.0)
    serving = asyncio.create_task(server._serve(sock, config, Engine.fake))
    trusting = ssl.create_default_context(cafile=CERT)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as http:
        async with asyncio.timeout(60):
            while True:
                async with http.get(f"https://{host}/health") as response:
                    if response.status == 200:
                        break
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with http.post(f"https://{host}/v1/completions", json=body) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://{host}/health")
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"https://{host}/health", ssl=ssl.create_default_context())
    line = capsys.readouterr().out
    assert f"at https://{host}; try: curl https://{host}/v1/" in line
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    assert not [record for record in caplog.records if record.exc_info], "no traceback"


async def test_old_tls_versions_are_rejected():
    context = ssl_context(ServerConfig(tls_cert=CERT, tls_key=KEY))
    assert context is not None and context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert ssl_context(ServerConfig()) is None


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("nowhere.pem", KEY, "--tls-cert: cannot read nowhere.pem: No such file"),
        (CERT, "nowhere.pem", "--tls-key: cannot read nowhere.pem: No such file"),
        (str(FIXTURES), KEY, "--tls-cert: cannot read .*tls: Is a directory"),
        (__file__, KEY, "--tls-cert: .*test_tls.py is not a certificate in PEM format"),
        (KEY, KEY, "--tls-cert: .*key.pem is not a certificate in PEM format"),
        (CERT, __file__, "--tls-key: .*test_tls.py is not a private key in PEM format"),
        (CERT, CERT, "--tls-key: .*cert.pem is not a private key in PEM format"),
        (CERT, OTHER_KEY, "--tls-key: .*other_key.pem is not the key of the certificate in .*cert"),
        (CERT, LOCKED_KEY, "--tls-key: .*locked_key.pem is encrypted: store it without a password"),
    ],
)
def test_unusable_file_is_named_in_the_error(cert, key, message):
    with pytest.raises(ConfigError, match=message):
        ssl_context(ServerConfig(tls_cert=cert, tls_key=key))


@pytest.mark.parametrize("given", [{"tls_cert": CERT}, {"tls_key": KEY}])
def test_certificate_without_its_key_is_rejected(given):
    with pytest.raises(ConfigError, match="--tls-cert and --tls-key"):
        ServerConfig(**given)
