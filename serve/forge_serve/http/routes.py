"""Entries of the route table. Each protocol's endpoints declare theirs with `get` and `post`."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import hdrs


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint.

    Attributes:
      method: the HTTP method.
      handler: the name of the handler, a method of the class whose `ROUTES` has this entry. The
        request log, traces and `/openapi.json` also use it, so it is unique in the whole table.
      path: the canonical path.
      aliases: other paths of the same endpoint.
    """

    method: str
    handler: str
    path: str
    aliases: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)


def get(handler: str, path: str, *aliases: str) -> Route:
    return Route(hdrs.METH_GET, handler, path, aliases)


def post(handler: str, path: str, *aliases: str) -> Route:
    return Route(hdrs.METH_POST, handler, path, aliases)


def delete(handler: str, path: str, *aliases: str) -> Route:
    return Route(hdrs.METH_DELETE, handler, path, aliases)
