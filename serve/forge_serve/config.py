"""Configuration of the server. The engine's configuration is `forge_jax.config`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Literal

from forge_jax.config import option
from forge_jax.errors import ConfigError
from forge_jax.telemetry.log import LogFormat
from forge_serve.limits import Limits

ToolCallParserName = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "llama4_pythonic", "harmony"
]
ReasoningParserName = Literal["auto", "none", "deepseek_r1", "qwen3", "mistral", "harmony"]

_API_KEY = re.compile(r"[!-~]{1,512}", re.ASCII)  # characters that a header can carry, no spaces
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})", re.ASCII)
ANY_HOST = "*"
MAX_ENGINES = 64  # limit of --data-parallel
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@,*]+")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the server. Each field has the default and the help text of its flag."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all interfaces", essential=True)
    port: int = option(8000, "port to listen on, from 1 to 65535; 0: any free port", essential=True)
    served_model_name: str | None = option(
        None,
        "name of the model in requests and responses; default: MODEL as given",
        essential=True,
    )
    accept_any_model: bool = option(
        False, "accept any model name in requests and use the loaded model"
    )
    lora_folder: str | None = option(
        None,
        "folder with LoRA adapters that clients may load and unload; default: loading is disabled",
        metavar="FOLDER",
    )
    tool_call_parser: ToolCallParserName = option(
        "auto", "format of the model's tool calls; auto: detected from the chat template"
    )
    reasoning_parser: ReasoningParserName = option(
        "auto", "format of the model's reasoning; auto: detected from the chat template"
    )
    request_log: bool = option(
        True, "turn off the request log, which has one line per request", flag="--no-request-log"
    )
    log_format: LogFormat = option(
        "text", "log format; json: one JSON object per line", essential=True
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces, that receives "
        "one span per request",
    )
    drain_timeout_s: float = option(
        30.0,
        "seconds to let running requests finish after SIGTERM, at least 0",
        flag="--drain-timeout",
    )
    request_timeout_s: float | None = option(
        None,
        "maximum duration of a request in seconds, at least 0 (a request may set a shorter one); "
        "auto: no limit",
        flag="--request-timeout",
    )
    max_new_tokens: int | None = option(
        None,
        "maximum number of output tokens per request, at least 1; also the upper bound of the "
        "default. Auto: no limit except the context",
    )
    sse_keep_alive_s: float = option(
        15.0,
        "idle seconds after which a stream sends an SSE comment, so that proxies keep it open; 0: "
        "never",
        flag="--sse-keep-alive",
    )
    max_queued_requests: int = option(
        4096,
        "maximum number of samples (n per prompt) waiting for their first token, at least 0; above "
        "it, the server returns 503",
    )
    max_queued_tokens: int = option(
        8 * 1024 * 1024,
        "maximum number of prompt tokens in requests waiting for their first output token, at "
        "least 0; above it, the server returns 503",
    )
    memory_watermark: float = option(
        0.95,
        "fraction of host memory in use at which the server starts to reject requests, above 0 and "
        "at most 1; 1: never",
    )
    stall_timeout_s: float = option(
        60.0,
        "seconds without a completed step while work is pending, after which /health fails; at "
        "least 0",
        flag="--stall-timeout",
    )
    engine_process: bool = option(
        False,
        "run the engine in its own process and restart it if it dies",
        essential=True,
    )
    data_parallel: int = option(
        1,
        "number of engine processes, each with its own copy of the model, that share the "
        "requests by cached prefix and load, 1 to 64. Above 1, --engine-process has no effect, "
        "because every engine has its own process",
        essential=True,
    )
    max_stored_responses: int = option(
        1024, "maximum number of responses that /v1/responses stores; 0: none"
    )
    max_stored_bytes: int = option(
        256 * 1024 * 1024,
        "total size limit in bytes for stored responses and their conversations, at least 0",
    )
    profile_dir: str | None = option(
        None, "folder for profiles; enables POST /start_profile and /stop_profile", metavar="FOLDER"
    )
    weight_sync_dir: str | None = option(
        None,
        "folder with checkpoints that clients may load as new weights; enables the endpoints for "
        "trainers, such as POST /update_weights, /pause and /sleep. Requires API keys, or a "
        "loopback address",
        metavar="FOLDER",
    )
    fake: bool = option(
        False,
        "for testing: serve deterministic text from a fake device, without loading a model",
        essential=True,
    )
    fake_step_time_ms: float = option(
        0.0, "duration of a step of the fake device in milliseconds, at least 0"
    )
    api_key: tuple[str, ...] = option(
        (),
        "API key that clients must send as a bearer token; may be repeated. Each key is a separate "
        "tenant with its own prefix cache and stored responses. Other users of this machine can "
        "see the key: prefer --api-key-file",
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "file with the API keys that clients must send, one per line; # starts a comment",
        essential=True,
        metavar="FILE",
    )
    tls_cert: str | None = option(
        None,
        "PEM file with the certificate and its chain; enables HTTPS",
        essential=True,
        metavar="FILE",
    )
    tls_key: str | None = option(
        None, "PEM file with the certificate's private key", essential=True, metavar="FILE"
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "origin, such as https://example.org, whose web pages may call the server, or * for all; "
        "may be repeated",
        metavar="ORIGIN",
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "host name to accept in the Host header, or * for all. May be repeated. "
        "Default: all names. On a loopback address without API keys: localhost, --host "
        "and IP addresses",
        metavar="HOST",
    )
    limits: Limits = field(
        default_factory=Limits, metadata={"doc": "limits of one request", "flag": None}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("--served-model-name must not be empty: omit it to use MODEL")
        if not 0.0 < self.memory_watermark <= 1.0:
            raise ConfigError(f"--memory-watermark must be in (0, 1], not {self.memory_watermark}")
        for flag, value in (
            ("--drain-timeout", self.drain_timeout_s),
            ("--stall-timeout", self.stall_timeout_s),
            ("--request-timeout", self.request_timeout_s or 0.0),
            ("--sse-keep-alive", self.sse_keep_alive_s),
            ("--max-queued-requests", self.max_queued_requests),
            ("--max-queued-tokens", self.max_queued_tokens),
            ("--max-stored-responses", self.max_stored_responses),
            ("--max-stored-bytes", self.max_stored_bytes),
            ("--fake-step-time-ms", self.fake_step_time_ms),
        ):
            if not value >= 0:
                raise ConfigError(f"{flag} must be at least 0, not {value}")
        if not 1 <= self.data_parallel <= MAX_ENGINES:
            raise ConfigError(
                f"--data-parallel must be between 1 and {MAX_ENGINES}, not {self.data_parallel}"
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens must be at least 1, not {self.max_new_tokens}")
        if self.profile_dir is not None and not self.profile_dir:
            raise ConfigError("--profile-dir must not be empty: omit it to disable profiles")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
            raise ConfigError(
                f"--otlp-traces-endpoint must be a URL such as http://localhost:4318/v1/traces, "
                f"not {endpoint!r}"
            )
        self._check_exposure()
        self._check_weight_sync()

    def _check_exposure(self) -> None:
        for name in ("api_key", "cors_origin", "allowed_host"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be a tuple of strings")
        for key in self.api_key:
            check_api_key(key, "--api-key")
        if self.api_key_file is not None and not self.api_key_file:
            raise ConfigError("--api-key-file must not be empty: omit it to serve without keys")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key must be set together")
        for name in self.allowed_host:
            if name != ANY_HOST and not _HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"--allowed-host must be * or a name such as example.org, without scheme and "
                    f"port, not {name}"
                )
        for origin in self.cors_origin:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--cors-origin must be * or an origin such as https://example.org, "
                    f"without a path, not {origin}"
                )

    def _check_weight_sync(self) -> None:
        if self.weight_sync_dir is None:
            return
        if not self.weight_sync_dir:
            raise ConfigError("--weight-sync-dir must not be empty: omit it to disable weight sync")
        if self.engine_process or self.data_parallel > 1:
            flag = "--engine-process" if self.engine_process else "--data-parallel"
            raise ConfigError(
                f"--weight-sync-dir cannot be combined with {flag}, because a new process would "
                "load the old weights: omit one of them"
            )
        if not (self.api_key or self.api_key_file or _is_loopback(self.host)):
            raise ConfigError(
                "--weight-sync-dir lets clients replace the model: set --api-key-file, or listen "
                "on a loopback address"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_api_key(key: str, where: str) -> None:
    """Raise `ConfigError` if no client could send the key. The message has `where`, not the key."""
    if not _API_KEY.fullmatch(key):
        raise ConfigError(f"{where}: a key is 1 to 512 printable ASCII characters without spaces")
