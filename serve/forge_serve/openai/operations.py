"""The steps from a request to its response, without HTTP.

The server and the commands `batch`, `chat` and `generate` use these functions. `errors.error_reply`
turns their exceptions into replies.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from forge_jax.errors import RequestError
from forge_jax.sampling_params import SamplingParams
from forge_serve.generation.generation import EngineOptions, Generation, Updates
from forge_serve.generation.prompts import Prompt
from forge_serve.openai import embeddings
from forge_serve.openai.chat_output import ChatOutput
from forge_serve.openai.embeddings import PoolingRequest
from forge_serve.openai.prompts import encode_prompts
from forge_serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerationRequest,
)
from forge_serve.openai.serializers import ResponseSerializer
from forge_serve.openai.validation import check_activation_bytes, check_logprob_values, decode
from forge_serve.parsers.families import families

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_serve.server.service import Service

type TextRequest = CompletionRequest | ChatRequest | GenerateRequest  # requests with text output
type Request = TextRequest | PoolingRequest


def read[Body: GenerationRequest](service: Service, body: bytes, kind: type[Body]) -> Body:
    """Decode a body into a request to the served model.

    Raises:
      RequestError: the body is invalid, exceeds a limit, or names another model.
    """
    request = decode(body, kind, service.config.limits)
    service.lora_of(request.model)
    return request


async def begin[Serializer: ResponseSerializer](
    service: Service,
    request: TextRequest,
    serializer_type: Callable[..., Serializer],
    *,
    unique_id: Callable[[], str],
    cache_salt: str,
    tenant: str = "",
    lora: str | None = None,
) -> tuple[Generation, Serializer]:
    """Submit a request. The caller must close the generation.

    Args:
      unique_id: returns the end of the response's id. Called after all checks.
      cache_salt: requests share cached prefixes only with requests of the same salt.
      tenant: the owner of the request. Queues serve tenants in turn.
      lora: the adapter that the request's model names.

    Raises:
      RequestError: the request cannot be served.
      OverloadedError: a queue is full, or the server is too busy to compile the grammar.
      EngineError: the engine accepts no requests.
    """
    try:
        params, prompts, output = await _prepare(service, request, tenant)
        engine = service.ready_engine()  # the engine may have stopped during the preparation
        serializer = serializer_type(
            request,
            prompts,
            engine.tokenizer,
            unique_id=unique_id(),
            model=lora or service.model_name,
            created_s=int(time.time()),
            system_fingerprint=engine.system_fingerprint,
            **({} if output is None else {"answers": output}),
        )
        generation = Generation(
            engine,
            prompts,
            params,
            EngineOptions(
                request_id=serializer.id,
                priority=request.priority or 0,
                cache_salt=cache_salt,
                lora=lora,
            ),
            timeout_s=service.timeout_s(request.timeout),
            metrics=service.metrics,
            reasoning=serializer.reasoning_tokens,
            whole=service.weight_sync.enabled and not serializer.streams,
        )
    except RequestError as error:
        raise request.translate_params(error) from error
    return generation, serializer


async def _prepare(
    service: Service, request: TextRequest, tenant: str
) -> tuple[SamplingParams, list[Prompt], ChatOutput | None]:
    """Return the sampling parameters, prompts and chat output, with the grammar compiled."""
    engine, most = service.ready_engine(), service.config.max_new_tokens
    params, output = request.sampling_params(), None
    params = _limit_output(params, most, explicit=request.limits_output)
    if isinstance(request, ChatRequest):
        output = chat_output(service, request)
    prompts = await encode_prompts(engine, request, params.max_tokens, service.text_work(tenant))
    if params.max_tokens is None and most is not None:
        params = _limit_to_room(params, most, prompts[0], engine)
    if output is not None:
        params = await output.params(params, prompts[0], engine)
    await engine.prepare(params)
    prompt_lens = [len(prompt.token_ids) for prompt in prompts]
    check_logprob_values(params, prompt_lens, engine.max_model_len, service.config.limits)
    check_activation_bytes(params, prompt_lens, engine.limits)
    return params, prompts, output


def chat_output(service: Service, request: ChatRequest) -> ChatOutput:
    """Return the parsers and grammar of a chat's outputs.

    Raises:
      RequestError: the server does not support the request's tools.
    """
    engine, config = service.ready_engine(), service.config
    model = families(
        engine.tokenizer, engine.chat_template, config.tool_call_parser, config.reasoning_parser
    )
    return ChatOutput.of(request, model)


async def count_prompt_tokens(service: Service, request: ChatRequest, tenant: str = "") -> int:
    """Return the length of a chat's prompt, in tokens.

    Raises:
      RequestError: the request cannot be served.
      OverloadedError: too much text waits to be tokenized.
    """
    engine = service.ready_engine()
    try:
        params = request.sampling_params()
        chat_output(service, request)
        work = service.text_work(tenant)
        [prompt] = await encode_prompts(engine, request, params.max_tokens, work)
    except RequestError as error:
        raise request.translate_params(error) from error
    return len(prompt.token_ids)


def _limit_output(params: SamplingParams, most: int | None, *, explicit: bool) -> SamplingParams:
    """Return the parameters with `max_tokens` at most `most`.

    Args:
      explicit: True if the request itself sets the limit.

    Raises:
      RequestError: the request sets a higher limit.
    """
    asked = params.max_tokens
    if most is None or asked is None or asked <= most:
        return params
    if explicit:
        raise RequestError(
            f"max_tokens must be at most {most} on this server (--max-new-tokens), got {asked}",
            param="max_tokens",
        )
    return dataclasses.replace(params, max_tokens=most)


def _limit_to_room(
    params: SamplingParams, most: int, prompt: Prompt, engine: AsyncEngine
) -> SamplingParams:
    """Return the parameters of a request without `max_tokens`, limited to `most` output tokens.

    The output may otherwise fill the context.

    Raises:
      RequestError: `most` is the lower limit, and `min_tokens` exceeds it.
    """
    limits = engine.limits
    room = min(limits.context, limits.kv_tokens + 1) - len(prompt.token_ids)
    if room <= most:
        return params
    if params.min_tokens > most:
        raise RequestError(
            f"min_tokens must be at most {most} on this server (--max-new-tokens), got "
            f"{params.min_tokens}",
            param="min_tokens",
        )
    return dataclasses.replace(params, max_tokens=most)


async def whole_response(generation: Generation, serializer: ResponseSerializer) -> bytes:
    """Wait for a generation and return the whole response as JSON.

    Raises:
      ForgeError: the generation failed.
    """
    over = asyncio.Event()

    def take(updates: Updates) -> None:
        for choice, delta in updates:
            serializer.add(choice, delta)
        if generation.over:
            over.set()

    generation.begin(take)
    await over.wait()
    if generation.failure is not None:
        raise generation.failure
    return serializer.body(generation.usage)


async def begin_pooling(
    service: Service,
    request: PoolingRequest,
    *,
    unique_id: Callable[[], str],
    cache_salt: str,
    tenant: str = "",
    lora: str | None = None,
) -> Generation:
    """Submit a request for pooled hidden states; the counterpart of `begin`."""
    engine = service.ready_engine()
    request.check_sampling()
    prompts = await embeddings.encode_inputs(engine, request, service.text_work(tenant))
    engine = service.ready_engine()  # the engine may have stopped during the encoding
    return Generation(
        engine,
        prompts,
        embeddings.PARAMS,
        EngineOptions(
            request_id=f"{request.ID_PREFIX}-{unique_id()}",
            priority=request.priority or 0,
            cache_salt=cache_salt,
            pooling=request.pooling or engine.pooling,  # type: ignore[arg-type]
            lora=lora,
        ),
        timeout_s=service.timeout_s(request.timeout),
        metrics=service.metrics,
    )


async def pooled_response(
    service: Service, request: PoolingRequest, generation: Generation
) -> bytes:
    """Wait for a generation from `begin_pooling` and return the whole response as JSON.

    Raises:
      ForgeError: the generation failed.
    """
    vectors = await embeddings.pooled(generation)
    answer = await request.answer(
        vectors,
        id=generation.request_id,
        created=int(time.time()),
        model=service.lora_of(request.model) or service.model_name,
        usage=embeddings.usage_of(generation),
    )
    return msgspec.json.encode(answer)
