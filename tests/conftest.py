"""Fixtures for all tests: paths, and the tests' own compilation cache."""

import gc
import inspect
import os
import signal
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from model_folders import with_layers

from forge_jax.engine.gc_tuning import short_pauses

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "tests"  # `make clean` removes it

# Neither types nor ranks promote implicitly, here and in the processes that tests start.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell starts background commands with SIGINT ignored, and their children inherit that. Ctrl-C
# would not reach the tested commands.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache():
    """Share compiled kernels and executables between test processes, and with the next run.

    Each entry's name is a hash of everything that determines its content, so a stale entry is never
    found. JAX writes entries in place. A process that reads a partial entry compiles it again, and
    pyproject.toml's filter allows the resulting warning.
    """
    executables = CACHE / "forge-jax" / "xla"
    executables.mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(executables))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(CACHE))
        yield


@pytest.fixture(scope="module", autouse=True)
def how_much_xla_optimizes(request: pytest.FixtureRequest):
    """Set XLA's effort for `quick_compile` and `full_compile` modules.

    Other modules compile as for users, or quickly in `make test`.
    """
    quick = request.node.get_closest_marker("quick_compile") is not None
    if not quick and request.node.get_closest_marker("full_compile") is None:
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quick)
    with pytest.MonkeyPatch.context() as patch:  # also in the processes that they start
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(quick)))
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session", autouse=True)
def collections_are_short():
    """Avoid the full collection of the first engine's start, which takes half a second here."""
    with short_pauses():
        yield


@pytest.fixture(scope="module", autouse=True)
def executables_are_let_go(request: pytest.FixtureRequest):
    """Drop a module's executables when it is done.

    An executable is mapped in 10 to 100 pieces, and Linux allows a process 65,530
    (`vm.max_map_count`). Beyond that the compiler crashes.
    """
    yield
    for _, kept in inspect.getmembers(request.module, lambda value: hasattr(value, "cache_clear")):
        if kept.__module__ == request.module.__name__:
            kept.cache_clear()
    jax.clear_caches()
    gc.collect()
    gc.freeze()  # the rest is permanent: modules and fixtures


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Record a test's figures; see `tests/figures.py`."""

    def note(table: str, row: str, column: str, value: str | float) -> None:
        value = value if isinstance(value, str) else float(value)
        record_property("figure", (table, row, column, value))

    return note


@pytest.fixture(scope="session")
def stories() -> Path:
    """Return a trained Llama of 260,000 parameters in Hugging Face format."""
    return FIXTURES / "stories260k-hf"


@pytest.fixture(scope="session")
def short_stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two of the five layers of `stories`, whose steps compile in half the time."""
    return with_layers(FIXTURES / "stories260k-hf", range(2), tmp_path_factory.mktemp("stories"))


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Return small random models, each with Hugging Face's own logits."""
    return FIXTURES / "goldens"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "make fuzz")
    group.addoption("--fuzz-cases", type=int, default=50_000, help="bodies to send, at least")
    group.addoption("--fuzz-seed", type=int, default=0, help="which bodies")
    group = parser.getgroup("chaos", "tests/serve/test_chaos.py")
    group.addoption("--chaos-seed", type=int, default=0, help="when engines die")
    group = parser.getgroup("kubernetes", "make test-kubernetes")
    group.addoption("--crds", metavar="FOLDER", help="definitions of custom resources, as YAML")


@pytest.fixture
def chaos_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed that determines when engines are killed: `--chaos-seed`."""
    return request.config.getoption("--chaos-seed")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `quick_cases` and `ci_cases` leave out, and start with long files.

    If a long file started last, the other processes would be idle.
    """
    for limit, left_out in (("quick_cases", pytest.mark.slow), ("ci_cases", pytest.mark.soak)):
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker(limit) is not None:
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for each in cases.values():
            mark = each[0].get_closest_marker(limit)
            assert mark is not None
            for item in spread_out(each, left=mark.args[0]):
                item.add_marker(left_out)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def spread_out[T](cases: list[T], *, left: int) -> list[T]:
    """Return all but `left` of the cases, which are evenly spaced and include the first."""
    kept = {round(i * len(cases) / left) for i in range(left)}
    return [case for i, case in enumerate(cases) if i not in kept]
