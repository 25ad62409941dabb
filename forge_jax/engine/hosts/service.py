"""`FollowerService`: `forge-jax serve` on a host other than host 0."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import Literal

from forge_jax.config import EngineConfig
from forge_jax.engine.process.launcher import STDERR
from forge_jax.engine.process.messages import Start, frame
from forge_jax.errors import ConfigError
from forge_jax.telemetry.log import LogFormat

FOLLOWER = ("-m", "forge_jax.engine.hosts.follower")
LOOK_S = 0.2  # interval of checks on the process
REFUSED = 78  # exit status of a follower for which another attempt would fail as well
PAUSE_S = (0.2, 5.0)  # first and longest pause between two processes
LONG_LIFE_S = 30.0  # after this, the next pause is the first one again

log = logging.getLogger(__name__)


class FollowerService:
    """Keeps a follower running.

    Args:
      config: the engine's options; `host_rank` is at least 1.
      log_format: format of the follower's log.
    """

    def __init__(self, config: EngineConfig, log_format: LogFormat):
        self._start = Start(config, log_format=log_format)
        self._rank = config.parallel.host_rank
        self._stopped = threading.Event()
        self._follows = False

    @property
    def state(self) -> Literal["starting", "ready", "stopping"]:
        """`ready` while the follower performs the operations of host 0. Thread-safe."""
        if self._stopped.is_set():
            return "stopping"
        return "ready" if self._follows else "starting"

    def stop(self) -> None:
        """Make `run` end the follower and return. Thread-safe."""
        self._stopped.set()

    def run(self) -> None:
        """Run followers, one after another, until `stop` is called.

        Raises:
          ConfigError: if the configuration does not fit host 0, the model or this machine.
        """
        pause_s = PAUSE_S[0]
        while not self._stopped.is_set():
            begun_s = time.monotonic()
            status = self._run_one()
            if self._stopped.is_set():
                return
            if status == REFUSED:
                raise ConfigError(f"host {self._rank} cannot take part: see its log above")
            if time.monotonic() - begun_s > LONG_LIFE_S:
                pause_s = PAUSE_S[0]
            log.warning("the process of this host ended: starting another in %.1f s", pause_s)
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def _run_one(self) -> int:
        """Run a follower until it ends, or until `stop`. Return its exit status."""
        follows, sender = os.pipe()
        os.set_blocking(follows, False)
        process = subprocess.Popen(
            [sys.executable, *FOLLOWER, str(sender)],
            stdin=subprocess.PIPE,
            stdout=STDERR,
            pass_fds=(sender,),
            start_new_session=True,
        )
        os.close(sender)
        assert process.stdin is not None
        try:
            try:
                process.stdin.write(frame(self._start))
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended, which `wait` returns
            while not self._stopped.is_set():
                try:
                    return process.wait(LOOK_S)
                except subprocess.TimeoutExpired:
                    self._follows = self._follows or _has_data(follows)
            process.kill()
            return process.wait()
        finally:
            self._follows = False
            process.stdin.close()
            os.close(follows)


def _has_data(pipe: int) -> bool:
    try:
        return bool(os.read(pipe, 1))
    except BlockingIOError:
        return False
