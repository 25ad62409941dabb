"""`/openapi.json` of this server: the operations of all its endpoints.

A test fails for a route without an operation, and for an operation without a route.
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
from forge_serve.telemetry import info
from forge_serve.telemetry.engine_view import EngineStateAnswer
from forge_serve.telemetry.metrics import CONTENT_TYPE as METRICS_TYPE

OPERATIONS = {
    **openai.OPERATIONS,
    **anthropic.OPERATIONS,
    **responses_api.OPERATIONS,
    "version": Operation(summary="The version of forge-jax", answer=info.Version),
    "server_info": Operation(
        summary="What the server can hold and does", answer=info.ServerInfo, errors=NOT_READY
    ),
    "model_info": Operation(summary="What the model is", answer=info.ModelInfo, errors=NOT_READY),
    "loads": Operation(summary="How much there is to do", answer=info.Loads, errors=NOT_READY),
    "ollama_tags": Operation(
        summary="The models, in Ollama's words", answer=info.OllamaTags, errors=NOT_READY
    ),
    "ollama_version": Operation(summary="The version of forge-jax", answer=info.Version),
    "ping": Operation(summary="Whether requests are served", content_type=None, also=(503,)),
    "load": Operation(summary="How many samples run or wait", answer=info.Load, errors=NOT_READY),
    "health": Operation(summary="Whether requests are served", answer=info.Health, also=(503,)),
    "detailed_health": Operation(
        summary="The same with the size of the queue", answer=info.DetailedHealth, also=(503,)
    ),
    "stats": Operation(
        summary="The engine's counters", late_answer=info.stats_type, errors=NOT_READY
    ),
    "engine_state": Operation(
        summary="The sequences, the KV blocks and the last steps of the engine",
        answer=EngineStateAnswer,
        errors=(400, *NOT_READY),
        parameters=(Parameter("after_step", "query", WHOLE, "only the steps after that one"),),
    ),
    "metrics": Operation(summary="Prometheus metrics", content_type=METRICS_TYPE),
    "start_profile": Operation(
        summary="Begin a profile", answer=info.Profile, errors=(400, 404, *NOT_READY)
    ),
    "stop_profile": Operation(
        summary="End the profile and write it",
        answer=info.Profile,
        errors=(400, 404, *NOT_READY),
    ),
    "page": Operation(summary="The page: a chat and the live engine", content_type="text/html"),
    "page_style": Operation(summary="A style sheet of the page", content_type="text/css"),
    "page_script": Operation(summary="A script of the page", content_type="text/javascript"),
    "page_icon": Operation(summary="The page's icon", content_type="image/svg+xml"),
    "openapi": Operation(summary="This document", answer=dict[str, Any], errors=NOT_READY),
}


def document(router: web.UrlDispatcher, about: About) -> dict[str, Any]:
    """The document of an application with these routes.

    Raises:
      KeyError: a route's handler has no line in `OPERATIONS`.
    """
    return make_document(
        router,
        OPERATIONS,
        about,
        error=ErrorAnswer,
        open_paths=OPEN_PATHS,
        key_header=API_KEY_HEADER,
    )
