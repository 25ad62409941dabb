"""HTTP application: the endpoints of every protocol behind shared middlewares.

No handler blocks the engine. A slow client delays only its own response, which is aborted after
`Timeouts.write_stall_s`.
"""

from __future__ import annotations

from aiohttp import web

from forge_serve.anthropic.endpoints import MessagesEndpoints
from forge_serve.http.bodies import BodyReader
from forge_serve.http.browsers import BrowserGuard
from forge_serve.http.connections import only_chunked
from forge_serve.http.cors import Cors
from forge_serve.http.request_logs import RequestLogs
from forge_serve.openai.endpoints import OpenAIEndpoints
from forge_serve.openai.handler import GenerationHandler
from forge_serve.openai.validation import SMALL_BODY_BYTES
from forge_serve.responses_api.endpoints import ResponsesEndpoints
from forge_serve.server import envelope, page, routes
from forge_serve.server.endpoints import ServerEndpoints
from forge_serve.server.envelope import Envelope
from forge_serve.server.service import Service
from forge_serve.server.weight_sync.endpoints import WeightSyncEndpoints


def make_app(service: Service) -> web.Application:
    """Return the application.

    Run it with `handler_cancellation=True`, so that a disconnected client's request is aborted.
    """
    config = service.config
    logs = RequestLogs(
        service.metrics, lambda: service.tracing, routes.label, enabled=config.request_log
    )
    bodies = BodyReader(
        service.workers.bodies,
        max_bytes=config.limits.body_bytes,
        inline_bytes=SMALL_BODY_BYTES,
        timeout_s=service.timeouts.body_s,
    )
    handler = GenerationHandler(service, bodies)
    cors = Cors(config.cors_origin)
    app = web.Application(
        middlewares=[
            Envelope(service, logs).middleware,
            only_chunked,
            BrowserGuard(config, has_keys=bool(service.api_keys)).middleware,
            cors.middleware,
            service.api_keys.middleware,
        ],
        client_max_size=config.limits.body_bytes,
    )
    app.on_response_prepare.append(envelope.add_headers)
    app.on_response_prepare.append(cors.add_headers)
    routes.add_routes(
        app,
        OpenAIEndpoints(handler),
        ResponsesEndpoints(handler, logs),
        MessagesEndpoints(handler),
        WeightSyncEndpoints(service, bodies),
        ServerEndpoints(service),
    )
    app.add_routes(page.routes())
    return app
