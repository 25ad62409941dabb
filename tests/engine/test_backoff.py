"""Pauses between launches of engine processes, on a test clock."""

import pytest

from forge_jax.engine.process.backoff import EARLY_S, FIRST_S, LONGEST_S, Backoff


class Lives:
    """Processes that die in sequence; each death returns the pause that follows."""

    def __init__(self):
        self.now_s = 0.0
        self.backoff = Backoff(lambda: self.now_s)

    def die(self, *, after_s: float = 1.0, useful: bool = False) -> float:
        self.backoff.begin()
        if useful:
            self.backoff.progress()
        self.now_s += after_s
        self.backoff.died()
        return self.backoff.pause_s


def test_pauses_double_with_each_early_death_up_to_the_limit():
    lives = Lives()
    pauses = [lives.die() for _ in range(100)]
    assert pauses[:5] == pytest.approx([FIRST_S * 2**n for n in range(5)])
    assert pauses == sorted(pauses) and set(pauses[5:]) == {LONGEST_S}


def test_failed_launches_and_early_deaths_share_a_count():
    lives = Lives()
    lives.die()
    lives.backoff.launch_failed()
    assert lives.backoff.pause_s == pytest.approx(2 * FIRST_S)
    assert lives.die() == pytest.approx(4 * FIRST_S)


@pytest.mark.parametrize("life", [{"useful": True}, {"after_s": EARLY_S}])
def test_process_that_served_is_replaced_at_once(life):
    lives = Lives()
    for _ in range(3):
        lives.die()
    assert lives.die(**life) == 0.0
    assert lives.die() == pytest.approx(FIRST_S)
