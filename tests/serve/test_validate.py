"""Request bodies as bytes: valid JSON that is no request, and errors that never quote it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge_jax.errors import RequestError
from forge_serve.limits import Limits
from forge_serve.openai.requests import ChatRequest, CompletionRequest, GenerateRequest
from forge_serve.openai.validation import SMALL_BODY_BYTES, decode

SENTINEL = "leaked7331"
CHAT_HEAD = b'{"messages": [{"role": "user", "content": "a"}]'


def refusal(body: bytes, kind: Any = CompletionRequest) -> RequestError:
    with pytest.raises(RequestError) as refused:
        decode(body, kind, Limits())
    return refused.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "b", "prompt": "a"}', "prompt"),
        (b'{"prompt": "a", "max_tokens": 7, "max_tokens": 7}', "max_tokens"),
        (b'{"prompt": "a", "n": 1, "\\u006e": 2}', "n"),
        (b'{"prompt": "a:\\u003a:", "n": 1, "n": 2}', "n"),
        (b'{"prompt": "\\u003a", "n": 1, "n": 2}', "n"),
        (b'{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', None),
        (b'{"prompt": "a", "leaked7331": 1, "leaked7331": 2}', None),
        (b'{"prompt": "a", "unknown": [{"leaked7331": {"n": 1, "n": 1}}]}', None),
        (b'{"prompt": "a", "stream_options": {"n": 1, "n": 2}, "n": 1}', None),
    ],
)
def test_duplicate_key_is_rejected(body, param):
    error = refusal(body)
    assert error.param == param
    assert "twice" in str(error)
    assert SENTINEL not in str(error)


def test_duplicate_key_in_a_message_is_rejected():
    error = refusal(
        b'{"messages": [{"role": "user", "role": "system", "content": "a"}]}', ChatRequest
    )
    assert error.param is None and "twice" in str(error)


def test_duplicate_key_in_a_large_body_is_rejected():
    filler = b'a:\\u003a\\\\\\"' * SMALL_BODY_BYTES
    assert decode(b'{"prompt": "' + filler + b'", "n": 1}', CompletionRequest, Limits()).n == 1
    error = refusal(b'{"prompt": "' + filler + b'", "n": 1, "n": 2}')
    assert error.param is None and "twice" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "a:b",
        "\\u003a",
        "\\u003A:",
        "\\\\u003a",
        '\\"n\\": 1, \\"n\\": 2',
        "\\\\",
        '\\\\\\"',
        "{[:]}",
    ],
)
def test_key_like_text_in_a_string_is_no_key(text):
    body = f'{{"prompt": "{text}", "max_tokens": 1, "unknown": {{"{text}": "{text}"}}}}'.encode()
    assert decode(body, CompletionRequest, Limits()).prompt == json.loads(f'"{text}"')


@pytest.mark.parametrize(
    ("field", "literal", "param"),
    [
        ("max_tokens", "true", "max_tokens"),
        ("max_tokens", "1.5", "max_tokens"),
        ("max_tokens", "1e400", "max_tokens"),
        ("max_tokens", "NaN", None),
        ("max_tokens", "9" * 100_000, "max_tokens"),
        ("max_tokens", f'"{"9" * 100_000}"', "max_tokens"),
        ("max_tokens", "[]", "max_tokens"),
        ("max_tokens", f'"{SENTINEL}"', "max_tokens"),
        ("temperature", "true", "temperature"),
        ("temperature", f'"{SENTINEL}"', "temperature"),
        ("temperature", "Infinity", None),
        ("temperature", "1" + "0" * 100_000, "temperature"),
        ("logit_bias", '{"1": true}', "logit_bias[...]"),
        ("logit_bias", f'{{"{SENTINEL}": 1}}', "logit_bias"),
        ("stop", f'["a", {{"{SENTINEL}": 1}}]', "stop[1]"),
        ("stop_token_ids", "[1, true]", "stop_token_ids[1]"),
        ("stop_token_ids", "[1, 1.5]", "stop_token_ids[1]"),
        ("user", '"\\ud800"', None),
        ("user", '"\\udc00\\ud800"', None),
        ("unknown", '"\\ud800"', None),
        ("unknown", "9" * 100_000, None),
        ("stream", f'"{SENTINEL}"', "stream"),
        ("stream_options", f'{{"include_usage": "{SENTINEL}"}}', "stream_options.include_usage"),
    ],
)
def test_values_of_the_wrong_kind_are_rejected(field, literal, param):
    error = refusal(f'{{"prompt": "{SENTINEL}", "{field}": {literal}}}'.encode())
    assert error.param == param
    assert SENTINEL not in str(error) and len(str(error)) < 200


@pytest.mark.parametrize("literal", ['"nan"', '"-inf"', '"infinity"'])
def test_text_of_a_non_finite_number_is_rejected(literal):
    request = decode(f'{{"prompt": "a", "top_p": {literal}}}'.encode(), CompletionRequest, Limits())
    with pytest.raises(RequestError) as refused:
        request.sampling_params()
    assert refused.value.param == "top_p"


@pytest.mark.parametrize(
    "role",
    [f"{SENTINEL}!", f"x - at `$.{SENTINEL}`", f"`{SENTINEL}`", "user ", "user\n", "", "a" * 65],
)
def test_unknown_role_is_not_quoted(role):
    body = json.dumps({"messages": [{"role": role, "content": "a"}]}).encode()
    error = refusal(body, ChatRequest)
    assert error.param == "messages[0].role"
    assert str(error) == (
        "messages[0].role: must be one of system, user, assistant, tool, developer, or another "
        "role of the chat template with 1 to 64 letters, digits or _ - ."
    )


def test_empty_containers_cannot_exhaust_memory():
    body = b'{"prompt": "a", "unknown": [' + b"[]," * 1_000_000 + b"[]]}"
    assert "arrays and objects" in str(refusal(body))
    quoted = b'{"prompt": "' + b"[]{}" * 100_000 + b'"}'
    assert decode(quoted, GenerateRequest, Limits()).prompt == "[]{}" * 100_000
    escaped = b'{"prompt": "' + b'\\"[\\\\' * 100_000 + b'"}'
    assert decode(escaped, GenerateRequest, Limits()).prompt == '"[\\' * 100_000


def test_number_with_many_digits_counts_toward_the_size_limit():
    for name in ("chat_template_kwargs", "tools", "response_format"):
        body = CHAT_HEAD + b', "%b": {"a": %b}}' % (name.encode(), b"9" * 400)
        if name == "chat_template_kwargs":
            assert decode(body, ChatRequest, Limits()).chat_template_kwargs is not None
        else:
            assert name in (refusal(body, ChatRequest).param or "")


@pytest.mark.parametrize(
    ("kind", "start", "wins", "param"),
    [
        (
            ChatRequest,
            '"messages": [{"role": "user", "content": "a"}]',
            "max_completion_tokens",
            "max_tokens",
        ),
        (GenerateRequest, '"prompt": "a"', "max_tokens", "max_new_tokens"),
    ],
)
def test_overridden_limit_is_still_range_checked(kind, start, wins, param):
    body = f'{{{start}, "{wins}": 3, "{param}": -1}}'
    assert refusal(body.encode(), kind).param == param
