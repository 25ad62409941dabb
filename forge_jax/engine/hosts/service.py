"""`follow`: `forge-jax serve` on a host other than host 0."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time

from forge_jax.config import EngineConfig
from forge_jax.engine.process.launcher import STDERR
from forge_jax.engine.process.messages import Start, frame
from forge_jax.errors import ConfigError
from forge_jax.telemetry.log import LogFormat

FOLLOWER = ("-m", "forge_jax.engine.hosts.follower")
REFUSED = 78  # exit status of a follower for which another attempt would fail as well
PAUSE_S = (0.2, 5.0)  # first and longest pause between two processes
LONG_LIFE_S = 30.0  # after this, the next pause is the first one again

log = logging.getLogger(__name__)


def follow(config: EngineConfig, log_format: LogFormat) -> int:
    """Keep a follower running until SIGTERM, SIGINT or SIGHUP. Return the exit status.

    Call it in the main thread.

    Raises:
      ConfigError: if the configuration does not fit host 0, the model or this machine.
    """
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: stopped.set())
    pause_s = PAUSE_S[0]
    while True:
        begun_s = time.monotonic()
        status = _run(Start(config, log_format=log_format), stopped)
        if stopped.is_set():
            return 0
        if status == REFUSED:
            raise ConfigError(
                f"host {config.parallel.host_rank} cannot take part: see its log above"
            )
        if time.monotonic() - begun_s > LONG_LIFE_S:
            pause_s = PAUSE_S[0]
        log.warning("the process of this host ended: starting another in %.1f s", pause_s)
        if stopped.wait(pause_s):
            return 0
        pause_s = min(2 * pause_s, PAUSE_S[1])


def _run(start: Start, stopped: threading.Event) -> int:
    """Run a follower until it ends, or until `stopped`. Return its exit status."""
    process = subprocess.Popen(
        [sys.executable, *FOLLOWER],
        stdin=subprocess.PIPE,
        stdout=STDERR,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(frame(start))
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended, which `wait` returns
    while not stopped.is_set():
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    return process.wait()
