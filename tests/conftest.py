"""Shared by all tests: where fixtures are, and a compilation cache of the tests' own."""

import gc
import inspect
import signal
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from forge_jax.core import EngineCore, Outputs
from forge_jax.schedule.plan import StepPlan

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path(__file__).parent.parent


# What a shell begins in the background has SIGINT ignored, and so has whatever that starts: Ctrl-C
# would be no signal to the commands that are tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Engines of one test run share their executables, and no run depends on an earlier one.

    The C++ kernels are shared by all processes of the run, XLA's executables by those that one
    process starts: JAX writes them in place, where another could read half of one.
    """
    cache = tmp_path_factory.mktemp("cache")
    if hasattr(request.config, "workerinput"):  # one of several processes
        kernels = tmp_path_factory.getbasetemp().parent / "kernels"
        kernels.mkdir(mode=0o700, exist_ok=True)
        (cache / "forge-jax").mkdir()
        (cache / "forge-jax" / "kernels").symlink_to(kernels)
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(cache))
    yield
    patch.undo()


@pytest.fixture(scope="module", autouse=True)
def the_compiler_is_quick(request: pytest.FixtureRequest):
    """XLA compiles as for everyone, but for modules that are marked `quick_compile`."""
    if request.node.get_closest_marker("quick_compile") is None:
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:  # and in the processes that they start
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def executables_are_let_go(request: pytest.FixtureRequest):
    """What a module compiled goes when it is done.

    An executable is mapped in 10 to 100 pieces, and Linux lets a process have 65,530
    (`vm.max_map_count`): where it gets no more, the compiler crashes.
    """
    yield
    for _, kept in inspect.getmembers(request.module, lambda value: hasattr(value, "cache_clear")):
        if kept.__module__ == request.module.__name__:
            kept.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def checks_of_fake_devices_are_not_recovered_from(monkeypatch: pytest.MonkeyPatch):
    """An engine survives any step that raises; here an assertion is what a test is there for."""
    recover = EngineCore._recover

    def recover_or_raise(self: EngineCore, plan: StepPlan, error: Exception) -> Outputs:
        if isinstance(error, AssertionError):
            raise error
        return recover(self, plan, error)

    monkeypatch.setattr(EngineCore, "_recover", recover_or_raise)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Notes what a test has found; see `tests/figures.py`."""

    def note(table: str, row: str, column: str, value: str | float) -> None:
        value = value if isinstance(value, str) else float(value)
        record_property("figure", (table, row, column, value))

    return note


@pytest.fixture(scope="session")
def stories() -> Path:
    """A trained Llama of 260,000 parameters in Hugging Face form."""
    return FIXTURES / "stories260k-hf"


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Small random models, each with Hugging Face's own logits."""
    return FIXTURES / "goldens"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "make fuzz")
    group.addoption("--fuzz-cases", type=int, default=50_000, help="bodies to send, at least")
    group.addoption("--fuzz-seed", type=int, default=0, help="which bodies")
    group = parser.getgroup("chaos", "tests/serve/test_chaos.py")
    group.addoption("--chaos-seed", type=int, default=0, help="when engines die")


@pytest.fixture
def chaos_seed(request: pytest.FixtureRequest) -> int:
    """Decides when engines are killed: `--chaos-seed`."""
    return request.config.getoption("--chaos-seed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of long tests begin first: one that began last would leave the other processes idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
