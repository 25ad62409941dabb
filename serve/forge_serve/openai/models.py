"""The objects of /v1/models: the served model, and its LoRA adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_serve.openai import loras

if TYPE_CHECKING:
    from forge_jax.engine.adapters import LoadedAdapter
    from forge_serve.server.service import Service


def model_cards(service: Service) -> dict[str, dict[str, Any]]:
    """Return everything that a request can name as its model, by name; the model itself is first.

    Raises:
      NotReadyError: the server is starting or stopping.
    """
    engine = service.ready_engine()
    card = {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "forge-jax",
        "root": engine.name,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }
    adapters = {each.name: _adapter_card(service, card, each) for each in engine.loras}
    return {service.model_name: card, **adapters}


def _adapter_card(service: Service, card: dict[str, Any], adapter: LoadedAdapter) -> dict[str, Any]:
    root = loras.shown_path(adapter.path, service.config.lora_folder)
    return {**card, "id": adapter.name, "root": root, "parent": service.model_name}
