"""OpenAI's own client: parsing, streaming, accumulating and errors."""

from __future__ import annotations

import base64
import json

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests import pdfs

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
    name: str = Field(max_length=12)
    age: int


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(client, server):
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_streamed_chat_equals_the_whole_one(client, server):
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


def test_stream_helper_works(client, server):
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


def test_chat_logprobs_are_returned(client, server):
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


def test_required_tool_is_called(client, server):
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


def test_answer_is_parsed_into_a_model(client, server):
    answer = client.chat.completions.parse(
        model=server.model, messages=MESSAGES, response_format=Person, temperature=0, max_tokens=200
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_truncated_answer_is_not_parsed(client, server):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=server.model, messages=MESSAGES, response_format=Person, max_tokens=2
        )


def test_completions_are_served(client, server):
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


def test_prompt_is_scored(client, server):
    answer = client.completions.create(
        model=server.model, prompt="Once upon a time", max_tokens=1, echo=True, logprobs=1
    )
    scored = answer.choices[0].logprobs
    assert scored.token_logprobs[0] is None and all(p <= 0 for p in scored.token_logprobs[1:])
    lengths = {len(scored.tokens), len(scored.token_logprobs), len(scored.text_offset)}
    assert len(lengths) == 1 and len(scored.tokens) == answer.usage.total_tokens
    assert answer.choices[0].text.startswith("Once upon a time")


def test_files_are_sent_in_chats_and_responses(client, server):
    data = base64.b64encode(pdfs.text_pdf("The dog ran home.")).decode()
    url = f"data:application/pdf;base64,{data}"
    question = "File a.pdf:\n\nThe dog ran home.\n\nGo on."
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": url}}
    found = [
        client.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": content}], max_tokens=8,
            temperature=0,
        )
        for content in (question, [file, {"type": "text", "text": "Go on."}])
    ]  # fmt: skip
    assert found[0].choices == found[1].choices
    assert found[0].usage.prompt_tokens == found[1].usage.prompt_tokens

    file = {"type": "input_file", "filename": "a.pdf", "file_data": url}
    parts = [file, {"type": "input_text", "text": "Go on."}]
    answer = client.responses.create(
        model=server.model, input=[{"role": "user", "content": parts}], max_output_tokens=8,
        temperature=0,
    )  # fmt: skip
    assert answer.output_text == found[0].choices[0].message.content
    [item] = client.responses.input_items.list(answer.id).data
    assert item.content[0].type == "input_file" and item.content[0].file_data == url


def test_errors_map_to_the_clients_exceptions(client, server, closed_server):
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


async def test_async_client_works(server):
    async with AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=server.model, messages=MESSAGES, max_tokens=5, stream=True
        )
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
        assert reasons[-1] in ("length", "stop")


def test_embeddings_are_served(client, server):
    answer = client.embeddings.create(model=server.model, input=["a dog", "a cat"])  # as base64
    assert answer.object == "list" and [item.index for item in answer.data] == [0, 1]
    dog, cat = (item.embedding for item in answer.data)
    assert sum(x * x for x in dog) == pytest.approx(1.0, abs=1e-4) and dog != cat
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    plain = client.embeddings.create(model=server.model, input="a dog", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(dog, abs=1e-5)
    tokens = server.post("/tokenize", {"prompt": "a dog"})["tokens"]
    same = client.embeddings.create(model=server.model, input=tokens)
    assert same.data[0].embedding == pytest.approx(dog, abs=1e-5)
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=server.model, input="a dog", dimensions=3)
    assert refused.value.param == "dimensions"


# The client's stream helper requires streams that end by themselves.
RESPONSE = dict(
    input="Tell me a story.", temperature=0, max_output_tokens=200, extra_body={"stop": "."}
)
FLAT_WEATHER = {"type": "function", **WEATHER["function"]}


def test_streamed_stored_and_whole_responses_are_equal(client, server):
    whole = client.responses.create(model=server.model, **RESPONSE)
    assert whole.object == "response" and whole.status == "completed"
    assert whole.output_text and 0 < whole.usage.output_tokens < 200
    with client.responses.stream(model=server.model, **RESPONSE) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == final.output_text == whole.output_text

    for made in (whole, final):
        kept = client.responses.retrieve(made.id)
        assert kept.output_text == whole.output_text and kept.usage == made.usage
    [item] = client.responses.input_items.list(whole.id)
    assert item.content[0].text == RESPONSE["input"]
    counted = client.responses.input_tokens.count(model=server.model, input=RESPONSE["input"])
    assert counted.input_tokens == whole.usage.input_tokens
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.retrieve(whole.id)
    assert refused.value.code == "response_not_found"


def test_response_is_parsed_into_a_model(client, server):
    parsed = client.responses.parse(
        model=server.model, input="Who?", text_format=Person, temperature=0, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Person)


def test_response_conversation_calls_a_tool(client, server):
    asked = dict(
        model=server.model, tools=[FLAT_WEATHER], temperature=0, max_output_tokens=120,
        parallel_tool_calls=False,
    )  # fmt: skip
    first = client.responses.create(input="The weather?", tool_choice="required", **asked)
    [call] = first.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert isinstance(json.loads(call.arguments)["city"], str)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(
        input=[result], previous_response_id=first.id, tool_choice="none", **asked
    )
    assert second.previous_response_id == first.id and second.output_text
    kinds = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]


def test_background_response_can_be_cancelled(client, server):
    asked = dict(model=server.model, input="Hi", background=True, extra_body={"ignore_eos": True})
    made = client.responses.create(**asked, max_output_tokens=700)
    assert made.status == "queued"
    gone = client.responses.cancel(made.id)
    assert gone.status in ("cancelled", "incomplete")
    assert client.responses.retrieve(made.id).status == gone.status


async def test_async_client_streams_a_response(server):
    async with AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        stream = await client.responses.create(model=server.model, **RESPONSE, stream=True)
        kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.completed"
