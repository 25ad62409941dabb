"""Server process, from the bound socket to the last response.

Startup binds the socket, returns 503 from /health, loads the engine in a thread and then serves.
Compilation continues in the background until the state is "ready". The socket is bound first, so
that a port conflict fails before any long work and clients can distinguish "starting" from
"unreachable". It is closed last, so that new requests get 503 while running requests finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import ipaddress
import logging
import os
import re
import resource
import shlex
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web
from aiohttp.http import HttpProcessingError

from forge_jax.config import EngineConfig
from forge_jax.errors import ConfigError
from forge_jax.host import supervise
from forge_jax.host.exits import leave
from forge_jax.telemetry.log import configure
from forge_serve.config import ServerConfig
from forge_serve.http.connections import Runner
from forge_serve.http.tls import ssl_context
from forge_serve.server.app import make_app
from forge_serve.server.follower import serve_health
from forge_serve.server.service import Service
from forge_serve.telemetry.gpus import Gpus
from forge_serve.telemetry.request_log import TENANT_CHARS

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.telemetry.startup import StartupTimes

log = logging.getLogger(__name__)

BACKLOG = 1024
MAX_REASON_CHARS = 200  # characters of a protocol error in the log
_QUOTED_BYTES = re.compile(r"""\bb['"]""")
LAST_BYTES_S = 1.0  # time to send responses after the engine has stopped
LAST_SPANS_S = 3.0  # time to export the last spans
HURRY_S = 3.0  # maximum time from the second signal to the exit


def serve(
    engine_config: EngineConfig, server_config: ServerConfig, startup: StartupTimes | None = None
) -> NoReturn:
    """Serve until SIGTERM, SIGINT or SIGHUP, and end the process with status 0.

    Args:
      engine_config: options of the engine.
      server_config: options of the server.
      startup: records the phases of the startup; default: a new record that starts now.

    Raises:
      ConfigError: the address is not available, a file of keys or certificates cannot be read, or
        the configuration is invalid.
      ModelError: the model cannot be served.
    """
    configure(server_config.log_format)
    logging.getLogger("jax").setLevel(logging.WARNING)  # INFO logs every missing backend
    logging.getLogger("aiohttp.server").addFilter(_without_traceback)
    logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)  # its warnings quote headers
    raise_file_limit()
    if engine_config.parallel.num_hosts > 1:
        _check_hosts(server_config)
    if engine_config.parallel.pipeline_parallel > 1 and server_config.weight_sync_dir is not None:
        raise ConfigError(
            "--weight-sync-dir does not work with --pipeline-parallel: omit one of them"
        )
    if engine_config.parallel.host_rank:
        _follow(engine_config, server_config)
    with bind(server_config.host, server_config.port) as sock:
        if server_config.fake:
            warn_of_ignored(engine_config)
        warn_of_exposure(sock, server_config)

        def load() -> AsyncEngine:
            return load_engine(engine_config, server_config, startup)

        without_gpus = server_config.fake or engine_config.parallel.backend == "cpu"
        gpus = None if without_gpus else Gpus()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(sock, server_config, load, gpus))
            leave(0)  # before the event loop closes, because it then no longer handles signals


def _follow(engine_config: EngineConfig, server_config: ServerConfig) -> NoReturn:
    """Run `forge-jax serve` on a host other than host 0."""
    from forge_jax.engine.hosts.service import FollowerService

    follower = FollowerService(engine_config, server_config.log_format)
    with (
        bind(server_config.host, server_config.port) as sock,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        runner.run(serve_health(sock, server_config, follower))
        leave(0)  # as in `serve`


def _check_hosts(config: ServerConfig) -> None:
    """Reject options that do not work with several hosts."""
    if config.fake:
        raise ConfigError("--fake has no model to share: omit --num-hosts")
    if config.data_parallel > 1:
        raise ConfigError(
            "--data-parallel does not work with --num-hosts: run several groups of hosts behind a "
            "router"
        )
    if config.weight_sync_dir is not None:
        raise ConfigError(
            "--weight-sync-dir does not work with --num-hosts: the other hosts would keep the old "
            "weights. Omit one of them"
        )


def warn_of_ignored(engine_config: EngineConfig) -> None:
    """Log a warning with the flags that --fake ignores."""
    model = engine_config.model
    ignored = [
        "MODEL" if field.name == "model" else "--" + field.name.replace("_", "-")
        for field in dataclasses.fields(model)
        if field.name in ("model", "revision", "dtype", "chat_template")
        and getattr(model, field.name) != field.default
    ]
    if ignored:
        log.warning("--fake loads no model and ignores %s", ", ".join(ignored))


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 selects any free port.

    Raises:
      ConfigError: the port is in use or not permitted, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is already in use: set --port") from error
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} requires privileges: set --port") from error
        reason = error.strerror or "no such address"
        raise ConfigError(f"cannot listen on {host}:{port} ({reason}): set --host") from error


def warn_of_exposure(sock: socket.socket, config: ServerConfig) -> None:
    """Log a warning if other machines can reach a server without API keys."""
    host = sock.getsockname()[0]
    if ipaddress.ip_address(host).is_loopback or config.api_key or config.api_key_file:
        return
    log.warning(
        "listening on %s without API keys: anyone who can reach this address can use the server; "
        "set --api-key-file",
        host,
    )


def load_engine(
    engine_config: EngineConfig, server_config: ServerConfig, startup: StartupTimes | None = None
) -> AsyncEngine:
    """Load the engine. This takes long and imports jax, here or in the engine's own process."""
    from forge_jax.engine.streams import QueueLimits

    limits = QueueLimits(
        samples=server_config.max_queued_requests,
        prompt_tokens=server_config.max_queued_tokens,
    )
    fake_step_s = server_config.fake_step_time_ms / 1e3
    if server_config.data_parallel > 1:
        from forge_jax.engine.process.group import EngineGroup

        count, log_format = server_config.data_parallel, server_config.log_format
        if server_config.fake:
            return EngineGroup.fake(
                count,
                step_time_s=fake_step_s,
                config=engine_config,
                queue_limits=limits,
                log_format=log_format,
            )
        return EngineGroup.load(engine_config, count, limits, log_format)
    if server_config.engine_process or engine_config.parallel.num_hosts > 1:
        from forge_jax.engine.process.client import EngineProcess

        if server_config.fake:
            return EngineProcess.fake(
                step_time_s=fake_step_s,
                config=engine_config,
                queue_limits=limits,
                log_format=server_config.log_format,
            )
        return EngineProcess.load(engine_config, limits, server_config.log_format)
    from forge_jax.engine.thread import Engine

    if server_config.fake:
        return Engine.fake(step_time_s=fake_step_s, config=engine_config, queue_limits=limits)
    return Engine.load(engine_config, startup, limits)


async def _serve(
    sock: socket.socket,
    config: ServerConfig,
    load: Callable[[], AsyncEngine],
    gpus: Gpus | None = None,
) -> None:
    """Serve until a signal. Threads that load or compile may still be running at the end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    service, tls = Service(config, gpus=gpus), ssl_context(config)
    for number, tenant in enumerate(service.api_keys.tenants, start=1):
        log.info("API key %d is tenant %s in the log", number, tenant[:TENANT_CHARS])
    last_timers: list[asyncio.TimerHandle] = []  # end the process if shutdown takes too long
    handle_signals(loop, stop, service, last_timers)
    runner = make_runner(service)
    await runner.setup()
    site = web.SockSite(runner, sock, backlog=BACKLOG, ssl_context=tls)
    await site.start()
    try:
        loading = supervise.in_thread(load, "loading the model")
        stopped = supervise.start_task(stop.wait(), "waiting for a signal", service.fail)
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return
        engine = loading.result()
        engine.start()
        service.engine = engine
        print(serving_line(sock, service), flush=True)
        watching = supervise.start_task(
            service.memory.watch(), "watching the host's memory", service.fail
        )
        await stopped
        watching.cancel()
        await drain(service, config.drain_timeout_s)
    finally:
        service.stopping = True
        await runner.cleanup()
        service.workers.close()
        if service.tracing is not None:  # runs in a thread, because the collector may not respond
            closing = supervise.in_thread(service.tracing.close, "sending the last spans")
            supervise.watch(closing, "sending the last spans")
            await asyncio.wait([closing], timeout=LAST_SPANS_S)
        for timer in last_timers:
            timer.cancel()


def make_runner(service: Service, *, last_bytes_s: float = LAST_BYTES_S) -> web.AppRunner:
    """Return the application's runner, with the limits on the request line and headers.

    Args:
      service: the server's state.
      last_bytes_s: seconds that responses may take to be sent at shutdown.
    """
    limits = service.config.limits
    return Runner(
        make_app(service),
        body_bytes=limits.body_bytes,
        handler_cancellation=True,
        auto_decompress=False,  # see content_coding.py
        access_log=None,
        shutdown_timeout=last_bytes_s,
        max_line_size=limits.target_bytes,
        max_field_size=limits.header_bytes,
        max_headers=limits.headers,
    )


async def drain(service: Service, timeout_s: float) -> None:
    """Reject new requests with 503, wait up to `timeout_s` for running ones, and stop the engine.

    The socket stays open.
    """
    assert service.engine is not None
    service.stop()
    log.info("stopping: running requests have %d s to finish", timeout_s)
    await service.profiles.close(service.engine)
    await service.engine.stop(timeout_s)


def serving_line(sock: socket.socket, service: Service) -> str:
    """Return the line with the server's URL and a command to try."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"{'http' if service.config.tls_cert is None else 'https'}://{host}:{port}"
    body = '{"prompt": "Once upon a time", "max_tokens": 32}'
    key = ' -H "Authorization: Bearer $API_KEY"' if service.api_keys else ""
    command = (
        f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )
    return f"forge-jax serves {service.model_name} at {url}; try: {command}"


def _without_traceback(record: logging.LogRecord) -> bool:
    """Remove tracebacks and quoted bytes from aiohttp's log records of malformed requests.

    A traceback does not help with invalid HTTP, and the quoted bytes may contain a key.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        said = _QUOTED_BYTES.split(str(error), maxsplit=1)[0]
        reason = " ".join(said.split())[:MAX_REASON_CHARS].rstrip(" :")
        record.msg, record.args = "%s: %s", (record.getMessage(), reason)
        record.exc_info = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory if installed, which saves a fifth of the work per event."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None


def handle_signals(
    loop: asyncio.AbstractEventLoop,
    stop: asyncio.Event,
    service: Service,
    last_timers: list[asyncio.TimerHandle],
) -> None:
    """Install handlers that shut down gracefully on SIGTERM, SIGINT and SIGHUP.

    A closed terminal and its shell may both send SIGHUP. A second SIGHUP therefore does not force
    the exit, as a second SIGTERM does. Under `nohup`, SIGHUP stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop, service, last_timers, number)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop.set)


def _on_signal(
    stop: asyncio.Event, service: Service, last_timers: list[asyncio.TimerHandle], number: int
) -> None:
    """Shut down gracefully on the first signal. Abort all requests on the second."""
    if not stop.is_set():
        stop.set()
        return
    if service.engine is None:
        os._exit(128 + number)
    loop = asyncio.get_running_loop()
    last_timers.append(loop.call_later(HURRY_S, os._exit, 128 + number))
    service.engine.abort_all()


def raise_file_limit() -> None:
    """Raise the limit of open files, and so of connections, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
