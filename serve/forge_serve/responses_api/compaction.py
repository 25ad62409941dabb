"""POST /v1/responses/compact: replacement of a conversation by the model's summary of it.

The conversation becomes a chat whose last message requests the summary. The response is an item of
type `compaction`. In the input of a later response, it becomes a system message with the summary.
The field `encrypted_content` is not encrypted, because the summary belongs to the client.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from forge_jax.errors import RequestError
from forge_serve.generation.generation import Usage
from forge_serve.openai.content import ContentPart
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
    """Body of POST /v1/responses/compact."""

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
                raise RequestError(f"{name} is not supported on this endpoint: omit it", param=name)
        choice = self.tool_choice  # no tool is called, but an unknown choice is a mistake
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise RequestError("tool_choice must be none, auto or required", param="tool_choice")
        ResponsesRequest.check(self)

    def chat(self, previous: Turn | None, *, kept: bool) -> ResponsesChat:
        made = ResponsesRequest.chat(self, previous, kept=False)
        made.tools = made.tool_choice = None
        last = made.messages[-1] if made.messages else None
        if last is None or last.role != "user":
            made.messages.append(Message("user", ASKS_FOR_SUMMARY))
        # Some templates reject consecutive user messages.
        elif isinstance(last.content, list):
            between = "" if last.content[-1].type == "file" else "\n\n"
            last.content.append(ContentPart("text", between + ASKS_FOR_SUMMARY))
        else:
            last.content = f"{last.content}\n\n{ASKS_FOR_SUMMARY}"
        return made


class CompactSerializer(ResponsesSerializer):
    """Serializer of a `response.compaction` object, which has one item."""

    def body(self, usage: Usage) -> bytes:
        """Return the whole response.

        Raises:
          RequestError: the model wrote no summary.
        """
        items = [item for item in self._items.items if isinstance(item, MessageItem)]
        summary = "".join(item.text for item in items).strip()
        if not summary:
            raise RequestError(
                "input: the model wrote no summary; retry, or send fewer items",
                param="input",
            )
        answer = CompactedResponse(
            id=self.id,
            created_at=self.created_s,
            output=[compaction(summary, self.unique_id)],
            usage=usage_of(usage),
        )
        return msgspec.json.encode(answer)
