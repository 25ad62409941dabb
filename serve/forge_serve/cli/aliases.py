"""Flags of other engines' servers, in addition to `forge_jax.config.aliases`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forge_jax.config import aliases
from forge_jax.config.aliases import Alias
from forge_jax.errors import ConfigError

IMPLIED = aliases.IMPLIED


def _origins(value: Any) -> dict[str, Any]:
    """Convert vLLM's `allowed_origins`, which is a list or its JSON text."""
    try:
        origins = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"--allowed-origins must be a JSON list, not {value!r}") from error
    if not isinstance(origins, list) or not all(isinstance(each, str) for each in origins):
        raise ConfigError(f"--allowed-origins must be a list of strings, not {value!r}")
    return {"cors_origin": tuple(origins)}


ALIASES = (
    *aliases.ALIASES,
    Alias("data_parallel_size", "data_parallel", short="-dp"),
    Alias("dp_size", "data_parallel"),
    Alias("ssl_certfile", "tls_cert"),
    Alias("ssl_keyfile", "tls_key"),
    Alias("allowed_origins", "cors_origin", convert=_origins),
    Alias("sse_keep_alive_interval", "sse_keep_alive_s"),
    Alias("max_num_queued_tokens", "max_queued_tokens"),
    Alias("shutdown_timeout", "drain_timeout_s"),
    Alias("enable_log_requests", "request_log"),
    Alias("disable_log_requests", "request_log", inverted=True),
    Alias("disable_uvicorn_access_log", "request_log", inverted=True),
)

# Names of `vllm bench serve`, and those of version 0.1.
OF_BENCH = (
    Alias("base_url", "url"),
    Alias("concurrency", "max_concurrency"),
    Alias("requests", "num_prompts"),
    Alias("random_input_len", "input_len"),
    Alias("random_output_len", "output_len"),
)

_TOOLS = "the parsers are built in: see --tool-call-parser"
_TEXTS = "prompts and outputs are never logged: omit this flag"
_OF_SERVE = ("data_parallel", "data_parallel_size", "dp_size")  # refused only without a server
REFUSED: Mapping[str, str] = {
    **{name: why for name, why in aliases.REFUSED.items() if name not in _OF_SERVE},
    "max_num_queued_reqs": "use --max-queued-requests, which does not count running requests",
    "response_role": "the role is always assistant: omit this flag",
    "chat_template_content_format": "the chat template determines it: omit this flag",
    "default_chat_template_kwargs": "set chat_template_kwargs in each request",
    "trust_request_chat_template": "requests cannot provide a template: use --chat-template",
    "tool_parser_plugin": _TOOLS,
    "tool_server": "the server does not run tools",
    "max_log_len": _TEXTS,
    "enable_log_outputs": _TEXTS,
    "log_config_file": "see --log-format",
    "uvicorn_log_level": "see --log-format and --no-request-log",
    "uds": "the server listens on TCP: use --host and --port",
    "root_path": "configure the proxy to remove the prefix",
    "middleware": "plugins are not supported: use a reverse proxy",
    "ssl_ca_certs": "client certificates are not checked: use --api-key-file, or a proxy",
    "ssl_cert_reqs": "client certificates are not checked: use --api-key-file, or a proxy",
    "allow_credentials": "browsers send keys in a header: see --cors-origin",
    "allowed_methods": "the methods of each path are fixed: see --cors-origin",
    "allowed_headers": "the headers are fixed: see --cors-origin",
}
