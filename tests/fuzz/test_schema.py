"""Agreement of the served schema and the server on every field with every odd value."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import msgspec
import pytest
from bodies import ENDPOINTS, ODD, Case, cases, dump, matrix, places, put

from forge_jax.engine.validation import check_token_ids
from forge_jax.errors import RequestError
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.request import Request
from forge_serve.anthropic.requests import MessagesRequest
from forge_serve.anthropic.translation import chat_request
from forge_serve.config import ServerConfig
from forge_serve.limits import Limits
from forge_serve.openai import validation as validate
from forge_serve.openai.content import attachments, inline
from forge_serve.openai.embeddings import PoolingRequest
from forge_serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerationRequest,
    TokenizeRequest,
)
from forge_serve.openapi.schema import About
from forge_serve.responses_api.requests import ResponsesRequest
from forge_serve.server.app import make_app
from forge_serve.server.openapi import document
from forge_serve.server.service import Service

ABOUT = About(model="m", max_model_len=2**31 - 1, vocab_size=1000, limits=Limits(), api_keys=False)
# The only reasons to refuse a body that its schema allows, because a schema of single values cannot
# express them. Each is a message.
EXCUSES = re.compile(
    r"best_of must equal n|must equal|n must be 1 on this endpoint"
    r"|stream_options requires stream|cannot be combined|is larger than max_tokens"
    r"|top_logprobs requires logprobs|continue_final_message requires|the schema is not valid JSON"
    r"|the structural tag is not valid JSON|the structural tag must be an object"
    r"|the schema must be an object|nested deeper than \d+ levels|has \d+ bytes; at most"
    r"|a string is longer than|exceed the limit of \d+ choices|tool_choice: required without tools"
    r"|tool_choice must name one of the tools"
    r"|occurs twice|a number with more than \d+ digits|arrays and objects; at most|out of range"
    r"|this server has no such model|bad_words: a string is longer than"
    r"|messages must not be empty|must have one text or as many"
)
SMALL = [odd for odd in ODD if len(dump(odd)) < 5_000]


@cache
def schemas() -> dict[str, Any]:
    return document(make_app(Service(ServerConfig())).router, ABOUT)


def inlined(schema: Any, components: dict[str, Any]) -> Any:
    """Inline the references of a schema, so that a validator does not resolve them again."""
    if isinstance(schema, list):
        return [inlined(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inlined(components[schema["$ref"].rpartition("/")[2]], components)
    return {key: inlined(value, components) for key, value in schema.items()}


@cache
def judge(path: str) -> jsonschema.protocols.Validator:
    body = schemas()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = inlined(body["schema"], schemas()["components"]["schemas"])
    return jsonschema.Draft202012Validator(schema)


def refusal(case: Case) -> RequestError | None:
    """Return the error for a body before it reaches the model."""
    kind = ENDPOINTS[case.path]
    try:
        request = validate.decode(case.body, kind, ABOUT.limits)
        if request.model not in (None, ABOUT.model):
            raise RequestError("this server has no such model", param="model")
        if isinstance(request, MessagesRequest):
            request = chat_request(request)
            validate.check_converted(request, ABOUT.limits)
        if isinstance(request, ResponsesRequest):
            request = request.chat(None, kept=True)
            validate.check_converted(request, ABOUT.limits)
        request.check_sampling()
        check_truncation(request)
        if isinstance(request, PoolingRequest):
            check_ids([each.given for each in request.inputs])
            return None
        if isinstance(request, TokenizeRequest) and request.prompt is not None:
            asked = request.asked()
            assert isinstance(asked, CompletionRequest) and asked.prompts()
            return None
        if isinstance(request, ChatRequest):
            inline(request.messages, dict.fromkeys(attachments(request.messages), ""))
            request.template_messages()
        if isinstance(request, CompletionRequest | GenerateRequest):
            whole = isinstance(request, GenerateRequest)
            check_ids([request.prompt] if whole else request.prompts())
    except RequestError as error:
        return error
    return None


def check_truncation(request: GenerationRequest) -> None:
    cuts = not isinstance(request, TokenizeRequest | DetokenizeRequest)
    if cuts and (request.truncate_prompt_tokens or 0) > ABOUT.max_model_len:
        raise RequestError("truncate_prompt_tokens is more than the context")


def check_ids(prompts: Sequence[str | list[int]]) -> None:
    """Apply the engine's check of prompts that are token ids."""
    for prompt in prompts:
        if isinstance(prompt, list):
            ids = tuple(prompt)
            asked = Request(request_id="", prompt_token_ids=ids, params=SamplingParams())
            check_token_ids(asked, ABOUT.vocab_size)


def read(body: bytes) -> Any:
    """Return strict JSON, or None."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        value = json.loads(body.decode(), parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # fails for lone surrogates
    except (ValueError, RecursionError):
        return None
    return value


def meant(case: Case) -> Any:
    """Return the same body with numbers and booleans in their own types."""
    kind = ENDPOINTS[case.path]
    request = msgspec.json.Decoder(kind, strict=False).decode(case.body)
    return msgspec.json.decode(msgspec.json.encode(request))


def disagreement(case: Case) -> str | None:
    body, refused = read(case.body), refusal(case)
    if refused is not None:
        if body is None or EXCUSES.search(str(refused)) or not judge(case.path).is_valid(body):
            return None
        return f"the schema allows what is refused: {refused}"
    if body is None:
        return "what is no JSON is not refused"
    valid = judge(case.path).is_valid
    return None if valid(body) or valid(meant(case)) else "the schema refuses what is allowed"


def disagreements(found: list[Case]) -> list[str]:
    wrong = []
    for case in found:
        why = disagreement(case)
        if why is not None:
            wrong.append(f"{case.path} {case.body[:300]!r}: {why}")
    return wrong


def test_schema_and_server_agree_on_odd_bodies():
    rng = random.Random(5)
    tried = [
        Case(path, dump(put(kind, place.path, odd)).encode())
        for path, kind in ENDPOINTS.items()
        if not path.startswith("/v1/") or path.removeprefix("/v1") not in ENDPOINTS
        for place in places(kind)
        for odd in rng.sample(SMALL, 3)
    ]
    wrong = disagreements(tried)
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.fuzz
def test_schema_and_server_agree_on_odd_values_of_every_field():
    wrong = disagreements([*matrix(), *cases(seed=7, number=20_000)])
    assert not wrong, "\n".join(wrong[:50])


def test_checker_detects_a_contradicting_schema(monkeypatch):
    path = "/v1/completions"
    fields = judge(path).schema["properties"]
    good = Case(path, b'{"prompt": "a", "temperature": 1.5}')
    assert disagreement(good) is None
    monkeypatch.setitem(fields, "temperature", {"maximum": 1})
    assert disagreement(good) == "the schema refuses what is allowed"
    monkeypatch.setitem(fields, "temperature", {})
    bad = Case(path, b'{"prompt": "a", "temperature": 1000}')
    assert "temperature must be" in (disagreement(bad) or "")
