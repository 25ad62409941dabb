"""The base class of all objects that the server sends."""

from __future__ import annotations

import msgspec


class Payload(msgspec.Struct, forbid_unknown_fields=True):
    """An object in a response, an event or a message.

    `/openapi.json` has the schema of each subclass. Fields that default to `UNSET` may be absent.
    All others are always sent, including those with a default.
    """
