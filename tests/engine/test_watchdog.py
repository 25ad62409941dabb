"""The engine process's watchdog, on a test clock."""

import pytest

from forge_jax.engine.process.watchdog import LOOK_S, MAX_PATIENCE, Watchdog

TIMEOUT_S = 10.0


class Process:
    """A watched process; `live` advances the clock with the heartbeats that it would send."""

    def __init__(self, timeout_s: float = TIMEOUT_S):
        self.now_s = 0.0
        self.watchdog = Watchdog(timeout_s, lambda: self.now_s)

    def live(self, seconds: float, *, beats: bool = True, step_s: float = 0.0, allowance=1.0):
        """Return why it was found frozen, or None. `step_s`: how long its step has been running."""
        begin_s = self.now_s
        while self.now_s < begin_s + seconds:
            self.now_s += LOOK_S
            if beats:
                self.watchdog.beat(step_s + self.now_s - begin_s if step_s else 0.0)
            why = self.watchdog.look(allowance)
            if why is not None:
                return why
        return None


def test_silent_process_counts_as_frozen():
    process = Process()
    assert process.live(100) is None
    assert process.live(TIMEOUT_S - LOOK_S, beats=False) is None
    assert "has sent nothing for 10 s" in process.live(LOOK_S, beats=False)


def test_heartbeat_without_a_completed_step_does_not_count():
    process = Process()
    assert "has completed no step" in process.live(TIMEOUT_S + 5, step_s=0.1)
    assert process.now_s == pytest.approx(TIMEOUT_S, abs=2)


def test_any_number_of_completed_steps_is_healthy():
    process = Process()
    for _ in range(20):
        assert process.live(TIMEOUT_S - 1, step_s=0.1) is None


def test_time_while_the_host_was_suspended_is_not_counted():
    """The process was suspended too, so neither heartbeats nor steps could come."""
    process = Process()
    process.live(1, step_s=0.1)
    process.now_s += 3600
    process.watchdog.beat(3601.0)  # on the process's own clock
    assert process.watchdog.look() is None
    assert process.live(TIMEOUT_S / 2, step_s=3601) is None
    process.watchdog.progress()
    process.now_s += 3600
    assert process.watchdog.look() is None
    assert process.live(TIMEOUT_S / 2, beats=False) is None


def test_slow_step_survives_with_a_longer_timeout():
    process = Process()
    for patience in (1, 2, 4, MAX_PATIENCE, MAX_PATIENCE):
        begin_s = process.now_s
        assert "no step" in process.live(1000, step_s=0.1)
        assert process.now_s - begin_s == pytest.approx(patience * TIMEOUT_S, abs=2)
        process.watchdog.begin()
    process.watchdog.progress()
    begin_s = process.now_s
    process.live(1000, step_s=0.1)
    assert process.now_s - begin_s == pytest.approx(TIMEOUT_S, abs=2)


def test_allowance_expires():
    process = Process()
    assert process.live(3 * TIMEOUT_S, beats=False, allowance=4.0) is None
    assert process.live(LOOK_S, beats=False) is not None


def test_zero_timeout_disables_the_watchdog():
    process = Process(0.0)
    assert process.live(10_000, beats=False) is None
