"""The log's formats: text lines, or one JSON object per line."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json"]


def configure(form: LogFormat, *, process: str = "", level: int = logging.INFO) -> None:
    """Send this process's log to stderr, unless logging is already configured.

    Args:
      process: a name for this process in each line, if several processes share the stream.
    """
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        name = f"{process}: " if process else ""
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {name}%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class Event:
    """A structured log message: `log.info(Event("request", {...}))`.

    In text format its fields are `name=value`, with `none` for None. In JSON format they are
    members of the line's object.

    Args:
      name: the message in JSON format.
      lead: the beginning of the text line; default: the name.
      shown: the fields in the text line; default: all.
    """

    __slots__ = ("_lead", "_shown", "fields", "name")

    def __init__(
        self,
        name: str,
        fields: dict[str, Any],
        *,
        lead: str | None = None,
        shown: dict[str, Any] | None = None,
    ):
        self.name = name
        self.fields = fields
        self._lead = name if lead is None else lead
        self._shown = fields if shown is None else shown

    def __str__(self) -> str:
        return " ".join([self._lead, *(f"{k}={_text(v)}" for k, v in self._shown.items())])


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.3f}" if isinstance(value, float) else str(value)


class JsonFormatter(logging.Formatter):
    """A formatter for JSON objects with `time` (UTC), `level`, `logger`, `message` and fields."""

    def __init__(self, process: str = ""):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname, "logger": record.name}
        if self._process:
            line["process"] = self._process
        if isinstance(record.msg, Event):
            line |= {"message": record.msg.name, **record.msg.fields}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
