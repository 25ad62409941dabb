"""`BackgroundCompile`: the activated executables, their order, and the ones left out."""

from __future__ import annotations

import threading
from functools import partial

import jax.numpy as jnp
import pytest

from forge_jax.step.executables import BackgroundCompile, Executables


class Late:
    """Executables that compile once `arrive` is called, and the names of the active ones."""

    def __init__(self, *names: str, memory_limit: int | None = None, fails: bool = False):
        self.background = BackgroundCompile()
        self.active: list[str] = []
        self._arrived = threading.Event()
        self._fails = fails
        executables = Executables()
        for name in names:
            executables.add(name, self._compute)
        executables.close()
        self.background.add(
            executables,
            {name: partial(self.activate, name) for name in names},
            memory_limit=memory_limit,
            remedy="--a-flag",
        )

    def _compute(self):
        assert self._arrived.wait(60) and not self._fails
        return jnp.zeros(4)

    def activate(self, name: str) -> None:
        self.active.append(name)

    def arrive(self) -> None:
        self._arrived.set()


def test_executables_are_activated_in_order_once_compiled():
    late, notified = Late("a", "b"), threading.Semaphore(0)
    seen: list[bool] = []
    late.background.after_activation(lambda: seen.append(late.background.complete))
    late.background.on_compiled(notified.release)
    assert not late.background.activate() and late.active == []
    late.arrive()
    assert all(notified.acquire(timeout=60) for _ in range(2))
    assert late.background.activate() and late.active == ["a", "b"]
    assert seen == [False, True]
    assert late.background.activate() and late.active == ["a", "b"]


def test_several_owners_share_one_background_compile():
    late, other = Late("a"), Executables()
    other.add("b", lambda: jnp.zeros(4))
    late.background.add(other, {"b": partial(late.activate, "b")})
    other.wait("b")
    assert not late.background.activate() and late.active == ["b"]
    late.arrive()
    late.background.finish()
    assert late.background.complete and late.active == ["b", "a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fails": True}, "a could not be compiled and is not used"),
        ({"memory_limit": 0}, "GiB are available: it is not used. Lower --a-flag"),
    ],
)
def test_unusable_executables_are_logged_and_left_out(options, message, caplog):
    late = Late("a", **options)
    late.arrive()
    late.background.finish()
    assert late.background.complete and late.active == []
    assert message in caplog.text


def test_cancelling_during_an_activation_drops_the_rest():
    """A stopping server cancels in the event loop while the engine thread activates."""
    background, executables, active = BackgroundCompile(), Executables(), []

    def activate(name: str) -> None:
        active.append(name)
        background.cancel()

    for name in ("a", "b"):
        executables.add(name, lambda: jnp.zeros(4))
    background.add(executables, {name: partial(activate, name) for name in ("a", "b")})
    background.finish()
    assert background.complete and active == ["a"]
