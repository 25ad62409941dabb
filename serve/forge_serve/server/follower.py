"""`forge-jax serve` on a host other than host 0: it follows host 0, and serves only `/health`."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING

from aiohttp import web

from forge_jax.host import supervise
from forge_serve.config import ServerConfig
from forge_serve.http.auth import HEALTH_PATHS
from forge_serve.http.replies import encoded_response
from forge_serve.http.tls import ssl_context
from forge_serve.telemetry import info

if TYPE_CHECKING:
    from forge_jax.engine.hosts.service import FollowerService


async def serve_health(
    sock: socket.socket, config: ServerConfig, follower: FollowerService
) -> None:
    """Run a follower until SIGTERM, SIGINT or SIGHUP, and serve its state at `HEALTH_PATHS`.

    Raises:
      ConfigError: if the configuration does not fit host 0, the model or this machine, or the
        certificate cannot be read.
    """

    async def health(http: web.Request) -> web.Response:
        state = follower.state
        return encoded_response(info.Health(state), 200 if state == "ready" else 503)

    app = web.Application()
    app.add_routes([web.get(path, health) for path in sorted(HEALTH_PATHS)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, follower.stop)
    tls = ssl_context(config)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, ssl_context=tls).start()
        await supervise.in_thread(follower.run, "following host 0")
    finally:
        await runner.cleanup()
