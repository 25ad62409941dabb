"""Messages between a server and its engine process: MessagePack with a schema, in frames.

A frame is the length of its payload in four bytes, big-endian, and the payload. Frames travel over
a pair of connected, unnamed Unix sockets, which no other process can reach. Received data is never
executed. `Submit` and `Abort` are those of the engine thread (`commands.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from forge_jax import errors
from forge_jax.config import EngineConfig
from forge_jax.engine.adapters import LoadedAdapter
from forge_jax.engine.async_engine import EngineStats
from forge_jax.engine.commands import Abort, Submit
from forge_jax.engine.core import Limits, Outputs
from forge_jax.schedule.activations import Activations
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.plan import TokenLogprobs
from forge_jax.schedule.request import FinishReason, LoraRef
from forge_jax.schedule.wire_array import WireArray
from forge_jax.telemetry.engine_state import EngineState
from forge_jax.telemetry.log import LogFormat

MAX_FRAME_BYTES = 256 * 1024 * 1024

_ERRORS = {
    kind.__name__: kind
    for kind in (
        errors.ConfigError,
        errors.ModelError,
        errors.UnsupportedModelError,
        errors.CheckpointError,
        errors.RequestError,
        errors.ContextLengthError,
        errors.OverloadedError,
        errors.EngineError,
        errors.NumericalError,
        errors.GrammarError,
        errors.GrammarLimitError,
        errors.StepError,
        errors.LostAdapterError,
    )
}


class WireError(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: errors.ForgeError) -> WireError:
        kind = type(error).__name__
        return cls(
            kind if kind in _ERRORS else "EngineError",
            error.on_command_line or str(error),
            getattr(error, "param", None),
        )

    def error(self) -> errors.ForgeError:
        kind = _ERRORS.get(self.kind, errors.EngineError)
        if issubclass(kind, errors.RequestError):
            return kind(self.message, param=self.param)
        return kind(self.message)


class WireActivations(msgspec.Struct, array_like=True, frozen=True):
    start: int
    arrays: dict[str, WireArray]

    @classmethod
    def of(cls, rows: Activations) -> WireActivations:
        return cls(rows.start, {name: WireArray.of(each) for name, each in rows.arrays.items()})

    def activations(self) -> Activations:
        return Activations(self.start, {name: each.array() for name, each in self.arrays.items()})


class WireDelta(msgspec.Struct, array_like=True, frozen=True):
    """A `Delta`. Most have defaults after the third field."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: WireError | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    pooled: bytes | None = None
    queue_s: float | None = None
    num_preemptions: int = 0
    activations: WireActivations | None = None

    @classmethod
    def of(cls, delta: Delta) -> WireDelta:
        return cls(
            delta.index,
            delta.text,
            delta.token_ids,
            delta.finish_reason,
            delta.stop_reason,
            delta.num_cached_tokens,
            delta.logprobs,
            delta.prompt_logprobs,
            None if delta.error is None else WireError.of(delta.error),
            delta.num_draft_tokens,
            delta.num_accepted_tokens,
            delta.pooled,
            delta.queue_s,
            delta.num_preemptions,
            None if delta.activations is None else WireActivations.of(delta.activations),
        )

    def delta(self) -> Delta:
        return Delta(
            self.index,
            self.text,
            self.token_ids,
            self.logprobs,
            self.prompt_logprobs,
            self.finish_reason,
            self.stop_reason,
            None if self.error is None else self.error.error(),
            self.num_cached_tokens,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            self.pooled,
            self.queue_s,
            self.num_preemptions,
            activations=None if self.activations is None else self.activations.activations(),
        )


class Start(msgspec.Struct, tag="start"):
    """The first message to the process: the model to load."""

    config: EngineConfig
    fake: bool = False
    fake_step_time_s: float = 0.0
    fake_max_model_len: int = 4096
    log_format: LogFormat = "text"
    # Adapters of the previous process, to be loaded into the same slots.
    adapters: list[LoadedAdapter] = []
    engine: int = 0  # index among the engines of --data-parallel
    num_engines: int = 1
    host_sharers: int = 1  # engines that the free memory of the host must suffice for
    num_blocks: int | None = None  # blocks of the first engine; None: this is the first


class LoadLora(msgspec.Struct, tag="load_lora"):
    """Command to load an adapter into its slot. Answered by `LoraLoaded`."""

    ref: LoraRef
    path: str


class UnloadLora(msgspec.Struct, tag="unload_lora"):
    """Command to remove an adapter that no request uses."""

    name: str


class Profile(msgspec.Struct, tag="profile"):
    """Command to start or end a profile. Answered by `Profiled`."""

    folder: str | None  # where to write the profile; None: end it


class Look(msgspec.Struct, tag="look"):
    """Command to report the engine's state. Answered by `Looked`."""


ToEngine = Start | Submit | Abort | LoadLora | UnloadLora | Profile | Look


class Loading(msgspec.Struct, tag="loading"):
    """The heartbeat while the model loads. After `Hello`, `Stats` is the heartbeat."""


class Hello(msgspec.Struct, tag="hello"):
    """Notice that the process can serve: the first message after the heartbeats."""

    name: str
    max_model_len: int
    limits: Limits
    system_fingerprint: str | None
    architecture: str | None
    end_ids: list[int]  # tokens that end an output
    stats: EngineStats
    lora_places: int = 0  # maximum number of adapters
    adapters: list[LoadedAdapter] = []
    # Adapters of `Start` that could not be loaded: name -> reason.
    lost_adapters: dict[str, str] = {}


class Refused(msgspec.Struct, tag="refused"):
    """Notice that the process cannot serve, instead of `Hello`."""

    error: WireError


class Updates(msgspec.Struct, tag="news"):
    outputs: dict[str, list[WireDelta]]

    @classmethod
    def of(cls, outputs: Outputs) -> Updates:
        return cls({rid: [WireDelta.of(d) for d in deltas] for rid, deltas in outputs.items()})

    @classmethod
    def split(cls, outputs: Outputs) -> Iterator[Updates]:
        """Yield outputs as messages. Each request with activations has its own.

        The activations of one request fit a frame, but those of all requests may not.
        """
        small: Outputs = {}
        for request_id, deltas in outputs.items():
            if any(delta.activations is not None for delta in deltas):
                yield cls.of({request_id: deltas})
            else:
                small[request_id] = deltas
        if small:
            yield cls.of(small)

    def to_outputs(self) -> Outputs:
        return {rid: [wire.delta() for wire in deltas] for rid, deltas in self.outputs.items()}


class Stats(msgspec.Struct, tag="stats"):
    stats: EngineStats


class KVEventBatch(msgspec.Struct, tag="kv_events"):
    """Events of the prefix cache in one step."""

    ts: float  # Unix time in seconds
    events: msgspec.Raw


class LoraLoaded(msgspec.Struct, tag="lora_loaded"):
    identity: str
    adapter: LoadedAdapter | None = None
    error: WireError | None = None


class Profiled(msgspec.Struct, tag="profiled"):
    """The answer to each `Profile`, in order."""

    error: WireError | None = None


class Looked(msgspec.Struct, tag="looked"):
    """The answer to each `Look`, in order."""

    state: EngineState | None = None
    error: WireError | None = None


FromEngine = (
    Loading | Hello | Refused | Updates | Stats | KVEventBatch | LoraLoaded | Profiled | Looked
)

_encoder = msgspec.msgpack.Encoder()
to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    payload = _encoder.encode(message)
    return len(payload).to_bytes(4, "big") + payload


class Frames:
    """A splitter of a byte stream into payloads."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield each payload that `data` completes.

        Raises:
          ValueError: if a frame exceeds `MAX_FRAME_BYTES`.
        """
        received = self._bytes
        received += data
        start = 0
        try:
            while len(received) - start >= 4:
                length = int.from_bytes(received[start : start + 4], "big")
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes exceeds the limit")
                if len(received) - start - 4 < length:
                    break
                payload = bytes(received[start + 4 : start + 4 + length])
                start += 4 + length
                yield payload
        finally:
            del received[:start]


def decoded(frames: Frames, data: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Iterator[Any]:
    """Yield the messages that `data` completes.

    Raises:
      ValueError: if they do not match the schema (msgspec's own errors are subclasses).
    """
    for payload in frames.feed(data):
        yield decoder.decode(payload)
