"""`--kv-events-config`: the publication of prefix cache events, in vLLM's JSON form."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from forge_jax.errors import ConfigError

FLAG = "--kv-events-config"
_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
_Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(tcp|ipc|inproc)://.+$")]


class KVEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of vLLM's `KVEventsConfig`.

    Attributes:
      endpoint: ZeroMQ address of the PUB socket. It is bound if it contains `*` or `::` or is a
        local address, and connected otherwise.
      replay_endpoint: ZeroMQ address of the ROUTER socket that resends batches. None: no replay.
      buffer_steps: number of batches that can be resent.
      hwm: batches that ZeroMQ holds for a slow subscriber before it drops more.
      max_queue_size: batches that wait for the publisher's thread before more are dropped.
      topic: first frame of each message.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: _Endpoint = "tcp://*:5557"
    replay_endpoint: _Endpoint | None = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 100_000
    max_queue_size: _Count = 100_000
    topic: str = ""

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def of_rank(self, rank: int) -> KVEvents:
        """Return the settings of one engine of a group, with its own addresses as in vLLM.

        The rank is added to a TCP port, and appended to other addresses.
        """
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            endpoint=_of_rank(self.endpoint, rank),
            replay_endpoint=None if replay is None else _of_rank(replay, rank),
        )


def read_kv_events(text: str | None) -> KVEvents | None:
    """Return the settings in the JSON text; None if there are none or events are off.

    Raises:
      ConfigError: if the text is not a JSON object, or a setting is unknown or invalid.
    """
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=KVEvents)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ConfigError(
            f'{FLAG} must be a JSON object such as {{"enable_kv_cache_events": true, '
            f'"endpoint": "tcp://*:5557"}}: {error}'
        ) from error
    return config if config.enabled else None


def _of_rank(endpoint: str, rank: int) -> str:
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdecimal() else endpoint
