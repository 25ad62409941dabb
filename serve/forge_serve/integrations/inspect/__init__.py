"""The model provider `forge-jax` of Inspect, which finds this module by its entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inspect_ai.model import modelapi  # pyright: ignore[reportMissingImports]

if TYPE_CHECKING:
    from forge_serve.integrations.inspect.provider import ForgeAPI


@modelapi(name="forge-jax")
def forge_jax() -> type[ForgeAPI]:
    """Return the provider. Inspect imports entry points even if it uses another provider."""
    from forge_serve.integrations.inspect.provider import ForgeAPI

    return ForgeAPI
