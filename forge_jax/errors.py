"""Every exception that forge-jax raises on purpose.

    ForgeError
    ├── ConfigError            a flag or a field of EngineConfig is wrong
    ├── ModelError             the model cannot be served
    │   ├── UnsupportedModelError   an architecture, rope type or option nobody has implemented
    │   └── CheckpointError         a file is missing, broken, or holds the wrong tensors
    ├── RequestError           the client asked for something that cannot be done; `param` names it
    │   └── ContextLengthError      it can never fit the context or the KV cache
    ├── OverloadedError        the queue is full: try again later
    └── EngineError            the engine failed or has been shut down
        ├── NumericalError          one request's logits were not finite
        ├── GrammarError            one request's output could not be held to its grammar
        │   └── GrammarLimitError       because that costs more than one request may cost
        ├── StepError               one request made the step fail that computes it, each time
        └── LostAdapterError        its LoRA adapter could not be loaded again after a crash

`assert` is for our own bugs. These are for theirs: each message names what is wrong and what to do.
"""


class ForgeError(Exception):
    """The root: catch this to catch everything that forge-jax raises on purpose.

    `str()` names options as Python arguments where Python code set them. `on_command_line` is then
    the same message with options as flags; None where the two do not differ.
    """

    on_command_line: str | None = None


class ConfigError(ForgeError):
    """A flag or a field of `EngineConfig` is wrong."""


class ModelError(ForgeError):
    """The model cannot be loaded or served."""


class UnsupportedModelError(ModelError):
    """The model needs something that is not implemented: the message names it."""


class CheckpointError(ModelError):
    """A file of the checkpoint is missing or broken, or holds the wrong tensors."""


class RequestError(ForgeError):
    """The request cannot be served as it was asked.

    `param` is the field to change, in the words of the protocol (`"temperature"`).
    """

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The request can never fit into the model's context or into the KV cache."""


class OverloadedError(ForgeError):
    """The queue is full; `retry_after_s` is a guess at when it may not be."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(ForgeError):
    """The engine failed, or has been shut down."""


class NumericalError(EngineError):
    """The model gave NaN or infinite logits for this request; other requests are not affected."""


class GrammarError(EngineError):
    """The output of this request cannot be held to its grammar any further."""


class GrammarLimitError(GrammarError):
    """The grammar of this request costs more than one may: a simpler one is needed."""


class LostAdapterError(EngineError):
    """The LoRA adapter of this request could not be loaded again after the engine's crash."""


class StepError(EngineError):
    """The step that computes this request fails each time; other requests are not affected."""
