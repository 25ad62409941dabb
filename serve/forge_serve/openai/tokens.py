"""Tokenization over HTTP: /tokenize, /detokenize and /tokenizer_info.

Evaluation harnesses and routers use these endpoints instead of their tokenizer. The fields are
vLLM's and SGLang's. Fields that both define have the same meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from forge_jax.errors import RequestError
from forge_serve.generation.prompts import BYTES_PER_ID, THREAD_FROM_IDS
from forge_serve.generation.workers import in_pieces
from forge_serve.openai.prompts import encode_prompts
from forge_serve.openai.requests import DetokenizeRequest, TokenizeRequest
from forge_serve.openai.response_types import DetokenizeAnswer, TokenizeAnswer

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.text import Tokenizer
    from forge_serve.generation.workers import TextWork


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Response of /tokenizer_info. The tokenizer's other special tokens are additional fields."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None


async def tokenize(engine: AsyncEngine, request: TokenizeRequest, work: TextWork) -> TokenizeAnswer:
    """Return the response to a `TokenizeRequest`.

    Raises:
      ContextLengthError: a text is too long to fit the context under any tokenization.
      RequestError: the model lacks a tokenizer or a chat template, or a text cannot be encoded.
      OverloadedError: too much text waits to be tokenized.
    """
    several = isinstance(request.prompt, list)
    request.truncate_prompt_tokens = None  # the response always has all tokens
    prompts = await encode_prompts(engine, request.asked(), None, work)
    tokens = [prompt.token_ids for prompt in prompts]
    strings = None
    if request.return_token_strs:
        strings = await _at_length(tokens, _names(_tokenizer(engine)), work)
    counts = [len(ids) for ids in tokens]
    return TokenizeAnswer(
        count=counts if several else counts[0],
        max_model_len=engine.max_model_len,
        tokens=tokens if several else tokens[0],
        token_strs=strings if several or strings is None else strings[0],
    )


async def detokenize(
    engine: AsyncEngine, request: DetokenizeRequest, work: TextWork
) -> DetokenizeAnswer:
    """Return the response to a `DetokenizeRequest`. Special tokens are included by default.

    Raises:
      RequestError: the model lacks a tokenizer.
    """
    tokenizer, given = _tokenizer(engine), request.texts()
    skip = bool(request.skip_special_tokens)
    decode = partial(tokenizer.decode, skip_special_tokens=skip)
    texts = await _at_length(given, decode, work)
    text = texts if given is request.tokens else texts[0]
    return DetokenizeAnswer(text, text)


def tokenizer_info(engine: AsyncEngine) -> dict[str, Any]:
    """Return the special tokens and the chat template, for clients that render prompts themselves.

    Raises:
      RequestError: the model lacks a tokenizer.
    """
    tokenizer, template = _tokenizer(engine), engine.chat_template
    sources = {} if template is None else template.sources
    info = TokenizerInfo(
        tokenizer_class=type(tokenizer.backend.model).__name__,
        vocab_size=tokenizer.vocab_size,
        model_max_length=engine.max_model_len,
        chat_template=sources.get("default"),
    )
    return {**msgspec.structs.asdict(info), **tokenizer.special_tokens}


async def _at_length[T](
    texts: Sequence[Sequence[int]], read: Callable[[Sequence[int]], T], work: TextWork
) -> list[T]:
    """Return `read` of each text. Long texts are read in a thread."""

    def read_all(texts: Sequence[Sequence[int]]) -> list[T]:
        return [read(ids) for ids in texts]

    num_ids = sum(map(len, texts))
    if num_ids < THREAD_FROM_IDS:
        return read_all(texts)
    pieces = in_pieces(texts, lambda ids: BYTES_PER_ID * len(ids))
    found = await work.run(BYTES_PER_ID * num_ids, [partial(read_all, piece) for piece in pieces])
    return [each for several in found for each in several]


def _names(tokenizer: Tokenizer) -> Callable[[Sequence[int]], list[str]]:
    name = tokenizer.backend.id_to_token
    return lambda ids: [name(token) or "" for token in ids]


def _tokenizer(engine: AsyncEngine) -> Tokenizer:
    if engine.tokenizer is None:
        raise RequestError("this model has no tokenizer")
    return engine.tokenizer
