"""State of one request while the server handles it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from aiohttp import web

from forge_serve.telemetry.request_log import RequestLog

_ids = random.Random()


def new_id() -> str:
    """Return 128 random bits as hex digits.

    The ids are not secret, so a system call per id is avoided: `uuid4` takes 9 us.
    """
    return f"{_ids.getrandbits(128):032x}"


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and its response.

    Attributes:
      request_id: the id of the request in headers, logs and the engine.
      log: the entry of the request log.
      id_from_header: True if the client set the id in a header. A field of the body cannot replace
        it then.
      message: a WebSocket message that is handled instead of a body.
      body_bytes: size of the body, once it has been read.
      lora: the LoRA adapter that the request's model names; None: the base model.
      client_left: True if the client disconnected or timed out in the middle of a stream.
    """

    request_id: str
    log: RequestLog
    id_from_header: bool = False
    message: bytes | None = None
    body_bytes: int = 0
    lora: str | None = None
    client_left: bool = False

    def adopt_id(self, request_id: str | None) -> str:
        """Return the request's id from the header, the body's field or, by default, the server."""
        if request_id is not None and not self.id_from_header:
            self.request_id = request_id
        return self.request_id


EXCHANGE = web.RequestKey("exchange", Exchange)
