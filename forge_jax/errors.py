"""The exceptions that forge-jax raises.

    ForgeError
    ├── ConfigError            a flag or a field of EngineConfig is invalid
    ├── ModelError             the model cannot be served
    │   ├── UnsupportedModelError   an architecture, RoPE type or option is not implemented
    │   └── CheckpointError         a file is missing, corrupt, or has the wrong tensors
    ├── RequestError           the request cannot be served; `param` names the field
    │   └── ContextLengthError      it can never fit the context or the KV cache
    ├── OverloadedError        the engine is overloaded or restarting: retry later
    └── EngineError            the engine failed or has been shut down
        ├── NumericalError          a request's logits were not finite
        ├── GrammarError            a request's output no longer matches its grammar
        │   └── GrammarLimitError       its grammar exceeds the cost limit
        ├── StepError               every step that computes this request fails
        └── LostAdapterError        its LoRA adapter could not be reloaded after a crash

Each message names the problem and the remedy. `assert` is for bugs in forge-jax itself.
"""


class ForgeError(Exception):
    """The base class of all exceptions that forge-jax raises.

    In the Python API, `str(error)` names options as Python arguments, and `on_command_line` is the
    same message with command-line flags. If it is None, `str(error)` already uses flags.
    """

    on_command_line: str | None = None


class ConfigError(ForgeError):
    """An invalid flag or field of `EngineConfig`."""


class ModelError(ForgeError):
    """A model that cannot be loaded or served."""


class UnsupportedModelError(ModelError):
    """A model that needs an unimplemented feature, which the message names."""


class CheckpointError(ModelError):
    """A checkpoint with a missing or corrupt file, or with the wrong tensors."""


class RequestError(ForgeError):
    """A request that cannot be served as given.

    `param` is the protocol's name of the field to change, for example `"temperature"`.
    """

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """A request that can never fit into the model's context or the KV cache."""


class OverloadedError(ForgeError):
    """A request or call that can be retried later. `retry_after_s` estimates when, in seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(ForgeError):
    """A failure or shutdown of the engine."""


class NumericalError(EngineError):
    """NaN or infinite logits of one request. Other requests are unaffected."""


class GrammarError(EngineError):
    """An output that can no longer follow its grammar."""


class GrammarLimitError(GrammarError):
    """A grammar that exceeds the cost limit. Simplify it."""


class LostAdapterError(EngineError):
    """A LoRA adapter that could not be reloaded after the engine crashed."""


class StepError(EngineError):
    """A request that makes every step fail. Other requests are unaffected."""
