"""The base of every object that a client receives."""

from __future__ import annotations

import msgspec


class Payload(msgspec.Struct, forbid_unknown_fields=True):
    """An object in a response, an event or a message.

    Encoding it gives the bytes that are sent, and its schema is in `/openapi.json`. Fields that
    default to `UNSET` may be missing. All others are always sent, whether or not they have a
    default.
    """
