"""The C++ kernels, built once for all tests."""

import pytest

from forge_kernels import cpu


@pytest.fixture(scope="session")
def cpu_kernels(compilation_cache) -> str:
    """Return the instruction set that the kernels of this process use."""
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    return cpu.load()
