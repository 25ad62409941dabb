"""The state of one request while it is answered."""

from __future__ import annotations

import random
from dataclasses import dataclass

from aiohttp import web

from forge_serve.telemetry.request_log import RequestLog

_ids = random.Random()


def new_id() -> str:
    """Return 128 random bits as hex digits.

    They are no secret. `uuid4` would make a system call for each, which takes 9 us.
    """
    return f"{_ids.getrandbits(128):032x}"


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and its response.

    Attributes:
      request_id: names the request in headers, logs and the engine.
      log: the entry of the request log.
      id_from_header: True if the client chose the id in a header. A field of the body cannot
        replace it then.
      message: a WebSocket message that is served in place of a body.
      body_bytes: size of the body, once it has been read.
      lora: the LoRA adapter that the request's model names; None: the base model.
      client_left: True if the client disconnected in the middle of a stream, or was given up.
    """

    request_id: str
    log: RequestLog
    id_from_header: bool = False
    message: bytes | None = None
    body_bytes: int = 0
    lora: str | None = None
    client_left: bool = False

    def adopt_id(self, request_id: str | None) -> str:
        """Return the id of the request: the header's, else the body's field, else the server's."""
        if request_id is not None and not self.id_from_header:
            self.request_id = request_id
        return self.request_id


EXCHANGE = web.RequestKey("exchange", Exchange)
