"""Protection against requests that a browser sends on behalf of another site's page.

A browser can reach a server behind a firewall or on a loopback address. Two attacks use this:

DNS rebinding: a page's host name starts to resolve to this machine, so the browser treats the
server as the page's own. The `Host` header still has the page's host name.

Cross-site request forgery: a page posts to the server without reading the response, or opens a
WebSocket, to which CORS does not apply. The browser reports the page's origin in `Sec-Fetch-Site`
and `Origin`, which scripts cannot change.

API keys prevent both, because a page has no key. Clients other than browsers send neither header,
so they are not affected.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from forge_serve.config import ANY_HOST, ServerConfig
from forge_serve.errors import ForeignSiteError, HostNotAllowedError

SEC_FETCH_SITE = "Sec-Fetch-Site"
SAFE_METHODS = frozenset((hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS))  # change nothing
OWN_SITES = frozenset(("same-origin", "none"))  # none: a user action such as a bookmark
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BrowserGuard:
    """Middleware that checks the `Host` of all requests and the origin of unsafe requests.

    Args:
      config: the server's options.
      has_keys: True if the server requires API keys.
    """

    def __init__(self, config: ServerConfig, *, has_keys: bool):
        listed = {name.lower() for name in config.allowed_host}
        local = not has_keys and _is_loopback(config.host)
        self._checks_host = ANY_HOST not in listed and bool(listed or local)
        self._hosts = frozenset({"localhost", config.host.lower(), *listed})
        self._checks_origin = not has_keys and "*" not in config.cors_origin
        self._origins = frozenset(config.cors_origin)

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Reject a request with `HostNotAllowedError` or `ForeignSiteError`."""
        if self._checks_host and not self._is_own_host(request):
            raise HostNotAllowedError(
                "this host name is not allowed: use localhost or an IP address, or start the "
                "server with --allowed-host"
            )
        changes = request.method not in SAFE_METHODS or hdrs.UPGRADE in request.headers
        if self._checks_origin and changes:
            self._check_origin(request)
        return await handler(request)

    def _is_own_host(self, http: web.Request) -> bool:
        """Return True for listed names and IP addresses. DNS rebinding needs a name."""
        given = http.headers.getall(hdrs.HOST, [])
        if not given:  # HTTP/1.0; browsers always send the header
            return True
        name = _host_name(given[0])
        return len(given) == 1 and (name in self._hosts or _is_address(name))

    def _check_origin(self, http: web.Request) -> None:
        """Apply the rules of Go's `http.CrossOriginProtection`, which need no token or cookie."""
        origin = http.headers.get(hdrs.ORIGIN)
        if origin in self._origins:
            return
        site = http.headers.get(SEC_FETCH_SITE)
        if site is not None:
            own = site in OWN_SITES
        else:  # not a browser, or a page that was not loaded over HTTPS
            own = origin is None or _is_origin_of(origin, http.headers.get(hdrs.HOST, ""))
        if not own:
            raise ForeignSiteError(
                "requests from pages of other sites are not allowed: start the server with "
                "--cors-origin to allow this site"
            )


def _is_origin_of(origin: str, host: str) -> bool:
    scheme, separator, authority = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    return bool(separator and authority) and authority.removesuffix(port) == (
        host.lower().removesuffix(port)
    )


def _host_name(authority: str) -> str:
    """Return the host of a `Host` header in lower case, without port, brackets and final dot."""
    if authority.startswith("["):
        name, _, rest = authority[1:].partition("]")
        return name.lower() if not rest or rest.startswith(":") else authority
    return authority.partition(":")[0].removesuffix(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    """Return True for a loopback address and for localhost."""
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"
