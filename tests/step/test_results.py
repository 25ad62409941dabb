"""Copies of results to the host."""

import numpy as np
import pytest

from forge_jax.step import results


class Array:
    """An array that records its calls."""

    def __init__(self, platform, log, error=None):
        self._platform, self._log, self._error = platform, log, error

    def platform(self):
        return self._platform

    def copy_to_host_async(self):
        self._log.append("begin")

    def __array__(self, dtype=None, copy=None):
        self._log.append("wait")
        if self._error is not None:
            raise self._error
        return np.zeros(1)


@pytest.fixture
def latest(monkeypatch):
    monkeypatch.setattr(results, "_latest", results.deque(maxlen=8))
    return results._latest


def test_process_waits_at_its_end_for_copies_that_have_begun(latest):
    log = []
    results.begin_copy(Array("gpu", log, RuntimeError("the step has failed")))
    results.begin_copy(Array("gpu", log))
    assert log == ["begin"] * 2
    results._finish_copies()
    assert log == ["begin"] * 2 + ["wait"] * 2 and not latest


def test_arrays_on_a_cpu_are_neither_copied_nor_awaited(latest):
    log = []
    results.begin_copy(Array("cpu", log))
    results._finish_copies()
    assert not log and not latest
