"""Compressed bodies of requests, as `Content-Encoding` names them.

aiohttp would decompress a body while it arrives, on the event loop, also of a request that is
refused already. So bodies arrive as they are, and are decompressed here, up to the limit on them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from aiohttp import hdrs, web

from forge_serve.errors import BodyTooLargeError, ContentCodingError

CODINGS = ("gzip", "deflate")
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's `wbits`


def content_coding(headers: Mapping[str, str]) -> str | None:
    """Return the content coding of a body; None if it is plain.

    Raises:
      ContentCodingError: this server does not have it.
    """
    coding = headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in CODINGS:
        raise ContentCodingError(
            f"the Content-Encoding must be {' or '.join(CODINGS)}, or left out for a plain body"
        )
    return coding


def decompressed(body: bytes, coding: str, limit: int) -> bytes:
    """Return the content of a compressed body.

    Args:
      limit: bytes that the content may have.

    Raises:
      BodyTooLargeError: it has more.
      RequestPayloadError: the body is broken, or something follows the content.
    """
    # Some clients send raw deflate data in the place of zlib's format.
    zlib_format = _ZLIB if body[:1] and body[0] & 0x0F == 8 else _RAW
    decoder = zlib.decompressobj(_GZIP if coding == "gzip" else zlib_format)
    try:
        content = decoder.decompress(body, limit + 1)
    except zlib.error as error:
        raise web.RequestPayloadError(f"the body is not valid {coding}") from error
    if len(content) > limit:
        raise BodyTooLargeError
    if not decoder.eof or decoder.unused_data:
        raise web.RequestPayloadError(f"the body is not one whole {coding} stream")
    return content
