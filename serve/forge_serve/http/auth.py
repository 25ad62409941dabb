"""Authentication by API keys, sent as bearer tokens. Each key is a tenant.

Every path requires a key, except `OPEN_PATHS`. The server stores only digests, so that no log or
error can contain a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from aiohttp import hdrs, web

from forge_jax.errors import ConfigError
from forge_serve.config import ServerConfig, check_api_key
from forge_serve.errors import UnauthorizedError
from forge_serve.http.page_files import PAGE_PATHS

HEALTH_PATHS = frozenset(("/health", "/healthz"))
OPEN_PATHS = HEALTH_PATHS | PAGE_PATHS  # canonical paths of routes

API_KEY_HEADER = "X-Api-Key"  # used by Anthropic's and other clients
TENANT = web.RequestKey("tenant", str)  # not set without API keys

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiKeys:
    """Set of accepted keys. If it is empty, every client is accepted."""

    def __init__(self, keys: Iterable[str] = ()):
        self._known = [(_digest(key), _tenant(key)) for key in dict.fromkeys(keys)]

    @classmethod
    def of(cls, config: ServerConfig) -> ApiKeys:
        """Return the keys of the flags and of the file.

        Raises:
          ConfigError: the file cannot be read, or has no valid key.
        """
        keys = list(config.api_key)
        if config.api_key_file is not None:
            keys += read_keys(config.api_key_file)
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def tenants(self) -> list[str]:
        """Tenants of the keys, in the order of the keys."""
        return [tenant for _, tenant in self._known]

    def tenant(self, key: str) -> str | None:
        """Return a key's tenant as 32 hex digits, or None if the key is unknown.

        The time does not depend on which key it is, or if it is known.
        """
        digest, found = _digest(key), None
        for known, tenant in self._known:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Reject every request without a known key, except for `OPEN_PATHS`."""
        if self._known and not _is_open(request):
            request[TENANT] = self._authenticated(request)
        return await handler(request)

    def _authenticated(self, http: web.Request) -> str:
        given = http.headers.getall(hdrs.AUTHORIZATION, [])
        if not given:  # Authorization takes precedence over a header that a gateway adds
            given = [f"Bearer {key}" for key in http.headers.getall(API_KEY_HEADER, [])]
        if not given:
            raise UnauthorizedError(
                f"an API key is required: send it as a bearer token or as {API_KEY_HEADER}"
            )
        scheme, _, key = given[0].partition(" ")
        tenant = self.tenant(key.strip())
        if tenant is None or len(given) > 1 or scheme.lower() != "bearer":
            raise UnauthorizedError("the API key is not valid")
        return tenant


def tenant_salt(http: web.Request, cache_salt: str | None) -> str:
    """Return the salt of a request's cached prefixes: its tenant, then the client's salt.

    All tenants' names have the same length, so the salts of two tenants always differ.
    """
    return http.get(TENANT, "") + (cache_salt or "")


def _is_open(http: web.Request) -> bool:
    resource = http.match_info.route.resource
    return resource is not None and resource.canonical in OPEN_PATHS


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _tenant(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"forge-tenant").hexdigest()


def read_keys(path: str) -> list[str]:
    """Return a file's keys, one per line. Empty lines and lines that start with "#" are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file: {path} is not a text file") from error
    except OSError as error:
        reason = error.strerror or "read error"
        raise ConfigError(f"--api-key-file: cannot read {path}: {reason}") from error
    keys = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith("#"):
            check_api_key(line, f"--api-key-file: {path}, line {number}")
            keys.append(line)
    if not keys:
        raise ConfigError(f"--api-key-file: {path} has no key")
    return keys
