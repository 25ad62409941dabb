"""The table of routes: methods, paths and handlers. Also names for paths that are not in it.

The application, its authentication, `/openapi.json` and the labels of the metrics read this table,
so an alias is the same endpoint in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from re import Pattern
from typing import Any

from aiohttp import hdrs, web
from aiohttp.abc import AbstractMatchInfo
from yarl import URL

from forge_jax.config import suggest
from forge_serve.anthropic import messages
from forge_serve.http.auth import PAGE_PATHS
from forge_serve.responses_api.endpoints import RESPONSE_PATH
from forge_serve.responses_api.requests import PATH as RESPONSES


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint: its method, its handler's name and its paths, of which the first is its own."""

    method: str
    handler: str
    path: str
    aliases: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)


def _get(handler: str, path: str, *aliases: str) -> Route:
    return Route(hdrs.METH_GET, handler, path, aliases)


def _post(handler: str, path: str, *aliases: str) -> Route:
    return Route(hdrs.METH_POST, handler, path, aliases)


# The page's static files are its own routes (`Page.routes`).
ROUTES = (
    _post("completions", "/v1/completions", "/completions"),
    _post("chat_completions", "/v1/chat/completions", "/chat/completions"),
    _post("responses", RESPONSES),
    _get("responses_socket", RESPONSES),  # a WebSocket
    _post("count_input_tokens", f"{RESPONSES}/input_tokens"),
    _post("compact_response", f"{RESPONSES}/compact"),
    _get("response", RESPONSE_PATH),
    Route(hdrs.METH_DELETE, "delete_response", RESPONSE_PATH),
    _post("cancel_response", f"{RESPONSE_PATH}/cancel"),
    _get("input_items", f"{RESPONSE_PATH}/input_items"),
    _post("messages", messages.PATH),
    _post("count_tokens", f"{messages.PATH}/count_tokens"),
    _post("embeddings", "/v1/embeddings", "/embeddings"),
    _post("score", "/v1/score", "/score"),
    _post("rerank", "/v1/rerank", "/rerank"),
    _post("invocations", "/invocations"),
    _post("generate", "/generate", "/v1/generate"),
    _get("models", "/v1/models", "/models"),
    _get("model", "/v1/models/{name:.*[^/]}", "/models/{name:.*[^/]}"),
    _post("load_lora_adapter", "/v1/load_lora_adapter"),
    _post("unload_lora_adapter", "/v1/unload_lora_adapter"),
    _post("tokenize", "/tokenize", "/v1/tokenize"),
    _post("detokenize", "/detokenize", "/v1/detokenize"),
    _get("tokenizer_info", "/tokenizer_info"),
    _get("server_info", "/server_info", "/get_server_info"),
    _get("model_info", "/model_info", "/get_model_info"),
    _get("loads", "/v1/loads"),
    _get("ollama_tags", "/api/tags"),
    _get("ollama_version", "/api/version"),
    _get("ping", "/ping"),
    _post("ping", "/ping"),
    _get("version", "/version"),
    _get("load", "/load"),
    _get("health", "/health", "/healthz"),
    _get("detailed_health", "/forge/v1/health"),
    _get("stats", "/stats"),
    _get("engine_state", "/engine_state"),
    _get("metrics", "/metrics"),
    _get("openapi", "/openapi.json"),
    _post("start_profile", "/start_profile"),
    _post("stop_profile", "/stop_profile"),
)


_PATHS = frozenset(path for route in ROUTES for path in route.paths) | PAGE_PATHS
_PLAIN_PATHS = sorted(path for path in _PATHS if "{" not in path)  # without variables


def _beginnings(path: str) -> Iterator[str]:
    """Every beginning of a path that ends before a `/` or a variable."""
    parts = path.partition("/{")[0].split("/")
    return ("/".join(parts[:end]) for end in range(2, len(parts) + 1))


_PREFIXES = frozenset(prefix for path in _PATHS for prefix in _beginnings(path))


def add_routes(app: web.Application, *owners: object) -> None:
    """Adds every route of the table, each with the method of that name of one of the owners."""
    for route in ROUTES:
        owner = next(each for each in owners if hasattr(each, route.handler))
        handler = getattr(owner, route.handler)
        for path in route.paths:
            if route.method == hdrs.METH_GET:
                app.router.add_get(path, handler)  # and HEAD
            else:
                app.router.add_route(route.method, path, handler)
    app.router.register_resource(_TrailingSlash(app.router))


class _TrailingSlash(web.AbstractResource):
    """Serves `/path/` as `/path`. It is asked last, when no other resource has the path."""

    def __init__(self, router: web.UrlDispatcher):
        super().__init__()
        self._router = router

    @property
    def canonical(self) -> str:
        return "/"

    async def resolve(self, request: web.Request) -> tuple[Any, set[str]]:
        path = request.rel_url.raw_path
        if len(path) < 2 or not path.endswith("/") or path.endswith("//"):
            return None, set()
        url = URL.build(path=path[:-1], encoded=True)
        match = await self._router.resolve(request.clone(rel_url=url))
        if match.http_exception is None:
            return match, set()
        return None, _allowed_methods(match)

    def url_for(self, **kwargs: str) -> URL:
        raise RuntimeError("a path with a trailing slash has no URL of its own")

    def add_prefix(self, prefix: str) -> None:
        raise RuntimeError("a path with a trailing slash has no prefix of its own")

    def get_info(self) -> Any:
        return {}

    def raw_match(self, path: str) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[web.AbstractRoute]:
        return iter(())


def label(http: web.Request) -> str:
    """The path of a request as the log and the metrics name it: one of a fixed set of names.

    A known path is its route's. An unknown one is its longest beginning that a route has, with `/*`
    behind it: `/v1/v1/completions` is `/v1/*`.
    """
    resource = http.match_info.route.resource
    if resource is not None:
        return resource.canonical
    if _allowed_methods(http.match_info):  # a known path
        found = _canonical(http.app.router, http.path.rstrip("/") or "/")
        if found is not None:
            return found
    known = [prefix for prefix in _beginnings(http.path[:256]) if prefix in _PREFIXES]
    return f"{known[-1]}/*" if known else "/*"


def nearest(http: web.Request) -> str | None:
    """The route that an unknown path looks most like, if it looks like one."""
    return suggest.nearest(http.path, _PLAIN_PATHS)


def _allowed_methods(match: AbstractMatchInfo) -> set[str]:
    error = match.http_exception
    return set(error.allowed_methods) if isinstance(error, web.HTTPMethodNotAllowed) else set()


def _canonical(router: web.UrlDispatcher, path: str) -> str | None:
    for resource in router.resources():
        info = resource.get_info()
        pattern: Pattern[str] | None = info.get("pattern")
        if info.get("path") == path or (pattern is not None and pattern.fullmatch(path)):
            return resource.canonical
    return None
