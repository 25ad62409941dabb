"""Anthropic's own client."""

from __future__ import annotations

import base64
import json
import re

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, DefaultHttpxClient, beta_tool
from anthropic.types import message_create_params, message_param
from anthropic.types.beta import message_create_params as beta_params
from conftest import KEY

from tests import pdfs
from tests.server_process import ROOT

MESSAGES = [{"role": "user", "content": "Tell me a story about a dog."}]
GREEDY = {"temperature": 0}  # no longer an argument of the client
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def client(server):
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_streamed_message_equals_the_whole_one(client, server):
    asked = dict(model=server.model, messages=MESSAGES, max_tokens=24, extra_body=GREEDY)
    whole = client.messages.create(**asked, system="You are a poet.")
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", server.model)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 24
    [block] = whole.content
    assert block.type == "text"
    with client.messages.stream(**asked, system="You are a poet.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text != ""
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 24
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


def test_stop_sequence_ends_the_message(client, server):
    asked = dict(model=server.model, messages=MESSAGES, max_tokens=64, extra_body=GREEDY)
    text = client.messages.create(**asked).content[0].text
    word = text.split()[2]
    stopped = client.messages.create(**asked, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == text.partition(word)[0]


def test_count_tokens_matches_usage(client, server):
    counted = client.messages.count_tokens(model=server.model, messages=MESSAGES)
    answer = client.messages.create(model=server.model, messages=MESSAGES, max_tokens=1)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens > 0


def test_required_tool_is_called(client, server):
    asked = dict(
        model=server.model, messages=MESSAGES, tools=[WEATHER], max_tokens=120, extra_body=GREEDY,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    answer = client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    [call] = answer.content
    assert call.type == "tool_use" and call.name == "get_weather"
    assert isinstance(call.input["city"], str)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == call.input
    called = call.model_dump(include={"type", "id", "name", "input"})
    talk = [
        *MESSAGES,
        {"role": "assistant", "content": [called]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}],
        },
    ]
    after = client.messages.create(model=server.model, messages=talk, tools=[WEATHER], max_tokens=4)
    assert after.role == "assistant"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_sends_the_whole_conversation(server, stream):
    sent, statuses, cities = [], [], []
    hooks = {
        "request": [lambda request: sent.append(json.loads(request.read()))],
        "response": [lambda response: statuses.append(response.status_code)],
    }

    @beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
          city: its name.
        """
        cities.append(city)
        return "sunny"

    with Anthropic(
        base_url=server.url,
        api_key="none",
        max_retries=0,
        http_client=DefaultHttpxClient(event_hooks=hooks),
    ) as client:
        runner = client.beta.messages.tool_runner(
            model=server.model,
            messages=MESSAGES,
            system="You are a poet.",
            tools=[get_weather],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_tokens=200,
            max_iterations=2,
            stream=stream,
            extra_body=GREEDY,
        )
        last = runner.until_done()
    assert last.stop_reason == "tool_use" and last.content[0].id.startswith("toolu_")
    assert statuses == [400, 200, 200]
    assert sent[0]["thread"] == {"type": "create"}
    whole = sent[2]
    assert "thread" not in whole
    assert whole["system"] == "You are a poet." and len(whole["tools"]) == 1
    assert [message["role"] for message in whole["messages"]] == ["user", "assistant", "user"]
    _, called, answered = whole["messages"]
    assert called["content"][0]["input"]["city"] == cities[0]
    assert answered["content"][0]["tool_use_id"] == called["content"][0]["id"]


def test_system_message_is_accepted_among_the_others(client, server):
    note: message_param.MessageParam = {"role": "system", "content": "Speak of cats."}

    def count(messages, **more):
        counted = client.messages.count_tokens(model=server.model, messages=messages, **more)
        return counted.input_tokens

    assert count([*MESSAGES, note]) > count(MESSAGES)
    both = count([note, *MESSAGES], system="You are a poet.")
    assert both == count(MESSAGES, system="You are a poet.\n\nSpeak of cats.")


def test_every_client_parameter_is_supported_or_documented(server):
    """Body fields only: `betas` and two ids are headers."""
    page = (ROOT / "docs/messages.md").read_text()
    documented = set(re.findall(r"`(\w+)[`.]", page))
    schema = server.document["components"]["schemas"]["MessagesRequest"]
    names = {
        *message_create_params.MessageCreateParamsBase.__annotations__,
        *beta_params.MessageCreateParamsBase.__annotations__,
    }
    headers = {"betas", "user_profile_id", "workspace_id"}
    assert names - headers <= documented | set(schema["properties"])


def test_streamed_tool_call_has_its_arguments_in_pieces(client, server):
    asked = dict(
        model=server.model, messages=MESSAGES, tools=[WEATHER], max_tokens=120, extra_body=GREEDY,
        tool_choice={"type": "tool", "name": "get_weather"},
    )  # fmt: skip
    started, pieces = [], []
    for event in client.messages.create(**asked, stream=True):
        if event.type == "content_block_start":
            started.append(event.content_block)
        elif event.type == "content_block_delta":
            assert event.delta.type == "input_json_delta"
            pieces.append(event.delta.partial_json)
    [block] = started
    assert (block.type, block.name, block.input) == ("tool_use", "get_weather", {})
    assert len(pieces) > 1 and isinstance(json.loads("".join(pieces))["city"], str)


def test_answer_follows_the_output_format(client, server):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = client.messages.create(
        model=server.model, messages=MESSAGES, max_tokens=200,
        extra_body={**GREEDY, "output_config": form},
    )  # fmt: skip
    assert answer.stop_reason == "end_turn"
    assert set(json.loads(answer.content[0].text)) == {"name", "age"}


def test_block_content_counts_as_its_text(client, server):
    def count(system, content, **more):
        turn = {"role": "user", "content": content}
        counted = client.messages.count_tokens(
            model=server.model, messages=[turn], system=system, **more
        )
        return counted.input_tokens

    text, blocks = "You are a poet.", [{"type": "text", "text": "You are a poet."}]
    assert count(text, text) == count(blocks, blocks) > count(text, "a")
    assert count(text, text, tools=[WEATHER]) > count(text, text)


def test_document_counts_as_its_text(client, server):
    data = base64.b64encode(pdfs.text_pdf("The dog ran home.")).decode()
    pdf = {"type": "base64", "media_type": "application/pdf", "data": data}
    text = {"type": "text", "media_type": "text/plain", "data": "The dog ran home."}
    counts = {
        client.messages.count_tokens(
            model=server.model, messages=[{"role": "user", "content": content}]
        ).input_tokens
        for content in (
            "File a:\n\nThe dog ran home.",
            [{"type": "document", "title": "a", "source": pdf}],
            [{"type": "document", "title": "a", "source": text}],
        )
    }
    assert len(counts) == 1


def test_assistant_prefill_is_continued(client, server):
    begun = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    asked = dict(model=server.model, max_tokens=8, extra_body=GREEDY)
    answer = client.messages.create(**asked, messages=begun)
    fresh = client.messages.create(**asked, messages=MESSAGES)
    assert answer.content[0].text != fresh.content[0].text


async def test_async_client_works(server):
    async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked = dict(model=server.model, messages=MESSAGES, max_tokens=8)
        async with client.messages.stream(**asked) as stream:
            pieces = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
    assert "".join(pieces) == final.content[0].text and final.usage.output_tokens <= 8


def test_errors_map_to_the_clients_exceptions(client, server, closed_server):
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(model="another", messages=MESSAGES, max_tokens=1)
    assert refused.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(
            model=server.model, messages=MESSAGES, max_tokens=1, extra_body={"temperature": 900}
        )
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    asked = dict(model=closed_server.model, messages=MESSAGES, max_tokens=1)
    stranger = Anthropic(base_url=closed_server.url, api_key="another", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**asked)
    with Anthropic(base_url=closed_server.url, api_key=KEY, max_retries=0) as known:
        assert known.messages.create(**asked).usage.output_tokens == 1
