"""Settings of Python's cyclic garbage collector for a process that serves.

A collection holds the interpreter lock, which stops the engine thread and the event loop. Python's
defaults scan new objects after every 700 allocations, several times in one step of 256 sequences.
Occasionally they scan all objects. Most of these belong to JAX and the model: 250,000 objects that
live as long as the process. Scanning them takes 60 ms and more.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# A step creates about five objects per sequence and drops them again, so only objects that requests
# leave behind count. Collecting this many takes less than a millisecond.
NEW_OBJECTS = 10_000

_lock = threading.Lock()
_engines = 0
_thresholds = (0, 0, 0)


@contextmanager
def short_pauses() -> Iterator[None]:
    """Exempt existing objects from garbage collection, and scan new ones less often.

    The collector, which is off during the start, is turned on: a start leaves little garbage and is
    faster without it. The settings apply to the process and are restored when the last engine ends.
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
        gc.collect()  # objects that are garbage now would otherwise be kept forever
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
