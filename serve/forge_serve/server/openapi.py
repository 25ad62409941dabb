"""`/openapi.json`: the operations of all endpoints.

A test fails for a route without an operation and for an operation without a route.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from forge_serve.anthropic import openapi as anthropic
from forge_serve.errors import ErrorAnswer
from forge_serve.http.auth import API_KEY_HEADER, OPEN_PATHS
from forge_serve.openai import openapi as openai
from forge_serve.openapi.document import make_document
from forge_serve.openapi.operation import NOT_READY, WHOLE, Operation, Parameter
from forge_serve.openapi.schema import About
from forge_serve.responses_api import openapi as responses_api
from forge_serve.server.weight_sync import openapi as weight_sync
from forge_serve.telemetry import info
from forge_serve.telemetry.engine_view import EngineStateAnswer
from forge_serve.telemetry.metrics import CONTENT_TYPE as METRICS_TYPE

OPERATIONS = {
    **openai.OPERATIONS,
    **anthropic.OPERATIONS,
    **responses_api.OPERATIONS,
    **weight_sync.OPERATIONS,
    "version": Operation(summary="Get the version of forge-jax", answer=info.Version),
    "server_info": Operation(
        summary="Get the server's capacity and load", answer=info.ServerInfo, errors=NOT_READY
    ),
    "model_info": Operation(
        summary="Get the description of the model", answer=info.ModelInfo, errors=NOT_READY
    ),
    "loads": Operation(summary="Get the current load", answer=info.Loads, errors=NOT_READY),
    "ollama_tags": Operation(
        summary="List the models in Ollama's format", answer=info.OllamaTags, errors=NOT_READY
    ),
    "ollama_version": Operation(summary="Get the version of forge-jax", answer=info.Version),
    "ping": Operation(
        summary="Check if the server serves requests", content_type=None, also=(503,)
    ),
    "load": Operation(
        summary="Get the number of running and waiting samples",
        answer=info.Load,
        errors=NOT_READY,
    ),
    "health": Operation(
        summary="Check if the server serves requests", answer=info.Health, also=(503,)
    ),
    "detailed_health": Operation(
        summary="Check the health of the server and the size of its queue",
        answer=info.DetailedHealth,
        also=(503,),
    ),
    "stats": Operation(
        summary="Get the engine's counters", late_answer=info.stats_type, errors=NOT_READY
    ),
    "engine_state": Operation(
        summary="Get the sequences, the KV cache blocks and the recent steps of the engine",
        answer=EngineStateAnswer,
        errors=(400, *NOT_READY),
        parameters=(Parameter("after_step", "query", WHOLE, "return only news since this step"),),
    ),
    "metrics": Operation(summary="Get Prometheus metrics", content_type=METRICS_TYPE),
    "start_profile": Operation(
        summary="Start a profile", answer=info.Profile, errors=(400, 404, *NOT_READY)
    ),
    "stop_profile": Operation(
        summary="Stop the profile and write it",
        answer=info.Profile,
        errors=(400, 404, *NOT_READY),
    ),
    "page": Operation(
        summary="Get the page with the chat and the live view", content_type="text/html"
    ),
    "page_style": Operation(summary="Get a style sheet of the page", content_type="text/css"),
    "page_script": Operation(summary="Get a script of the page", content_type="text/javascript"),
    "page_icon": Operation(summary="Get the page's icons", content_type="image/svg+xml"),
    "page_font": Operation(summary="Get a font of the page", content_type="font/woff2"),
    "openapi": Operation(summary="Get this document", answer=dict[str, Any], errors=NOT_READY),
}


def document(router: web.UrlDispatcher, about: About) -> dict[str, Any]:
    """Return the document of an application with these routes.

    Raises:
      KeyError: a route's handler is not in `OPERATIONS`.
    """
    return make_document(
        router,
        OPERATIONS,
        about,
        error=ErrorAnswer,
        open_paths=OPEN_PATHS,
        key_header=API_KEY_HEADER,
    )
