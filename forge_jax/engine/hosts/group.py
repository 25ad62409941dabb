"""`HostGroup`: the hosts that share one model, as one of them sees the others.

Host 0 listens at `--coordinator`. When every other host has joined, all of them start
`jax.distributed`, whose coordinator listens at a free port of host 0. A group lives as long as all
its processes: JAX cannot replace one. If a process ends, the others end as well, and the next ones
form a new group.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

import forge_jax
from forge_jax.config import EngineConfig
from forge_jax.config.options import split_address
from forge_jax.engine.hosts.messages import Begin, Identity, Join, Message, Peer, Reject, Value
from forge_jax.errors import ConfigError, EngineError
from forge_jax.host import supervise
from forge_jax.step.mirror import Operation, replay

if TYPE_CHECKING:
    from forge_jax.step.runner import Runner

JOIN_S = 5.0  # timeout of a new connection's first message
CONNECT_PAUSE_S = 0.5
LOG_S = 30.0  # interval of log lines while hosts are missing
RESOLVE_S = 60.0  # for the coordinator's name to appear in the DNS
START_S = 120  # for all hosts to start `jax.distributed`

log = logging.getLogger(__name__)


class HostGroup:
    """The hosts that share one model. Use `join`."""

    def __init__(self, rank: int, peers: list[Peer]):
        self.rank = rank
        self._sending = threading.Lock()
        self._peers = peers  # on host 0, all others in the order of their ranks; else host 0

    @classmethod
    def join(cls, config: EngineConfig) -> HostGroup:
        """Wait for all hosts, and start `jax.distributed`. Call it before JAX has devices.

        Raises:
          ConfigError: if the address is unusable, or host 0 rejects this host.
          EngineError: if a host is lost meanwhile.
        """
        parallel = config.parallel
        assert parallel.coordinator is not None
        host, port = split_address(parallel.coordinator)
        rank, count = parallel.host_rank, parallel.num_hosts
        if rank == 0:
            peers = _gather(host, port, count)
            jax_port = _free_port(host)
            for peer in peers:
                peer.send(Begin(jax_port))
        else:
            peer = _connect(host, port, rank)
            peers, jax_port = [peer], _begin(peer).port
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"[{host}]:{jax_port}" if ":" in host else f"{host}:{jax_port}"
        try:
            jax.distributed.initialize(address, count, rank, initialization_timeout=START_S)
        except RuntimeError as error:
            raise EngineError(f"the hosts could not form a group: {error}") from error
        log.info("host %d of %d has joined the group", rank, count)
        return cls(rank, peers)

    def smallest(self, number: int) -> int:
        """Return the smallest number of all hosts. All of them call it in the same order.

        Raises:
          EngineError: if a host is lost.
        """
        if self.rank:
            self._send(Value(number))
            return self._value()
        numbers = [self._value(peer) for peer in self._peers]
        least = min(number, *numbers)
        self._send(Value(least))
        return least

    def check_same(self, identity: dict[str, Any]) -> None:
        """Check that all hosts run the same model in the same way.

        Args:
          identity: JSON-serializable values by name. An error shows the first different one.

        Raises:
          ConfigError: if they differ.
          EngineError: if a host is lost.
        """
        texts = {name: json.dumps(value, sort_keys=True) for name, value in identity.items()}
        if self.rank:
            self._send(Identity(texts))
            self._value()
            return
        for rank, peer in enumerate(self._peers, start=1):
            answer = self._receive(peer)
            assert isinstance(answer, Identity)
            name = next((n for n in texts if texts[n] != answer.texts.get(n)), None)
            if name is not None:
                message = (
                    f"host {rank} differs from host 0 in {name}: {answer.texts.get(name)} instead "
                    f"of {texts[name]}. All hosts need the same versions, model and options"
                )
                self._send(Reject(message))
                raise ConfigError(message)
        self._send(Value(0))

    def lead(self, runner: Runner, on_lost: Callable[[BaseException], None]) -> None:
        """Send all operations of a runner to the other hosts from now on.

        Args:
          on_lost: ends this process. It is called from another thread if a host is lost.
        """
        runner.mirror = self
        for rank, peer in enumerate(self._peers, start=1):
            watch = partial(_until_lost, peer)
            supervise.start_thread(watch, f"the connection to host {rank}", on_lost)

    def follow(self, runner: Runner) -> None:
        """Perform the operations of host 0 until the connection is lost.

        Raises:
          OSError: when the connection is lost.
        """
        (leader,) = self._peers
        while True:
            message = leader.receive()
            assert not isinstance(message, Join | Begin | Reject | Value | Identity)
            replay(runner, message)

    def send(self, operation: Operation) -> None:
        self._send(operation)

    def _send(self, message: Message) -> None:
        try:
            with self._sending:
                for peer in self._peers:
                    peer.send(message)
        except OSError as error:
            raise EngineError(f"a host is lost: {error}") from error

    def _value(self, peer: Peer | None = None) -> int:
        message = self._receive(peer or self._peers[0])
        assert isinstance(message, Value)
        return message.number

    def _receive(self, peer: Peer) -> Message:
        try:
            message = peer.receive()
        except OSError as error:
            raise EngineError(f"a host is lost: {error}") from error
        if isinstance(message, Reject):
            raise ConfigError(message.message)
        return message


def _until_lost(peer: Peer) -> None:
    """Wait until the connection to a host is lost, and raise the reason."""
    message = peer.receive()  # a follower sends nothing
    raise EngineError(f"a host sent {type(message).__name__}")


def _gather(host: str, port: int, count: int) -> list[Peer]:
    """Accept the other hosts, and return their connections in the order of their ranks."""
    joined: dict[int, Peer] = {}
    with _listen(host, port) as server:
        server.settimeout(LOG_S)
        while len(joined) < count - 1:
            try:
                sock, _ = server.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, count) if rank not in joined]
                log.info("waiting at %s:%d for hosts %s", host, port, missing)
                continue
            peer = Peer(sock)
            rank = _rank_of(peer, count)
            if rank is None:
                peer.close()
                continue
            if rank in joined:  # the earlier process has ended
                joined[rank].close()
            joined[rank] = peer
    return [joined[rank] for rank in range(1, count)]


def _listen(host: str, port: int) -> socket.socket:
    """Listen at the coordinator's address as soon as its name has one.

    Schedulers such as LeaderWorkerSet may start a process before its name is in the DNS.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    end_s = time.monotonic() + RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(host, port, family)
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if isinstance(error, socket.gaierror) and time.monotonic() < end_s:
                time.sleep(CONNECT_PAUSE_S)
                continue
            raise ConfigError(
                f"--coordinator {host}:{port}: host 0 cannot listen there ({error.strerror}): use "
                "an address of host 0 and a free port"
            ) from error


def _rank_of(peer: Peer, count: int) -> int | None:
    """Return the rank of a host that joins; None if it must not."""
    try:
        message = peer.receive(JOIN_S)
        if not isinstance(message, Join):
            return None
        fault = None
        if message.version != forge_jax.__version__:
            fault = f"host 0 runs forge-jax {forge_jax.__version__}: install the same version"
        elif not 1 <= message.rank < count:
            fault = f"host 0 has --num-hosts {count}: set the same, and --host-rank below it"
        if fault is not None:
            peer.send(Reject(fault))
            return None
    except (OSError, ValueError):
        return None
    return message.rank


def _connect(host: str, port: int, rank: int) -> Peer:
    """Connect to host 0 as soon as it listens."""
    logged_s = 0.0
    while True:
        try:
            peer = Peer(socket.create_connection((host, port), timeout=JOIN_S))
            peer.send(Join(rank, forge_jax.__version__))
        except OSError as error:
            if time.monotonic() - logged_s > LOG_S:
                logged_s = time.monotonic()
                log.info("waiting for host 0 at %s:%d (%s)", host, port, error)
            time.sleep(CONNECT_PAUSE_S)
        else:
            return peer


def _begin(peer: Peer) -> Begin:
    try:
        message = peer.receive()
    except OSError as error:
        raise EngineError(f"host 0 is lost: {error}") from error
    if isinstance(message, Reject):
        raise ConfigError(f"--coordinator: {message.message}")
    assert isinstance(message, Begin)
    return message


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        return server.getsockname()[1]
