"""Validation of request bodies: JSON, structure, limits and fields, in this order.

Every request is checked before it reaches the engine. Each kind of check has one place:

- JSON, its size and depth, duplicate keys: `decode_form`, on the bytes.
- Types, required fields, enum values: the request's struct, when msgspec decodes it.
- Counts and lengths in `Limits`: `_check_limits`.
- Fields that are not implemented, and fields that contradict each other: `check` of the request.
- Output formats and tools: `structured.demand` and `tools.tool_choice`, which `check` calls.
- Ranges of sampling parameters: `SamplingParams`, shared with the offline API.
- Requests of other protocols: `check` of their struct. `check_converted` checks only what the
  conversion to a chat adds.
- Context, KV cache and queue: the engine, after the prompt is tokenized
  (`schedule.request.output_room`).

The schemas in `/openapi.json` state the same constraints.

Every failed check raises a `RequestError` that names the field, if there is one. The message never
quotes the body, because bodies may contain secrets and control characters.

The work is linear in the body's size, without a Python loop over the JSON's values. The parser
holds the GIL even in a thread, so anything that would slow it down is counted first.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from forge_jax.config.suggest import nearest
from forge_jax.engine.validation import Limits as EngineLimits
from forge_jax.engine.validation import check_activations
from forge_jax.errors import RequestError
from forge_jax.sampling_params import SamplingParams
from forge_serve.limits import KIB, Limits
from forge_serve.openai.content import attachments
from forge_serve.openai.embeddings import PoolingRequest
from forge_serve.openai.ignored_fields import IgnoredFields
from forge_serve.openai.requests import (
    ROLES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
)
from forge_serve.openai.structured import demand
from forge_serve.openapi.schema import counted_fields

_MISSING_FIELD = re.compile(r"Object missing required field `(\w+)`")
_PATH = re.compile(r"^(?P<message>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_OPENING = ord("[")
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_ONE_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
_NOT_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
COMPARED_KEYS = 64  # keys that are compared with the name of a missing field
SMALL_BODY_BYTES = 64 * KIB  # larger bodies are not searched for the duplicate key

_ignored = IgnoredFields()  # shared by the process


def decode[Body: GenerationRequest](body: bytes, kind: type[Body], limits: Limits) -> Body:
    """Decode and check a request body.

    Raises:
      RequestError: the body is not JSON, has the wrong structure, or exceeds a limit. `param` is
        the field's path.
    """
    request = decode_form(body, kind, limits)
    check(request, limits)
    return request


def decode_form[Body: msgspec.Struct](body: bytes, kind: type[Body], limits: Limits) -> Body:
    """Decode a body without the checks that are specific to generation requests."""
    _check_counts(body, limits)
    _check_nesting(body, limits)
    try:
        request: Body = _decoder(kind).decode(body)
        _check_digits(body, limits)
        plain = _check_duplicates(body, kind)
    except msgspec.ValidationError as error:
        refusal = _validation_error(str(error), kind)
        raise _with_hint(refusal, body, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from error
    _ignored.tell(plain.keys() - _names(kind), _names(kind))
    return request


def _with_hint(error: RequestError, body: bytes, kind: type[msgspec.Struct]) -> RequestError:
    """Return the error, with a hint if a field is missing and a similar one was sent."""
    missing = error.param
    if str(error) != f"{missing} is required" or missing not in _names(kind):
        return error
    try:
        keys = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return error
    unknown = [key for key in keys if key not in _names(kind)][:COMPARED_KEYS]
    if nearest(missing, unknown) is None:
        return error
    return RequestError(f"{error}; the body has a field with a similar name", param=missing)


def fields_of(body: bytes, limits: Limits) -> set[str]:
    """Return the names of a body's fields, before the kind of request is known.

    Raises:
      RequestError: the body is not a JSON object.
    """
    return set(glance(body, dict[str, msgspec.Raw], limits))


def glance[T](body: bytes, kind: type[T], limits: Limits) -> T:
    """Decode a body as `kind`, before the kind of request is known.

    Raises:
      RequestError: the body is not JSON or has another structure.
    """
    _check_counts(body, limits)
    _check_nesting(body, limits)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), GenerationRequest) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from error


def check(request: GenerationRequest, limits: Limits) -> None:
    """Check a decoded request for limits, unsupported fields and contradictions.

    Raises:
      RequestError: a field is invalid. `param` is its path.
    """
    _check_limits(request, limits)
    request.check()


def check_converted(chat: ChatRequest, limits: Limits) -> None:
    """Check a chat converted from another protocol's request, which has passed `check`.

    Raises:
      RequestError: a field is invalid. `param` is its path.
    """
    _check_limits(chat, limits)
    demand(chat)
    chat.check_chat()


def _not_json(error: msgspec.DecodeError | UnicodeDecodeError) -> RequestError:
    detail = str(error) if isinstance(error, msgspec.DecodeError) else "not UTF-8"
    return RequestError(f"the body is not valid JSON: {detail}")


@cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=False)


def check_logprob_values(
    params: SamplingParams, prompt_lens: Sequence[int], context: int, limits: Limits
) -> None:
    """Check that the response cannot exceed the limit on the number of logprobs.

    Args:
      prompt_lens: tokens of each prompt.
      context: the maximum tokens of a prompt and its output together.

    Raises:
      RequestError: it can. `param` is "logprobs" or "prompt_logprobs".
    """
    per_output = 0 if params.logprobs is None else 1 + params.logprobs
    per_prompt = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
    values = 0
    for prompt_len in prompt_lens:
        room = max(context - prompt_len, 0)
        output_len = room if params.max_tokens is None else min(params.max_tokens, room)
        values += params.n * (output_len * per_output + prompt_len * per_prompt)
    if values > limits.logprob_values:
        param = "prompt_logprobs" if params.logprobs is None else "logprobs"
        raise RequestError(
            f"{param}: the response could have up to {values} logprobs (choices times tokens times "
            f"(alternatives + 1)), but the limit is {limits.logprob_values}; request fewer, or set "
            "max_tokens",
            param=param,
        )


def check_activation_bytes(
    params: SamplingParams, prompt_lens: Sequence[int], limits: EngineLimits
) -> None:
    """Check that the activations of all prompts fit the engine's limit for one request.

    Raises:
      RequestError: they do not. `param` is "return_activations".
    """
    sizes: list[tuple[int, int]] = []
    for prompt_len in prompt_lens:
        room = max(min(limits.context, limits.kv_tokens + 1) - prompt_len, 0)
        sizes.append((prompt_len, room if params.max_tokens is None else params.max_tokens))
    check_activations(params, sizes, limits.activations)


def _check_limits(request: GenerationRequest, limits: Limits) -> None:
    if not 1 <= request.num_samples <= limits.n:
        raise RequestError(f"n must be between 1 and {limits.n}", param="n")
    if isinstance(request, CompletionRequest):
        _check_prompts(request, limits)
        _between("logprobs", request.logprobs, limits.logprobs)
    if isinstance(request, ChatRequest):
        _check_chat(request, limits)
    if isinstance(request, DetokenizeRequest):
        _count("tokens", request.texts(), "texts", limits.prompts)
    if isinstance(request, PoolingRequest):
        _count(request.list_name, request.inputs, "texts", limits.prompts)
    _check_stops(request, limits)
    # Requests of other protocols are counted after their conversion to chats.
    kind = type(request) if isinstance(request, ChatRequest) else GenerationRequest
    for name, (row, what) in counted_fields(kind).items():
        value = getattr(request, name)
        if isinstance(value, list | dict):
            _count(name, value, what, getattr(limits, row))
    for word in request.bad_words or ():
        if len(word.encode()) > limits.bad_word_bytes:
            raise RequestError(
                f"bad_words: a string is longer than {limits.bad_word_bytes} bytes",
                param="bad_words",
            )
    _between("prompt_logprobs", request.prompt_logprobs, limits.logprobs)
    salt = request.cache_salt
    if salt is not None and not 1 <= len(salt) <= limits.cache_salt_chars:
        raise RequestError(
            f"cache_salt must have 1 to {limits.cache_salt_chars} characters", param="cache_salt"
        )
    _check_forms(request, limits)


def _check_forms(request: GenerationRequest, limits: Limits) -> None:
    for param, schema in _schemas(request):
        _check_schema(param, schema, limits)
    for param, grammar in _grammars(request):
        _bytes(param, grammar, limits.schema_bytes)
    for param, regex in _regexes(request):
        _bytes(param, regex, limits.regex_bytes)
    for param, choices in (
        ("guided_choice", request.guided_choice),
        ("structured_outputs.choice", _at(request.structured_outputs, "choice")),
    ):
        if isinstance(choices, list):
            _check_literals(param, choices, limits)


def _check_prompts(request: CompletionRequest, limits: Limits) -> None:
    num_prompts = len(request.prompts())
    if num_prompts > limits.prompts:
        raise RequestError(
            f"prompt has {num_prompts} prompts; at most {limits.prompts} are allowed per request",
            param="prompt",
        )
    if num_prompts * request.num_samples > limits.choices:
        raise RequestError(
            f"{num_prompts} prompts times n={request.num_samples} exceed the limit of "
            f"{limits.choices} choices per request",
            param="n",
        )


def _check_chat(request: ChatRequest, limits: Limits) -> None:
    for i, message in enumerate(request.messages):
        if message.tool_calls:
            _count(f"messages[{i}].tool_calls", message.tool_calls, "calls", limits.tools)
    _count("messages", list(attachments(request.messages)), "files", limits.files)
    if request.num_samples > limits.choices:
        raise RequestError(f"n must be at most {limits.choices}", param="n")
    _between("top_logprobs", request.top_logprobs, limits.logprobs)
    if request.chat_template_kwargs:
        _bytes("chat_template_kwargs", request.chat_template_kwargs, limits.template_kwargs_bytes)


def _check_stops(request: GenerationRequest, limits: Limits) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _count("stop", stops, "strings", limits.stop_strings)
    for text in stops:
        if len(text.encode()) > limits.stop_string_bytes:
            raise RequestError(
                f"stop: a string is longer than {limits.stop_string_bytes} bytes", param="stop"
            )


def _schemas(request: GenerationRequest) -> Iterator[tuple[str, Any]]:
    """Yield every JSON schema in a request, with its path."""
    yield "guided_json", request.guided_json
    yield "json_schema", request.json_schema
    yield "structured_outputs.json", _at(request.structured_outputs, "json")
    schema = _at(request.response_format, "json_schema", "schema")
    if schema is None:  # a shorter form
        yield "response_format", request.response_format
    yield "response_format.json_schema.schema", schema
    if not isinstance(request, ChatRequest):
        return
    for name, path in (("tools", ("function", "parameters")), ("functions", ("parameters",))):
        value = getattr(request, name)
        for i, tool in enumerate(value if isinstance(value, list) else [value]):
            yield ".".join((f"{name}[{i}]", *path)), _at(tool, *path)


def _grammars(request: GenerationRequest) -> Iterator[tuple[str, Any]]:
    for name in ("guided_grammar", "guided_choice", "ebnf", "grammar"):
        yield name, getattr(request, name)
    for name in ("grammar", "choice", "structural_tag"):
        yield f"structured_outputs.{name}", _at(request.structured_outputs, name)


def _regexes(request: GenerationRequest) -> Iterator[tuple[str, Any]]:
    for name in ("guided_regex", "regex", "stop_regex"):
        yield name, getattr(request, name)
    for name in ("regex", "whitespace_pattern"):
        yield f"structured_outputs.{name}", _at(request.structured_outputs, name)


def _at(value: Any, *path: str) -> Any:
    """Return the value at a path through nested objects; None if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _check_schema(param: str, schema: Any, limits: Limits) -> None:
    if schema is None:
        return
    text = _bytes(param, schema, limits.schema_bytes)
    if _depth(_brackets(text)) > limits.schema_depth:
        raise RequestError(
            f"{param} is nested deeper than {limits.schema_depth} levels", param=param
        )
    if len(text) > limits.literal_bytes:
        try:
            plain = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # the grammar compiler reports the error
        _check_literals(param, _schema_literals(plain), limits)


def _schema_literals(schema: Any) -> Iterator[Any]:
    """Yield the texts that outputs must repeat verbatim: keys, and strings in enum and const."""
    left: list[tuple[Any, bool]] = [(schema, False)]
    while left:
        value, demanded = left.pop()
        if demanded and isinstance(value, str):
            yield value
        elif isinstance(value, list):
            left += ((item, demanded) for item in value)
        elif isinstance(value, dict):
            yield from value
            left += ((v, demanded or k in ("enum", "const")) for k, v in value.items())


def _check_literals(param: str, texts: Iterable[Any], limits: Limits) -> None:
    """Reject long texts that an output must repeat verbatim.

    Each token mask tokenizes the rest of such a text again.
    """
    for text in texts:
        if isinstance(text, str) and len(data := text.encode()) > limits.literal_bytes:
            raise RequestError(
                f"{param}: a text of {len(data)} bytes; at most {limits.literal_bytes} are allowed",
                param=param,
            )


def _bytes(param: str, value: Any, limit: int) -> bytes:
    """Return a text as UTF-8, or another value as JSON.

    Raises:
      RequestError: the result exceeds the limit.
    """
    data = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    if len(data) > limit:
        raise RequestError(
            f"{param} has {len(data)} bytes; at most {limit} are allowed", param=param
        )
    return data


def _count(param: str, values: Any, what: str, limit: int) -> None:
    if values is not None and len(values) > limit:
        raise RequestError(
            f"{param} has {len(values)} {what}; at most {limit} are allowed", param=param
        )


def _between(param: str, value: int | None, limit: int) -> None:
    if value is not None and not 0 <= value <= limit:
        raise RequestError(f"{param} must be between 0 and {limit}", param=param)


def _validation_error(text: str, kind: type[msgspec.Struct]) -> RequestError:
    match = _PATH.match(text)
    assert match is not None
    message, path = match["message"], match["path"]
    missing = _MISSING_FIELD.match(message)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{path} is required", param=path)
    if not path:
        return RequestError(f"the body is not a valid request: {message}")
    if message.startswith("Invalid enum value"):  # the rest would quote the body
        roles = f"must be one of {', '.join(getattr(kind, 'ROLES', ()))}"
        message = roles if path.endswith("role") else "not one of the allowed values"
    elif path.endswith("role"):
        message = (
            f"must be one of {', '.join(ROLES)}, or another role of the chat template with 1 to 64 "
            "letters, digits or _ - ."
        )
    return RequestError(f"{path}: {message}", param=path)


def _check_counts(body: bytes, limits: Limits) -> None:
    """Reject bodies with many small values, which take long to parse for their size."""
    keys, values = body.count(b":"), body.count(b",") + 1  # upper bounds, which include strings
    if keys > limits.json_keys or values > limits.json_values:
        plain = _outside_strings(body)
        keys = int(np.count_nonzero(plain == ord(":")))
        values = int(np.count_nonzero(plain == ord(","))) + 1
    strings = body.count(b'"') // 2
    if strings > limits.json_strings:
        strings = _unescaped(body).count(b'"') // 2
    for what, number, most in (
        ("keys", keys, limits.json_keys),
        ("strings", strings, limits.json_strings),
        ("values", values, limits.json_values),
    ):
        if number > most:
            raise RequestError(f"the body has {number} {what}; at most {most} are allowed")


def _check_nesting(body: bytes, limits: Limits) -> None:
    """Reject bodies that could overflow the stack, or fill memory with empty containers."""
    if body.count(b"[") + body.count(b"{") <= min(limits.json_depth, limits.json_containers):
        return
    brackets = _brackets(body)
    containers = int(np.count_nonzero(brackets == _OPENING))
    if containers > limits.json_containers:
        raise RequestError(
            f"the body has {containers} arrays and objects; at most {limits.json_containers} are "
            "allowed"
        )
    if _depth(brackets) > limits.json_depth:
        raise RequestError(f"the body is nested deeper than {limits.json_depth} levels")


def _depth(brackets: np.ndarray) -> int:
    """Return the nesting depth of u8[N] brackets.

    For invalid JSON, this is at least the depth at which a parser fails.
    """
    steps = np.where(brackets == _OPENING, np.int8(1), np.int8(-1))
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _brackets(data: bytes) -> np.ndarray:
    """Return the brackets of a JSON text outside its strings, with "[" for "{", as u8[N]."""
    return _outside_strings(data, _NOT_BRACKETS)


def _outside_strings(data: bytes, ignored: bytes = b"") -> np.ndarray:
    """Return the characters of a JSON text outside its strings, without `ignored`, as u8[N]."""
    plain = _unescaped(data).translate(_ONE_KIND, ignored)
    chars = np.frombuffer(plain, np.uint8)
    quotes = chars == ord('"')
    num_quotes = np.cumsum(quotes, dtype=np.uint8)  # modulo 256: only the parity matters
    return chars[(num_quotes & 1 == 0) & ~quotes]


def _unescaped(data: bytes) -> bytes:
    """Return a JSON text without escaped quotes, so that every quote begins or ends a string."""
    return data.replace(b"\\\\", b"").replace(b'\\"', b"")


def _check_digits(body: bytes, limits: Limits) -> None:
    """Reject numbers with too many digits, because parsing time grows with their square."""
    too_many = b"0" * (limits.number_digits + 1)
    if too_many not in body.translate(_ONE_DIGIT):
        return
    if too_many in _outside_strings(body).tobytes().translate(_ONE_DIGIT):
        raise RequestError(f"the body has a number with more than {limits.number_digits} digits")


def _check_duplicates(body: bytes, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Reject objects with duplicate keys, because parsers disagree on which value wins.

    A parser keeps one of the values, so its result has fewer pairs than the text.

    Returns:
      The body, which is an object, as plain values.

    Raises:
      RequestError: a key is a duplicate. `param` is set if it is a field of the request itself.
      msgspec.DecodeError: a value outside the request's fields is not JSON.
    """
    try:
        plain = msgspec.json.decode(body)
        again = msgspec.json.encode(plain)
    except msgspec.ValidationError as error:  # the number is in an unknown field
        raise RequestError("the body has a number that is out of range") from error
    if b"\\u003" not in body:  # no escaped colons, so both texts have the same colons in strings
        same = body.count(b":") == again.count(b":")
    else:
        same = _num_pairs(body) == _num_pairs(again)
    if same:
        return plain
    param = _duplicate_field(body, kind) if len(body) <= SMALL_BODY_BYTES else None
    what = "a key" if param is None else param
    raise RequestError(f"{what} occurs twice in the same object", param=param)


def _num_pairs(data: bytes) -> int:
    return int((_outside_strings(data) == ord(":")).sum())


def _duplicate_field(body: bytes, kind: type[msgspec.Struct]) -> str | None:
    outermost: list[str] = []

    def keep(pairs: list[tuple[str, Any]]) -> None:
        outermost[:] = [name for name, _ in pairs]  # the last call is for the whole body

    json.loads(body, object_pairs_hook=keep, parse_int=str, parse_float=str)
    fields = kind.__struct_fields__
    return next((n for n, times in Counter(outermost).items() if times > 1 and n in fields), None)
