"""Supervised tasks, threads and callbacks, which cannot fail silently.

An exception that no caller receives is logged with its traceback and passed to `on_error`. The
handler turns it into a state ("failed") or into the error of the operation. All background work of
the engine and the server is started here, which a test checks.
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
      name: a description of the work, as the subject of a log line.
      on_error: called on the event loop with an exception that ended the task, but not for a
        cancellation. None if the log is enough, or the task is awaited.
      expected: exceptions that the awaiter handles. They are not logged, and `on_error` is not
        called.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    watch(task, name, on_error, expected=expected)
    return task


def start_thread(target: Callable[[], None], name: str, on_error: OnError) -> threading.Thread:
    """Start a daemon thread, which calls `on_error` with any exception that ends it."""

    def run() -> None:
        try:
            target()
        except BaseException as error:
            _report(name, error, on_error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def in_thread[T](function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run a function in a daemon thread, and return a future for its result.

    The thread does not keep the process alive. If the event loop is closed when the function ends,
    an exception is only logged.
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
    """Wrap a callback whose caller, such as an event loop or a future, cannot handle exceptions.

    Args:
      name: a description of the work, as the subject of a log line.
      on_error: called in the same thread with any exception; None if the log is enough.
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
    """Report the exception of a future that may not be awaited, as `start_task` does."""

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
                log.exception("%s: the error handler failed", name)


def _log(name: str, error: BaseException) -> None:
    log.error("%s failed: %s: %s", name, type(error).__name__, error, exc_info=error)
