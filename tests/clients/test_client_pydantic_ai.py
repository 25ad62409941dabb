"""Pydantic AI: an agent with a typed result, and one that calls a tool."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


SETTINGS = {"temperature": 0.0, "max_tokens": 160}


@pytest.fixture
def model(server):
    provider = OpenAIProvider(base_url=server.v1, api_key="none")
    return OpenAIChatModel(server.model, provider=provider)


@pytest.mark.parametrize("form", [NativeOutput, ToolOutput])
async def test_agent_answers_with_a_model(model, form):
    agent = Agent(model, output_type=form(Person), model_settings=SETTINGS, retries=0)
    result = await agent.run("John is 30 years old.")
    assert isinstance(result.output, Person)
    assert result.usage.output_tokens > 0


async def test_agent_calls_a_tool(model):
    agent = Agent(model, output_type=ToolOutput(Person), model_settings=SETTINGS, retries=3)
    called = []

    @agent.tool_plain
    def look_up(name: str = Field(max_length=8)) -> str:
        """The age of somebody."""
        called.append(name)
        return "30"

    # Either tool may be required next; each call must be valid.
    async with agent.iter("How old is John?") as run:
        async for _ in run:
            if called:
                break
    assert called or isinstance(run.result.output, Person)


async def test_agent_streams_text(model):
    agent = Agent(model, model_settings={"temperature": 0.0, "max_tokens": 12})
    whole = (await agent.run("Tell me a story.")).output
    async with agent.run_stream("Tell me a story.") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    assert "".join(pieces) == whole != ""
