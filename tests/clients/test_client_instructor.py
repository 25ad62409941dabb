"""Instructor: structured extraction."""

from __future__ import annotations

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor_extracts_a_model(server, mode):
    with OpenAI(base_url=server.v1, api_key="none", max_retries=0) as openai:
        client = instructor.from_openai(openai, mode=mode)
        person, raw = client.chat.completions.create_with_completion(
            model=server.model,
            messages=[{"role": "user", "content": "John is 30 years old."}],
            response_model=Person,
            temperature=0,
            max_tokens=160,
            max_retries=0,
        )
    assert isinstance(person, Person)
    assert raw.usage.completion_tokens > 0
