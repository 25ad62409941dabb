"""LiteLLM, as a library."""

from __future__ import annotations

import json

import litellm
import pytest
from test_client_openai import MESSAGES, WEATHER


@pytest.fixture(scope="module")
def at(server):
    """Return the arguments of every call."""
    return {"api_base": server.v1, "api_key": "none", "num_retries": 0, "max_retries": 0}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_streamed_chat_equals_the_whole_one(server, at, provider):
    asked = dict(
        model=f"{provider}/{server.model}", messages=MESSAGES, temperature=0, max_tokens=16, **at
    )
    whole = litellm.completion(**asked)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16
    chunks = list(litellm.completion(**asked, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].choices[0].finish_reason == "length"
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == text


async def test_async_call_works(server, at):
    answer = await litellm.acompletion(
        model=f"openai/{server.model}", messages=MESSAGES, max_tokens=4, **at
    )
    assert answer.choices[0].message.role == "assistant"


def test_text_completion_is_served(server, at):
    asked = dict(
        model=f"text-completion-openai/{server.model}", prompt="Once upon a time", temperature=0,
        max_tokens=8, **at,
    )  # fmt: skip
    whole = litellm.text_completion(**asked)
    assert whole.choices[0].finish_reason == "length"
    chunks = litellm.text_completion(**asked, stream=True)
    streamed = "".join(chunk.choices[0].text or "" for chunk in chunks)
    assert streamed == whole.choices[0].text != ""


def test_required_tool_is_called(server, at):
    answer = litellm.completion(
        model=f"openai/{server.model}", messages=MESSAGES, tools=[WEATHER], tool_choice="required",
        temperature=0, max_tokens=120, **at,
    )  # fmt: skip
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_errors_map_to_the_clients_exceptions(server, at):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(
            model=f"openai/{server.model}", messages=MESSAGES, temperature=1000, **at
        )
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/another", messages=MESSAGES, **at)


def test_embeddings_are_served(server, at):
    answer = litellm.embedding(model=f"openai/{server.model}", input=["a dog", "a cat"], **at)
    dog, cat = (item["embedding"] for item in answer.data)
    assert len(dog) == len(cat) > 1 and dog != cat


def test_responses_are_served(server, at):
    asked = dict(model=f"openai/{server.model}", input="Hi", temperature=0, max_output_tokens=12)
    whole = litellm.responses(**asked, **at)
    assert whole.status in ("completed", "incomplete") and whole.usage.output_tokens > 0
    events = list(litellm.responses(**asked, stream=True, **at))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output[0].content[0].text != ""
