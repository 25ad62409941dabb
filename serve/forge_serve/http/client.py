"""A client's side of OpenAI's protocol: addresses, sessions, models, and streams of events."""

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
    """A server cannot be reached, or does not answer as it should."""


def base_url(url: str) -> str:
    """A server's address, with or without "/v1" at the end, without it.

    Raises:
      ConfigError: it is none.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, not {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def api_key_of(file: str | None) -> str | None:
    """The first key of a file in the form of the server's `--api-key-file`.

    Raises:
      ConfigError: the file cannot be read, or holds no key.
    """
    return None if file is None else read_keys(file)[0]


def new_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """A session without limits on connections or time."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        headers=headers,
    )


async def model_card(session: aiohttp.ClientSession, url: str, model: str | None) -> dict[str, Any]:
    """What a server says of the model that is named, or of its first.

    Raises:
      ServerError: nobody answers, or it does not have the model.
    """
    try:
        async with session.get(f"{url}/v1/models") as response:
            text = await response.text()
            if response.status == 401:
                raise ServerError(
                    f"{url} wants an API key: pass --api-key-file ({error_message(text)})"
                )
            if response.status != 200:
                raise ServerError(f"{url}/v1/models: HTTP {response.status}: {error_message(text)}")
        cards = _decode(text)["data"]
        names = [card["id"] for card in cards]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ServerError(f"no server answers at {url}: {error}") from error
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ServerError(f"{url}/v1/models is not a list of models") from error
    if not names or (model is not None and model not in names):
        asked = f"no model {model!r} at {url}" if model else f"no model at {url}"
        raise ServerError(f"{asked}: it has {', '.join(map(repr, names)) or 'none'}")
    return cards[0 if model is None else names.index(model)]


def error_message(error: Any) -> str:
    """The message in an error's body, in whichever of the usual forms it comes."""
    if isinstance(error, str):
        with suppress(msgspec.DecodeError):
            error = _decode(error)
    while isinstance(error, dict) and ("error" in error or "message" in error):
        error = error.get("error") or error.get("message")
    return " ".join(str(error).split())[:MAX_ERROR_CHARS]


class EventsError(Exception):
    """A stream that is not what it should be; the message says how."""


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """The events of a response until `[DONE]`, decoded, each as soon as it is there.

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
    """The events in whole pieces of a stream."""
    for line in data.split(b"\n"):
        event = _data(line)
        if event and event != DONE:
            yield _event(event)


def _data(line: bytes) -> bytes:
    """What a line says; empty for an empty line, a comment, or another field."""
    return line[5:].strip() if line.startswith(b"data:") else b""


def _event(data: bytes) -> Any:
    try:
        return _decode(data)
    except msgspec.DecodeError as error:
        raise EventsError(f"an event is not JSON: {error}") from error
