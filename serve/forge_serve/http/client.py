"""Client side of OpenAI's protocol: URLs, sessions, models and event streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from forge_jax.errors import ConfigError, ForgeError
from forge_serve.http.auth import read_keys

CONNECT_S = 30.0
MAX_ERROR_CHARS = 300
DONE = b"[DONE]"

_decode = msgspec.json.decode


class ServerError(ForgeError):
    """A server cannot be reached, or returned an invalid or error response."""


def base_url(url: str) -> str:
    """Return a server's URL without a trailing "/v1".

    Raises:
      ConfigError: the URL is not an HTTP URL.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, not {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def api_key_of(file: str | None) -> str | None:
    """Return the first key of a file in the format of `--api-key-file`, or None without a file.

    Raises:
      ConfigError: the file cannot be read, or has no key.
    """
    return None if file is None else read_keys(file)[0]


def new_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """Return a session without limits on connections or time."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        headers=headers,
    )


async def model_card(session: aiohttp.ClientSession, url: str, model: str | None) -> dict[str, Any]:
    """Return a server's entry in /v1/models for the named model, or its first entry.

    Raises:
      ServerError: the server does not respond, or does not serve the model.
    """
    try:
        async with session.get(f"{url}/v1/models") as response:
            text = await response.text()
            if response.status == 401:
                raise ServerError(
                    f"{url} requires an API key: set --api-key-file ({error_message(text)})"
                )
            if response.status != 200:
                raise ServerError(f"{url}/v1/models: HTTP {response.status}: {error_message(text)}")
        cards = _decode(text)["data"]
        names = [card["id"] for card in cards]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ServerError(f"no server responds at {url}: {error}") from error
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ServerError(f"{url}/v1/models did not return a list of models") from error
    if not names or (model is not None and model not in names):
        asked = f"no model {model!r} at {url}" if model else f"no model at {url}"
        raise ServerError(f"{asked}: it has {', '.join(map(repr, names)) or 'none'}")
    return cards[0 if model is None else names.index(model)]


def error_message(error: Any) -> str:
    """Return the message of an error response in any of the common formats."""
    if isinstance(error, str):
        with suppress(msgspec.DecodeError):
            error = _decode(error)
    while isinstance(error, dict) and ("error" in error or "message" in error):
        error = error.get("error") or error.get("message")
    return " ".join(str(error).split())[:MAX_ERROR_CHARS]


class EventsError(Exception):
    """A stream is malformed."""


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """Yield the decoded events of a response as they arrive, until `[DONE]`.

    Raises:
      EventsError: an event is not JSON, or the stream ends without `[DONE]`.
    """
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = _data(line)
            if data == DONE:
                return
            if data:
                yield _event(data)
    raise EventsError("the stream ended without [DONE]")


def events_of(data: bytes) -> Iterator[Any]:
    """Yield the decoded events of a piece of a stream that has only whole events."""
    for line in data.split(b"\n"):
        event = _data(line)
        if event and event != DONE:
            yield _event(event)


def _data(line: bytes) -> bytes:
    """Return a line's data; b"" for an empty line, a comment or another field."""
    return line[5:].strip() if line.startswith(b"data:") else b""


def _event(data: bytes) -> Any:
    try:
        return _decode(data)
    except msgspec.DecodeError as error:
        raise EventsError(f"an event is not JSON: {error}") from error
