"""The process of a host other than host 0: performs the operations that host 0 sends.

    python -m forge_jax.engine.hosts.follower FD < CONFIG

It writes a byte to the file descriptor FD as soon as it follows host 0. It keeps no state that must
survive. It ends when the connection to host 0, or its standard input, is closed, and `service`
starts another one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from forge_jax.engine.builder import load_follower
from forge_jax.engine.hosts.group import HostGroup
from forge_jax.engine.hosts.service import REFUSED
from forge_jax.engine.process.messages import Start, to_engine
from forge_jax.errors import ConfigError, ForgeError, ModelError
from forge_jax.host import supervise
from forge_jax.telemetry.log import configure

log = logging.getLogger(__name__)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to the whole group
        signal.signal(number, signal.SIG_IGN)
    length = int.from_bytes(sys.stdin.buffer.read(4), "big")
    start = to_engine.decode(sys.stdin.buffer.read(length))
    assert isinstance(start, Start)
    rank = start.config.parallel.host_rank
    configure(start.log_format, process=f"host {rank}")
    logging.getLogger("jax").setLevel(logging.WARNING)
    supervise.start_thread(_end_with_parent, "waiting for the parent process", _die)
    try:
        group = HostGroup.join(start.config)
        runner = load_follower(start.config, group)
        log.info("host %d follows host 0", rank)
        os.write(int(sys.argv[1]), b"1")
        group.follow(runner)
    except (ConfigError, ModelError) as error:
        log.error("host %d: %s", rank, error)
        os._exit(REFUSED)
    except (ForgeError, OSError) as error:
        log.error("host %d ends: %s", rank, error)
        os._exit(1)
    except BaseException:
        log.exception("host %d ends", rank)
        os._exit(1)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _die(error: BaseException) -> None:
    os._exit(1)


if __name__ == "__main__":
    main()
