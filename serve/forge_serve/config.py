"""The server's own configuration, beside the engine's: frozen, every default written once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from forge_jax.config import option
from forge_jax.errors import ConfigError
from forge_jax.telemetry.log import LogFormat
from forge_serve.limits import Limits

ToolCallParserName = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "llama4_pythonic"
]
ReasoningParserName = Literal["auto", "none", "deepseek_r1", "qwen3", "mistral"]

_API_KEY = re.compile(r"[!-~]{1,512}", re.ASCII)  # what a header can carry, without spaces
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})", re.ASCII)
ANY_HOST = "*"
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@,*]+")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = option(
        "127.0.0.1", "address to listen on; 0.0.0.0: all of the machine's", essential=True
    )
    port: int = option(8000, "port to listen on; 0: any free one", essential=True)
    served_model_name: str | None = option(
        None,
        "name of the model in requests and answers; default: MODEL as given",
        essential=True,
    )
    accept_any_model: bool = option(
        False, "serve requests for a model of any name with the model that is loaded"
    )
    lora_folder: str | None = option(
        None, "folder whose LoRA adapters clients may load and unload; default: they may not"
    )
    tool_call_parser: ToolCallParserName = option(
        "auto", "how the model writes calls of tools; auto: as its chat template shows"
    )
    reasoning_parser: ReasoningParserName = option(
        "auto", "how the model marks its reasoning; auto: as its chat template shows"
    )
    request_log: bool = option(True, "do not log a line per request", flag="--no-request-log")
    log_format: LogFormat = option(
        "text", "form of the log; json: an object in each line", essential=True
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL that takes OpenTelemetry's traces, such as http://localhost:4318/v1/traces: send it a "
        "span for each request",
    )
    drain_timeout_s: float = option(
        30.0, "seconds that running requests get to finish on SIGTERM", flag="--drain-timeout"
    )
    request_timeout_s: float | None = option(
        None,
        "seconds that a request may take at most; its own timeout may be shorter",
        flag="--request-timeout",
    )
    max_new_tokens: int | None = option(
        None,
        "tokens that an output may have: more are refused, and it is the default where a request "
        "does not say; default: what the context has room for",
    )
    sse_keep_alive_s: float = option(
        15.0,
        "seconds without news after which a stream has a comment, for proxies on its way; 0: never",
        flag="--sse-keep-alive",
    )
    max_queued_requests: int = option(
        4096, "samples that may wait for their first token; more are refused with 503"
    )
    max_queued_tokens: int = option(
        8 * 1024 * 1024, "prompt tokens that may wait for their first output, likewise"
    )
    memory_watermark: float = option(
        0.95, "part of the host's memory in use from which on requests are refused; 1: never"
    )
    stall_timeout_s: float = option(
        60.0,
        "seconds without a completed step, while there is work, after which /health fails",
        flag="--stall-timeout",
    )
    engine_process: bool = option(
        False,
        "run the engine in a process of its own, which is started again if it dies",
        essential=True,
    )
    max_stored_responses: int = option(
        1024, "responses of /v1/responses that are kept for later requests; 0: none"
    )
    max_stored_bytes: int = option(
        256 * 1024 * 1024, "bytes that they take together, with their conversations"
    )
    profile_dir: str | None = option(
        None, "a folder for profiles: turns on POST /start_profile and /stop_profile"
    )
    fake: bool = option(
        False,
        "serve a fake device without weights: deterministic text at any speed",
        essential=True,
    )
    fake_step_time_ms: float = option(0.0, "milliseconds that a step of the fake device takes")
    api_key: tuple[str, ...] = option(
        (),
        "a key that clients must send as a bearer token, and a tenant of its own; may be repeated. "
        "Other users of this machine can see it: prefer --api-key-file",
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "a file with API keys that clients must send, one in each line; # begins a comment",
        essential=True,
    )
    tls_cert: str | None = option(
        None,
        "a file with the certificate, in PEM form, and those it depends on: serve HTTPS",
        essential=True,
    )
    tls_key: str | None = option(
        None, "a file with the certificate's private key, in PEM form", essential=True
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "an origin (https://example.org) whose web pages may use the server, or * for all; may be "
        "repeated",
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "a host name by which clients or a proxy reach the server, or * for all; may be repeated. "
        "Default: without API keys on a loopback address localhost and IP addresses, else all",
    )
    limits: Limits = field(
        default_factory=Limits, metadata={"doc": "what one request may ask for", "flag": None}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("--served-model-name must not be empty: leave it out for MODEL")
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
                raise ConfigError(f"{flag} must not be negative, not {value}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens must be at least 1, not {self.max_new_tokens}")
        if self.profile_dir is not None and not self.profile_dir:
            raise ConfigError("--profile-dir must not be empty: leave it out for no profiles")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
            raise ConfigError(
                f"--otlp-traces-endpoint must be a URL such as http://localhost:4318/v1/traces, "
                f"not {endpoint!r}"
            )
        self._check_exposure()

    def _check_exposure(self) -> None:
        for name in ("api_key", "cors_origin", "allowed_host"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be a tuple of strings")
        for key in self.api_key:
            check_api_key(key, "--api-key")
        if self.api_key_file is not None and not self.api_key_file:
            raise ConfigError("--api-key-file must not be empty: leave it out for no keys")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key: give both of them, or neither")
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


def check_api_key(key: str, where: str) -> None:
    """Raises `ConfigError`, which says `where` and not the key, for what no client could send."""
    if not _API_KEY.fullmatch(key):
        raise ConfigError(f"{where}: a key is 1 to 512 printable ASCII characters without spaces")
