import gc

import pytest

from forge_jax import Engine
from forge_jax.engine import gc_tuning as garbage
from forge_jax.engine.gc_tuning import NEW_OBJECTS, short_pauses


@pytest.fixture(autouse=True)
def the_tests_are_no_engine():
    """Restore normal pauses, which tests shorten for the whole session."""
    garbage._exit()
    yield
    garbage._enter()


def test_last_engine_restores_the_collectors_settings():
    before = gc.get_threshold()
    assert before[0] < NEW_OBJECTS
    with short_pauses():
        with short_pauses():
            assert gc.get_threshold()[0] == NEW_OBJECTS
        assert gc.get_threshold()[0] == NEW_OBJECTS
        assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


async def test_running_engine_changes_the_collectors_settings():
    before = gc.get_threshold()
    engine = Engine.fake()
    engine.start()
    async for _ in engine.generate([1]):
        assert gc.get_threshold()[0] == NEW_OBJECTS
    await engine.stop()
    assert gc.get_threshold() == before
