"""POST /v1/responses/compact: a conversation as one item, a summary that the model has written.

The conversation becomes a chat whose last message asks for the summary. The answer is an item of
the type `compaction`, which in the input of a later response is a system message with the summary.
Nothing is encrypted, whatever the field is called: the summary is the client's own.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from forge_jax.errors import RequestError
from forge_serve.generation.generation import Usage
from forge_serve.openai.requests import Message
from forge_serve.openapi.schema import About, Schema, rule
from forge_serve.responses_api.events import ResponsesSerializer, usage_of
from forge_serve.responses_api.items import compaction
from forge_serve.responses_api.output import MessageItem
from forge_serve.responses_api.requests import ResponsesChat, ResponsesRequest
from forge_serve.responses_api.response_types import CompactedResponse
from forge_serve.responses_api.store import Turn

ASKS_FOR_SUMMARY = (
    "Summarize the conversation up to here so that it can continue from your summary alone. Keep "
    "requests, decisions, facts, names, numbers, results of tools and open questions. Answer with "
    "the summary only."
)


class CompactRequest(ResponsesRequest, kw_only=True):
    """POST /v1/responses/compact."""

    stream: Annotated[bool | None, rule(schema={"enum": [False, None]})] = None
    background: Annotated[bool | None, rule(schema={"enum": [False, None]})] = None

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        ResponsesRequest.narrow_schema(schema, about)
        named = {"type": "string"} if about.any_model else about.model_names
        schema["properties"]["model"] = named
        schema["required"] = [*schema.get("required", ()), "model"]

    def check(self) -> None:
        if self.model is None:
            raise RequestError("model is required", param="model")
        for name in ("stream", "background"):
            if getattr(self, name):
                raise RequestError(f"{name} is not supported here: leave it out", param=name)
        ResponsesRequest.check(self)

    def chat(self, previous: Turn | None, *, kept: bool) -> ResponsesChat:
        made = ResponsesRequest.chat(self, previous, kept=False)
        made.tools = made.tool_choice = None
        last = made.messages[-1] if made.messages else None
        if last is not None and last.role == "user" and isinstance(last.content, str):
            # Some templates refuse two messages of the user in a row.
            last.content = f"{last.content}\n\n{ASKS_FOR_SUMMARY}"
        else:
            made.messages.append(Message("user", ASKS_FOR_SUMMARY))
        return made


class CompactSerializer(ResponsesSerializer):
    """The answer: a `response.compaction` object with one item."""

    def body(self, usage: Usage) -> bytes:
        """Raises `RequestError` if the model wrote no summary."""
        items = [item for item in self._items.items if isinstance(item, MessageItem)]
        summary = "".join(item.text for item in items).strip()
        if not summary:
            raise RequestError(
                "input: the model wrote no summary of it: send it again, or send fewer items",
                param="input",
            )
        answer = CompactedResponse(
            id=self.id,
            created_at=self.created_s,
            output=[compaction(summary, self.unique_id)],
            usage=usage_of(usage),
        )
        return msgspec.json.encode(answer)
