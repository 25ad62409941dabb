"""The objects of /v1/models: the served model and its LoRA adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_serve.openai import loras
from forge_serve.openai.response_types import ModelCard

if TYPE_CHECKING:
    from forge_serve.server.service import Service


def model_cards(service: Service) -> dict[str, ModelCard]:
    """Return all values of a request's `model` field, by name. The base model is first.

    Raises:
      NotReadyError: the server is starting or stopping.
    """
    engine = service.ready_engine()

    def card(name: str, root: str, parent: str | None = None) -> ModelCard:
        card = ModelCard(
            id=name, created=service.created_s, root=root, max_model_len=engine.max_model_len
        )
        card.parent = parent
        return card

    model = service.model_name
    cards = {model: card(model, engine.name)}
    for adapter in engine.loras:  # an adapter must not replace the base model's entry
        root = loras.shown_path(adapter.path, service.config.lora_folder)
        cards.setdefault(adapter.name, card(adapter.name, root, model))
    return cards
