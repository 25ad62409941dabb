"""The prompts of completions and chats as token IDs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from forge_jax.errors import RequestError
from forge_serve.generation.files import read_files
from forge_serve.generation.prompts import (
    THREAD_FROM_CHARS,
    Kept,
    Prompt,
    check_total,
    encode_texts,
)
from forge_serve.openai.content import attachments, inline, text_of
from forge_serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerationRequest,
)

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_serve.generation.workers import TextWork


async def encode_prompts(
    engine: AsyncEngine,
    request: CompletionRequest | ChatRequest | GenerateRequest,
    max_tokens: int | None,
    work: TextWork,
) -> list[Prompt]:
    """Return the prompts of a request as token IDs, truncated if requested.

    Long texts are tokenized in a thread. The files of a chat become text in its messages.

    Args:
      max_tokens: the limit of each output; None: the context's room.

    Raises:
      ContextLengthError: a text is too long to fit the context under any tokenization.
      RequestError: the model lacks a tokenizer or a chat template, the text cannot be encoded, or
        a file has no usable text.
      OverloadedError: too much text waits to be tokenized, or too many files to be read.
    """
    kept = kept_tokens(engine, request, max_tokens)
    if isinstance(request, ChatRequest):
        return [await _encode_chat(engine, request, kept, work)]
    given = request.prompts() if isinstance(request, CompletionRequest) else [request.prompt]
    special = True if request.add_special_tokens is None else request.add_special_tokens
    return await encode_texts(engine, [("prompt", item) for item in given], special, kept, work)


def kept_tokens(
    engine: AsyncEngine, request: GenerationRequest, max_tokens: int | None
) -> Kept | None:
    """Return the part of each prompt to keep; None: all of it.

    Raises:
      RequestError: the part exceeds the context.
    """
    keep = request.truncate_prompt_tokens
    if keep is None:
        return None
    limits = engine.limits
    if keep > limits.context:
        raise RequestError(
            f"truncate_prompt_tokens must be at most {limits.context}, the context length; got "
            f"{keep}",
            param="truncate_prompt_tokens",
        )
    if keep == -1:  # as many as fit together with the output
        output = 1 if max_tokens is None else max_tokens
        keep = max(min(limits.context - output, limits.kv_tokens + 1 - max(output, 1)), 1)
    return Kept(keep, first=request.truncation_side == "right")


async def _encode_chat(
    engine: AsyncEngine, request: ChatRequest, kept: Kept | None, work: TextWork
) -> Prompt:
    tokenizer, template = engine.tokenizer, engine.chat_template
    if tokenizer is None:
        raise RequestError(
            "this model has no tokenizer: use /v1/completions with token IDs", param="messages"
        )
    if template is None or not template.available:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE",
            param="messages",
        )
    files = attachments(request.messages)
    if files:
        inline(request.messages, await read_files(files, work))
    messages = request.template_messages()
    options = request.template_options()
    options["add_special_tokens"] = bool(request.add_special_tokens)
    if kept is None:
        tokenizer.check_fits(map(text_of, messages), engine.max_model_len, "messages")
    # All of it counts because templates may render any field, for example tool calls.
    num_bytes = len(msgspec.json.encode((messages, options)))
    check_total(num_bytes, work, "messages")

    def end(text: str, encode: Callable[[str], list[int]]) -> list[int]:
        return encode(text) if kept is None else kept.encode(text, encode, work.max_bytes)[0]

    def encode() -> Prompt:
        prompt = Prompt(template.encode(messages, tokenizer, end, **options))
        return (prompt if kept is None else kept.cut(prompt, None)).checked()

    if not template.slow and num_bytes < THREAD_FROM_CHARS:
        return encode()
    [prompt] = await work.run(num_bytes, [encode])
    return prompt
