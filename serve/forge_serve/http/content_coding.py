"""Decompression of request bodies with a `Content-Encoding`.

aiohttp would decompress a body on the event loop while it arrives, even if the request is already
rejected. Bodies are therefore received as they are and decompressed here, up to the size limit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from aiohttp import hdrs, web

from forge_serve.errors import BodyTooLargeError, ContentCodingError

CODINGS = ("gzip", "deflate")
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's `wbits`


def content_coding(headers: Mapping[str, str]) -> str | None:
    """Return the content coding of a body, or None if it is plain.

    Raises:
      ContentCodingError: the coding is not supported.
    """
    coding = headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in CODINGS:
        raise ContentCodingError(
            f"Content-Encoding must be {' or '.join(CODINGS)}; omit it for a plain body"
        )
    return coding


def decompressed(body: bytes, coding: str, limit: int) -> bytes:
    """Return the content of a compressed body.

    Args:
      body: the compressed body.
      coding: the content coding, one of `CODINGS`.
      limit: maximum size of the content in bytes.

    Raises:
      BodyTooLargeError: the content exceeds the limit.
      RequestPayloadError: the body is invalid, or has data after the content.
    """
    # Some clients send raw deflate data instead of zlib's format.
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
