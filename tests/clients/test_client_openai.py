"""OpenAI's own client: what it parses, streams, accumulates and raises."""

from __future__ import annotations

import json

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Tell me a story about a dog."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        yield client


def test_models(client, server):
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_chat_is_the_same_streamed_and_whole(client, server):
    asked = dict(model=server.model, messages=MESSAGES, temperature=0, max_completion_tokens=24)
    whole = client.chat.completions.create(**asked)
    assert whole.object == "chat.completion" and whole.model == server.model
    [choice] = whole.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24

    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content != ""
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert chunks[-1].usage.completion_tokens == 24 and not chunks[-1].choices


def test_the_helper_for_streams(client, server):
    asked = dict(model=server.model, messages=MESSAGES, temperature=0, max_tokens=200, stop=".")
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    whole = client.chat.completions.create(**asked)
    assert final.choices[0].message.content == whole.choices[0].message.content != ""


def test_samples_are_choices(client, server):
    answer = client.chat.completions.create(
        model=server.model, messages=MESSAGES, n=3, seed=1, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_logprobs_of_a_chat(client, server):
    answer = client.chat.completions.create(
        model=server.model, messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 6
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == (
        answer.choices[0].message.content
    )
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(t.logprob for t in token.top_logprobs) <= 0


def test_a_tool_that_must_be_called_is_called(client, server):
    asked = dict(
        model=server.model, messages=MESSAGES, tools=[WEATHER], tool_choice="required",
        parallel_tool_calls=False, temperature=0, max_tokens=120,
    )  # fmt: skip
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)

    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    [streamed] = final.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert streamed.function.name == call.function.name

    talk = [
        *MESSAGES,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    after = client.chat.completions.create(model=server.model, messages=talk, max_tokens=4)
    assert after.choices[0].finish_reason in ("length", "stop")


def test_an_answer_is_parsed_into_a_model(client, server):
    answer = client.chat.completions.parse(
        model=server.model, messages=MESSAGES, response_format=Person, temperature=0, max_tokens=200
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_an_answer_that_was_cut_is_not_parsed(client, server):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=server.model, messages=MESSAGES, response_format=Person, max_tokens=2
        )


def test_completions(client, server):
    asked = dict(model=server.model, prompt="Once upon a time", temperature=0, max_tokens=12)
    whole = client.completions.create(**asked)
    assert whole.object == "text_completion" and whole.choices[0].finish_reason == "length"
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)
    )
    assert streamed == whole.choices[0].text != ""
    several = client.completions.create(**{**asked, "prompt": ["Once upon a time", "The dog"]})
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.usage.completion_tokens == 24


def test_a_prompt_is_scored(client, server):
    answer = client.completions.create(
        model=server.model, prompt="Once upon a time", max_tokens=1, echo=True, logprobs=1
    )
    scored = answer.choices[0].logprobs
    assert scored.token_logprobs[0] is None and all(p <= 0 for p in scored.token_logprobs[1:])
    lengths = {len(scored.tokens), len(scored.token_logprobs), len(scored.text_offset)}
    assert len(lengths) == 1 and len(scored.tokens) == answer.usage.total_tokens
    assert answer.choices[0].text.startswith("Once upon a time")


def test_errors_are_the_clients_own(client, server, closed_server):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=server.model, messages=MESSAGES, temperature=1000)
    assert refused.value.param == "temperature" and refused.value.status_code == 400
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=server.model, prompt="a", max_tokens=10**6)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="another", prompt="a")
    assert refused.value.code == "model_not_found" and refused.value.param == "model"
    late = {"timeout": 1e-4}
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(
            model=server.model, prompt="a", max_tokens=200, extra_body={**late, "ignore_eos": True}
        )
    assert refused.value.status_code == 504 and refused.value.code == "deadline_exceeded"
    assert refused.value.request_id
    with OpenAI(base_url=closed_server.v1, api_key="another", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"


async def test_the_asynchronous_client(server):
    async with AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=server.model, messages=MESSAGES, max_tokens=5, stream=True
        )
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
        assert reasons[-1] in ("length", "stop")


def test_embeddings(client, server):
    server.needs("/v1/embeddings")
    answer = client.embeddings.create(model=server.model, input=["a dog", "a cat"])
    assert [item.index for item in answer.data] == [0, 1]
    size = len(answer.data[0].embedding)
    plain = client.embeddings.create(model=server.model, input="a dog", encoding_format="float")
    assert size == len(plain.data[0].embedding) > 1
    assert answer.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-5)


def test_responses(client, server):
    server.needs("/v1/responses")
    asked = dict(model=server.model, input="Tell me a story.", temperature=0, max_output_tokens=24)
    whole = client.responses.create(**asked)
    assert whole.object == "response" and whole.status in ("completed", "incomplete")
    assert whole.usage.output_tokens <= 24
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
    assert final.output_text == whole.output_text
    parsed = client.responses.parse(
        model=server.model, input="Who?", text_format=Person, temperature=0, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Person)
