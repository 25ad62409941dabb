"""Table of all routes, and labels for paths that are not in it.

Each protocol declares its part as the `ROUTES` of its endpoints. The application, its
authentication, `/openapi.json` and the labels of the metrics read this table, so an alias is the
same endpoint in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from re import Pattern
from typing import Any, ClassVar, Protocol

from aiohttp import hdrs, web
from aiohttp.abc import AbstractMatchInfo
from yarl import URL

from forge_jax.config import suggest
from forge_serve.anthropic.endpoints import MessagesEndpoints
from forge_serve.http.auth import PAGE_PATHS
from forge_serve.http.routes import Route
from forge_serve.openai.endpoints import OpenAIEndpoints
from forge_serve.responses_api.endpoints import ResponsesEndpoints
from forge_serve.server.endpoints import ServerEndpoints
from forge_serve.server.weight_sync.endpoints import WeightSyncEndpoints

# The routes of the page's static files are not in the table: see `Page.routes`.
ROUTES: tuple[Route, ...] = (
    *OpenAIEndpoints.ROUTES,
    *ResponsesEndpoints.ROUTES,
    *MessagesEndpoints.ROUTES,
    *WeightSyncEndpoints.ROUTES,
    *ServerEndpoints.ROUTES,
)


class Endpoints(Protocol):
    """Handlers with their part of the table."""

    ROUTES: ClassVar[tuple[Route, ...]]


_PATHS = frozenset(path for route in ROUTES for path in route.paths) | PAGE_PATHS
_PLAIN_PATHS = sorted(path for path in _PATHS if "{" not in path)  # without variables


def _beginnings(path: str) -> Iterator[str]:
    """Return the prefixes of a path that end before a `/` or a variable."""
    parts = path.partition("/{")[0].split("/")
    return ("/".join(parts[:end]) for end in range(2, len(parts) + 1))


_PREFIXES = frozenset(prefix for path in _PATHS for prefix in _beginnings(path))


def add_routes(app: web.Application, *endpoints: Endpoints) -> None:
    """Add the routes of all endpoints, and of their paths with a trailing slash."""
    for each in endpoints:
        for route in each.ROUTES:
            handler = getattr(each, route.handler)
            for path in route.paths:
                if route.method == hdrs.METH_GET:
                    app.router.add_get(path, handler)  # and HEAD
                else:
                    app.router.add_route(route.method, path, handler)
    app.router.register_resource(_TrailingSlash(app.router))


class _TrailingSlash(web.AbstractResource):
    """Resource that serves `/path/` as `/path`. It is the last one, so other resources win."""

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
        raise RuntimeError("a path with a trailing slash has no URL")

    def add_prefix(self, prefix: str) -> None:
        raise RuntimeError("a path with a trailing slash has no prefix")

    def get_info(self) -> Any:
        return {}

    def raw_match(self, path: str) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[web.AbstractRoute]:
        return iter(())


def label(http: web.Request) -> str:
    """Return the label of a request's path for logs and metrics, from a fixed set of names.

    The label of a known path is its route. The label of an unknown path is its longest prefix of a
    route, followed by `/*`: `/v1/v1/completions` is `/v1/*`.
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
    """Return the route that is most similar to an unknown path, if any is similar."""
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
