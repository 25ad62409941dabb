"""When Python's cycle collector runs in a process that serves.

A collection holds the interpreter lock: the engine thread and the event loop stand still. Python's
defaults look at new objects after every 700, which is several times in one step of 256 sequences,
and now and then at all objects there are. Most of these are jax's and the model's, a quarter of a
million that live as long as the process; looking at them takes 60 ms and more.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# A step makes about five objects a sequence and drops them again, so that what counts is what
# requests leave behind: a collection of so many objects takes less than a millisecond.
NEW_OBJECTS = 10_000

_lock = threading.Lock()
_engines = 0
_thresholds = (0, 0, 0)


@contextmanager
def short_pauses() -> Iterator[None]:
    """While an engine is ready: what exists now is not looked at, and new objects more rarely.

    Turns the collector on: a start leaves little garbage, and is faster without it. The settings
    are the process's. They come back with the end of the last engine.
    """
    _enter()
    try:
        yield
    finally:
        _exit()


def _enter() -> None:
    global _engines, _thresholds
    with _lock:
        _engines += 1
        if _engines > 1:
            return
        gc.collect()  # what is garbage now would be kept for ever
        gc.freeze()
        gc.enable()
        _thresholds = gc.get_threshold()
        gc.set_threshold(NEW_OBJECTS, *_thresholds[1:])


def _exit() -> None:
    global _engines
    with _lock:
        _engines -= 1
        if not _engines:
            gc.set_threshold(*_thresholds)
            gc.unfreeze()
