"""Trials of grammars in a separate process with limits on time, memory and stack.

llguidance can take seconds and hundreds of megabytes for a grammar of a few kilobytes. It can also
overflow the stack, which ends the process. Therefore each grammar is tried in a probe first, and
then compiled with more stack by its user. Messages are framed as in the engine process.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any

import msgspec
import psutil

from forge_jax.errors import OverloadedError
from forge_jax.grammar.spec import GrammarSpec
from forge_jax.grammar.vocabulary import Vocabulary

START_S = 60.0  # longest start of the process
LOST_S = 20.0  # longest wait for an answer if the process gets no CPU time
LOOK_S = 0.05
MIB = 1 << 20


class ProbeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one compilation."""

    cpu_s: float = 0.5
    memory_bytes: int = 192 * MIB


DEFAULT_LIMITS = ProbeLimits()


class Probe:
    """A process that tries grammars. It is not thread-safe.

    It is started when it is first needed, and again after it has ended.
    """

    def __init__(self, vocabulary: Vocabulary, limits: ProbeLimits):
        self._vocabulary = vocabulary
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def complaint(self, spec: GrammarSpec) -> str | None:
        """Return why a grammar cannot be used, or None if it can.

        Raises:
          OverloadedError: the process cannot be started, or gets no CPU time.
        """
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        used_s = _cpu_s(process)
        try:
            write(process.stdin, spec)
            self._wait(process, lambda: (_cpu_s(process) or 0.0) - (used_s or 0.0))
            return read(process.stdout, Verdict).complaint
        except TimeoutError as error:
            self.close()
            if error.args:
                raise OverloadedError("no grammar can be compiled now: try again later") from None
            return "it takes too long to compile"
        except ValueError:  # another thread has closed the pipes
            self.close()
            raise OverloadedError("no grammar can be compiled now: try again later") from None
        except (OSError, EOFError):
            self.close()
            return "it needs too much memory to compile"

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "forge_jax.grammar.probe_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdin is not None and process.stdout is not None
            write(process.stdin, Hello(self._vocabulary, self._limits.memory_bytes))
            if not select.select([process.stdout], [], [], START_S)[0]:
                raise TimeoutError
            read(process.stdout, Verdict)
            return process
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            # ValueError: another thread has closed the pipes, because the engine stops.
            self.close()
            raise OverloadedError("grammars cannot be compiled now: try again later") from error

    def _wait(self, process: subprocess.Popen[bytes], cpu_s: Callable[[], float]) -> None:
        """Wait for an answer.

        Raises:
          TimeoutError: the process has used up its CPU time. The error has an argument if the
            process got too little CPU time to answer.
        """
        assert process.stdout is not None
        began_s = time.monotonic()
        while not select.select([process.stdout], [], [], LOOK_S)[0]:
            if cpu_s() > self._limits.cpu_s:
                raise TimeoutError
            if time.monotonic() - began_s > LOST_S:
                raise TimeoutError("lost")


class Hello(msgspec.Struct):
    vocabulary: Vocabulary
    memory_bytes: int


class Verdict(msgspec.Struct):
    complaint: str | None = None


def _cpu_s(process: subprocess.Popen[bytes]) -> float | None:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return None
    return times.user + times.system


def write(pipe: IO[bytes], message: Any) -> None:
    payload = msgspec.msgpack.encode(message)
    pipe.write(len(payload).to_bytes(4, "big") + payload)
    pipe.flush()


def read[T](pipe: IO[bytes], kind: type[T]) -> T:
    head = pipe.read(4)
    if len(head) < 4:
        raise EOFError
    return msgspec.msgpack.decode(pipe.read(int.from_bytes(head, "big")), type=kind)
