"""LangChain's ChatOpenAI and OpenAIEmbeddings."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def chat(server):
    return ChatOpenAI(
        base_url=server.v1, api_key="none", model=server.model, temperature=0, max_tokens=160,
        max_retries=0,
    )  # fmt: skip


def test_streamed_chat_equals_the_whole_one(chat):
    chat = chat.model_copy(update={"max_tokens": 16})
    whole = chat.invoke("Tell me a story about a dog.")
    assert isinstance(whole, AIMessage) and whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 16
    chunks = list(chat.stream("Tell me a story about a dog."))
    assert "".join(chunk.content for chunk in chunks) == whole.content != ""


def test_required_tool_is_called(chat):
    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    talk = [HumanMessage("What is the weather?")]
    answer = bound.invoke(talk)
    [call] = answer.tool_calls
    assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str)
    chunks = None
    for chunk in bound.stream(talk):
        chunks = chunk if chunks is None else chunks + chunk
    assert [c["args"] for c in chunks.tool_calls] == [call["args"]]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    after = chat.model_copy(update={"max_tokens": 4}).invoke([*talk, answer, result])
    assert isinstance(after, AIMessage)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_returns_structured_output(chat, method):
    person = chat.with_structured_output(Person, method=method).invoke("Who is John, who is 30?")
    assert isinstance(person, Person)


def test_responses_are_served(server):
    chat = ChatOpenAI(
        base_url=server.v1, api_key="none", model=server.model, temperature=0, max_tokens=160,
        max_retries=0, use_responses_api=True,
    )  # fmt: skip
    whole = chat.invoke("Tell me a story about a dog.")
    chunks = list(chat.stream("Tell me a story about a dog."))
    assert "".join(chunk.text for chunk in chunks) == whole.text != ""
    answer = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("The weather?")
    [call] = answer.tool_calls
    assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str)


def test_embeddings_are_served(server):
    embeddings = OpenAIEmbeddings(
        base_url=server.v1, api_key="none", model=server.model, check_embedding_ctx_length=False
    )
    one = embeddings.embed_query("a dog")
    two = embeddings.embed_documents(["a dog", "a cat"])
    assert two[0] == pytest.approx(one, abs=1e-5) and len(two[1]) == len(one)
