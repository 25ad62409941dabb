"""Batch run: sends lines of the input to the engine and writes responses to the output.

The run keeps enough lines in progress to fill the engine. Responses come from the HTTP server's
functions (`operations`), so they equal the server's. They are written in the order of completion.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.contrib.logging import logging_redirect_tqdm

from forge_jax.config import EngineConfig
from forge_jax.errors import EngineError, OverloadedError, RequestError
from forge_jax.host import supervise
from forge_jax.host.exits import leave
from forge_serve.batch.config import BatchRunConfig
from forge_serve.batch.errors import LineError
from forge_serve.batch.files import Input, Output
from forge_serve.batch.formats import FORMS, Asked, Line
from forge_serve.batch.progress import Counts, Progress
from forge_serve.config import ServerConfig
from forge_serve.errors import BodyTooLargeError, error_reply
from forge_serve.limits import KIB, MIB
from forge_serve.openai import operations
from forge_serve.openai.embeddings import PoolingRequest
from forge_serve.server.process import load_engine, loop_factory
from forge_serve.server.service import Service

MIN_WAITING = 64  # lines in progress in addition to running ones
BYTES_IN_FLIGHT = 64 * MIB  # limit on lines in progress, except for a single line

ENVELOPE_BYTES = 64 * KIB  # allowance for a line's fields around its body
NEWS_INTERVAL_S = 0.02  # interval of the engine's updates
AGAIN_S = 0.2  # delay before a retry when the queue is full
ENGINE_IS_GONE = ("stopping", "stopped", "failed")

log = logging.getLogger(__name__)


def batch(engine_config: EngineConfig, server_config: ServerConfig, config: BatchRunConfig) -> int:
    """Run the lines of a batch file that are not done, and return the exit status.

    Raises:
      BatchFileError: a file is invalid. Written responses are kept.
      ConfigError: the configuration is invalid.
      ModelError: the model cannot be served.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    if not config.quiet:
        logging.getLogger("forge_serve.openai.ignored_fields").setLevel(logging.INFO)
    lines = Input(config.input, server_config.limits.body_bytes + ENVELOPE_BYTES)
    with Output(config.output, lines) as output:
        counts = Counts(lines.num_requests, output.num_found)
        if lines.num_requests == output.num_found:
            _say(config, counts.summary())
            return 0
        service = Service(server_config)
        engine = service.engine = load_engine(engine_config, server_config)
        signals: list[int] = []

        async def run() -> bool:
            """Return True if threads that cannot be stopped still compile executables."""
            engine.start()
            try:
                with _signals_cancel(signals):
                    await answer(service, lines, output, config, counts)
            except asyncio.CancelledError:
                if not signals:
                    raise
            finally:
                compiling = engine.stats().state == "serving"
                await engine.stop()
            return compiling

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            compiling = runner.run(run())
    _say(config, counts.summary())
    if signals:
        _say(config, "interrupted: run the same command again to resume")
    status = 128 + signals[0] if signals else 0
    if compiling:
        leave(status)
    return status


async def answer(
    service: Service, lines: Input, output: Output, config: BatchRunConfig, counts: Counts
) -> None:
    """Run every open line of the input on the service's engine, which must have been started.

    Raises:
      BatchFileError: a file is invalid.
      EngineError: the engine failed before all lines were done.
    """
    engine = service.engine
    assert engine is not None
    engine.news_interval_s = NEWS_INTERVAL_S
    counts.begin_s = time.monotonic()
    slots = engine.stats().num_slots
    window = _Window(config.in_flight or slots + max(slots, MIN_WAITING), BYTES_IN_FLIGHT)
    progress = Progress(counts, lambda: engine.stats().generation_tokens, quiet=config.quiet)
    refreshing = supervise.start_task(progress.keep_fresh(), "the progress bar", None)
    run = _Run(service, lines, output, window, progress, counts)
    try:
        with logging_redirect_tqdm():
            await run.answer_all()
    except ExceptionGroup as group:
        raise _first(group) from None
    finally:
        refreshing.cancel()
        progress.close()


class _Run:
    def __init__(
        self,
        service: Service,
        lines: Input,
        output: Output,
        window: _Window,
        progress: Progress,
        counts: Counts,
    ):
        self._service = service
        self._lines = lines
        self._line_format = lines.line_format
        self._output = output
        self._window = window
        self._progress = progress
        self._counts = counts

    async def answer_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for line in self._lines.open_lines():
                size = len(line.data or b"")
                await self._window.enter(size)
                tasks.create_task(self._answer(line)).add_done_callback(
                    lambda _, size=size: self._window.leave(size)
                )

    async def _answer(self, line: Line) -> None:
        try:
            asked = self._line_format.read(line)
            status, unique_id, body = await self._post(line, asked)
            answer = self._line_format.answer(line, status, unique_id, body)
        except LineError as error:
            status, answer = 400, self._line_format.refusal(line, error)
        self._output.write(answer)
        self._counts.answered += 1
        self._counts.errors += status != 200
        self._progress.line()

    async def _post(self, line: Line, asked: Asked) -> tuple[int, str, bytes]:
        """Return the status, request id and body of the response that a server would send."""
        unique_id = f"{line.number:09d}-{line.digest:016x}"
        try:
            limits = self._service.config.limits
            if len(asked.body) > limits.body_bytes:
                raise BodyTooLargeError
            request = operations.read(self._service, asked.body, asked.kind)
            unique_id = request.request_id or unique_id
            if request.streams:
                raise RequestError("stream is not supported in batches: omit it", param="stream")
            while True:
                try:
                    return 200, unique_id, await self._generate(request, unique_id)
                except OverloadedError:
                    # The engine's queue is full, so retry when another line is done.
                    await self._window.changed(AGAIN_S)
        except Exception as error:
            assert self._service.engine is not None
            if isinstance(error, EngineError):
                state = self._service.engine.stats().state
                if state in ENGINE_IS_GONE:
                    raise EngineError(f"the engine is {state}: not all lines are done") from error
            reply = error_reply(error)
            return reply.status, unique_id, reply.body()

    async def _generate(self, request: operations.Request, unique_id: str) -> bytes:
        service, cache_salt = self._service, request.cache_salt or ""
        if isinstance(request, PoolingRequest):
            generation = await operations.begin_pooling(
                service,
                request,
                unique_id=lambda: unique_id,
                cache_salt=cache_salt,
                lora=service.lora_of(request.model),
            )
            try:
                return await operations.pooled_response(service, request, generation)
            finally:
                generation.close()
        generation, serializer = await operations.begin(
            service,
            request,
            FORMS[type(request)],
            unique_id=lambda: unique_id,
            cache_salt=cache_salt,
            lora=service.lora_of(request.model),
        )
        try:
            return await operations.whole_response(generation, serializer)
        finally:
            generation.close()


class _Window:
    """Limit on the number and the bytes of the lines in progress."""

    def __init__(self, most: int, most_bytes: int):
        self._most, self._most_bytes = most, most_bytes
        self._number = self._bytes = 0
        self._left = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Wait until there is room for a line of `size` bytes."""
        while self._number and (
            self._number >= self._most or self._bytes + size > self._most_bytes
        ):
            await self._wait()
        self._number += 1
        self._bytes += size

    def leave(self, size: int) -> None:
        self._number -= 1
        self._bytes -= size
        self._left.set()

    async def changed(self, at_most_s: float) -> None:
        """Wait until a line is done, at most `at_most_s`."""
        try:
            async with asyncio.timeout(at_most_s):
                await self._wait()
        except TimeoutError:
            pass

    async def _wait(self) -> None:
        self._left.clear()
        await self._left.wait()


@contextmanager
def _signals_cancel(arrived: list[int]) -> Iterator[None]:
    """Make SIGINT and SIGTERM cancel this task, and record them in `arrived`."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel(number: int) -> None:
        arrived.append(number)
        task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, cancel, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _first(group: ExceptionGroup) -> Exception:
    """Return one of the errors that ended a run. Each of them would have ended it alone."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _say(config: BatchRunConfig, text: str) -> None:
    if not config.quiet:
        print(f"forge-jax: {text}", file=sys.stderr)
