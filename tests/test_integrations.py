"""Adapters to projects that the tests' environment lacks. `make test-clients` runs them."""

import importlib
import importlib.util

import pytest


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("forge_jax.integrations.lm_eval", "lm_eval"),
        ("forge_jax.integrations.tunix", "google-tunix"),
        ("forge_serve.integrations.inspect", "inspect_ai"),
        ("forge_serve.integrations.ray", "ray"),
    ],
)
def test_missing_package_is_named_with_its_installation(module, package):
    if importlib.util.find_spec(package.removeprefix("google-")) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ImportError, match=f"pip install --upgrade '?{package}"):
        importlib.import_module(module)
