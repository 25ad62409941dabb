"""Tasks, threads and callbacks that nobody awaits, started so that they cannot fail in silence.

An exception that has no reader is logged with its traceback and passed to `on_error`, which turns
it into a state ("failed") or into the error of the operation. Everything in the engine and the
server that runs by itself is started here; a test holds that.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

type OnError = Callable[[BaseException], None]
type Expected = tuple[type[BaseException], ...]

log = logging.getLogger(__name__)

_tasks: set[asyncio.Task[Any]] = set()  # an event loop holds its tasks weakly


def start_task[T](
    coroutine: Coroutine[Any, Any, T],
    name: str,
    on_error: OnError | None,
    *,
    expected: Expected = (),
) -> asyncio.Task[T]:
    """Start a task on the running event loop.

    Args:
      name: of the work, as the subject of a log line.
      on_error: called on the event loop with an exception that ended the task; not for a
        cancellation. None: awaiting the task is the only way to learn of it, besides the log.
      expected: exceptions that are an outcome of the operation, which its awaiter handles. They are
        not logged, and `on_error` is not called.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    watch(task, name, on_error, expected=expected)
    return task


def start_thread(target: Callable[[], None], name: str, on_error: OnError) -> threading.Thread:
    """Start a daemon thread. `on_error` is called in it with any exception that ends it."""

    def run() -> None:
        try:
            target()
        except BaseException as error:
            _report(name, error, on_error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def in_thread[T](function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run a function in a daemon thread, which does not keep the process alive; await the result.

    If the event loop has been closed by the end of the function, an exception is only logged.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            if error is not None:
                _log(name, error)
        elif error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop has been closed
            if error is not None:
                _log(name, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def guarded[**P](
    function: Callable[P, None], name: str, on_error: OnError | None
) -> Callable[P, None]:
    """Wrap a callback whose caller cannot handle an exception: an event loop, a future.

    Args:
      on_error: called in the same thread with any exception. None: the log is enough.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            _report(name, error, on_error)

    return run


def watch(
    future: asyncio.Future[Any] | Future[Any],
    name: str,
    on_error: OnError | None = None,
    *,
    expected: Expected = (),
) -> None:
    """Report the exception of a future that may lose its readers. Arguments as in `start_task`."""

    def done(future: asyncio.Future[Any] | Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, expected):
            _report(name, error, on_error)

    future.add_done_callback(done)


def _report(name: str, error: BaseException, on_error: OnError | None) -> None:
    try:
        _log(name, error)
    finally:
        if on_error is not None:
            try:
                on_error(error)
            except Exception:
                log.exception("%s: its failure could not be handled", name)


def _log(name: str, error: BaseException) -> None:
    log.error("%s failed: %s: %s", name, type(error).__name__, error, exc_info=error)
