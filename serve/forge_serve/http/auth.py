"""Who may use the server, and as which tenant: API keys as bearer tokens.

Everything is closed but `OPEN_PATHS`: a path is open because it is listed here, never because
somebody forgot to close it. What is kept of a key is a digest, so that nothing can print a key.
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

HEALTH_PATHS = frozenset(("/health", "/healthz"))
PAGE_SCRIPTS = ("page", "api", "chat", "tokens", "settings", "engine", "charts")
PAGE_PATHS = frozenset(  # the static files of a web page
    (
        "/",
        "/static/page.css",
        "/static/icon.svg",
        *(f"/static/{name}.js" for name in PAGE_SCRIPTS),
    )
)
OPEN_PATHS = HEALTH_PATHS | PAGE_PATHS  # of routes, as they are registered

API_KEY_HEADER = "X-Api-Key"  # where Anthropic's clients, and others, send their key
TENANT = web.RequestKey("tenant", str)  # whose request it is; none without API keys

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiKeys:
    """The keys that are accepted; without any, everybody is."""

    def __init__(self, keys: Iterable[str] = ()):
        self._known = [(_digest(key), _tenant(key)) for key in dict.fromkeys(keys)]

    @classmethod
    def of(cls, config: ServerConfig) -> ApiKeys:
        """The keys of the flags and of the file.

        Raises:
          ConfigError: the file cannot be read, or holds no usable key.
        """
        keys = list(config.api_key)
        if config.api_key_file is not None:
            keys += read_keys(config.api_key_file)
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def tenants(self) -> list[str]:
        """Whose they are, in the order in which they were given."""
        return [tenant for _, tenant in self._known]

    def tenant(self, key: str) -> str | None:
        """Whose key it is: 32 hex digits; None for a key that is not known.

        It takes as long whichever key it is, and whether or not it is one.
        """
        digest, found = _digest(key), None
        for known, tenant in self._known:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuses every request without a known key, but those for `OPEN_PATHS`."""
        if self._known and not _is_open(request):
            request[TENANT] = self._authenticated(request)
        return await handler(request)

    def _authenticated(self, http: web.Request) -> str:
        given = http.headers.getall(hdrs.AUTHORIZATION, [])
        if not given:  # else that header decides, whatever a gateway has put beside it
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
    """What keeps the request's cached prefixes apart: its tenant's own, with the client's salt.

    Tenants' names have one length, so no salt of one tenant's is another tenant's.
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
    """A file's keys: one in each line that is neither empty nor begins with "#"."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file: {path} is not a text file") from error
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise ConfigError(f"--api-key-file: cannot read {path}: {reason}") from error
    keys = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith("#"):
            check_api_key(line, f"--api-key-file: {path}, line {number}")
            keys.append(line)
    if not keys:
        raise ConfigError(f"--api-key-file: {path} holds no key")
    return keys
