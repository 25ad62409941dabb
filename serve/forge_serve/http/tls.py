"""TLS configuration for HTTPS."""

from __future__ import annotations

import ssl

from forge_jax.errors import ConfigError
from forge_serve.config import ServerConfig


def ssl_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context, or None for plain HTTP.

    Raises:
      ConfigError: a file cannot be read or has the wrong format, or the two do not match.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    for flag, path in (("--tls-cert", config.tls_cert), ("--tls-key", config.tls_key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            reason = error.strerror or "read error"
            raise ConfigError(f"{flag}: cannot read {path}: {reason}") from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(context, config.tls_cert, config.tls_key)
    return context


def _load(context: ssl.SSLContext, cert: str, key: str) -> None:
    asked = False

    def no_password() -> str:  # without a callback, OpenSSL would prompt on the terminal
        nonlocal asked
        asked = True
        return ""

    try:
        context.load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        if asked:
            raise ConfigError(
                f"--tls-key: {key} is encrypted: store it without a password"
            ) from error
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = f"{key} is not the key of the certificate in {cert}"
        elif _holds_certificate(cert):
            reason = f"{key} is not a private key in PEM format"
        else:
            raise ConfigError(f"--tls-cert: {cert} is not a certificate in PEM format") from error
        raise ConfigError(f"--tls-key: {reason}") from error


def _holds_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True
