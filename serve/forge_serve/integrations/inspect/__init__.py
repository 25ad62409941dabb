"""The model provider `forge-jax` of Inspect, which finds this module by its entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

_REMEDY = (
    "forge_serve.integrations.inspect requires a recent version of Inspect ({error}): run "
    "pip install --upgrade inspect_ai"
)

try:
    from inspect_ai.model import modelapi  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(_REMEDY.format(error=error)) from error

if TYPE_CHECKING:
    from forge_serve.integrations.inspect.provider import ForgeAPI


@modelapi(name="forge-jax")
def forge_jax() -> type[ForgeAPI]:
    """Return the provider. Inspect imports entry points even if it uses another provider."""
    try:
        from forge_serve.integrations.inspect.provider import ForgeAPI
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "inspect_ai":
            raise
        raise ImportError(_REMEDY.format(error=error)) from error
    return ForgeAPI
