"""From a body to its answer, without HTTP: the server does this for its sockets, `batch` for the
lines of a file.

Every function raises what `errors.error_reply` makes a reply of.
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
from forge_serve.generation.generation import Generation, Updates
from forge_serve.generation.prompts import Prompt
from forge_serve.openai import embeddings
from forge_serve.openai.embeddings import PoolingRequest
from forge_serve.openai.prompts import encode_prompts
from forge_serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerationRequest,
)
from forge_serve.openai.serializers import ResponseSerializer
from forge_serve.openai.validation import check_logprob_values, decode

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_serve.server.app import Service

type Request = CompletionRequest | ChatRequest | GenerateRequest | PoolingRequest


def read[Body: GenerationRequest](service: Service, body: bytes, kind: type[Body]) -> Body:
    """A body as a request to the model that is served.

    Raises:
      RequestError: it is none, or over a limit, or for a model that is not served.
    """
    request = decode(body, kind, service.config.limits)
    service.lora_of(request.model)
    return request


async def begin[Form: ResponseSerializer](
    service: Service,
    request: CompletionRequest | ChatRequest | GenerateRequest,
    form_type: Callable[..., Form],
    *,
    unique_id: Callable[[], str],
    cache_salt: str,
    tenant: str = "",
    lora: str | None = None,
) -> tuple[Generation, Form]:
    """Submits a request. The caller has to close the generation.

    Args:
      unique_id: called when all has been checked: what the answer's id ends with.
      cache_salt: what keeps the request's cached prefixes apart.
      tenant: with whom the request shares its turns in the queues.
      lora: the adapter that its model's name means.

    Raises:
      RequestError: it cannot be served as it was asked.
      OverloadedError: too much waits already, or its grammar could not be tried now.
      EngineError: the engine takes no requests.
    """
    engine = service.ready_engine()
    try:
        params, answers = request.sampling_params(), None
        most = service.config.max_new_tokens
        params = _limited(params, most, said=request.limits_output)
        if isinstance(request, ChatRequest):
            answers = service.chat_answers(request)
        prompts = await encode_prompts(
            engine, request, params.max_tokens, service.text_work(tenant)
        )
        if params.max_tokens is None and most is not None:
            params = _with_room(params, most, prompts[0], engine)
        if answers is not None:
            params = await answers.params(params, prompts[0], engine)
        await engine.prepare(params)
        prompt_lens = [len(prompt.token_ids) for prompt in prompts]
        check_logprob_values(params, prompt_lens, engine.max_model_len, service.config.limits)
        engine = service.ready_engine()  # all of that may have taken long
        serializer = form_type(
            request,
            prompts,
            engine.tokenizer,
            unique_id=unique_id(),
            model=lora or service.model_name,
            created_s=int(time.time()),
            system_fingerprint=engine.system_fingerprint,
            **({} if answers is None else {"answers": answers}),
        )
        generation = Generation(
            engine,
            prompts,
            params,
            request_id=serializer.id,
            priority=request.priority or 0,
            cache_salt=cache_salt,
            timeout_s=service.timeout_s(request.timeout),
            metrics=service.metrics,
            reasoning=serializer.reasoning_tokens,
            lora=lora,
        )
    except RequestError as error:
        raise request.translate_params(error) from error
    return generation, serializer


def _limited(params: SamplingParams, most: int | None, *, said: bool) -> SamplingParams:
    """The parameters with no more output tokens than this server allows.

    Args:
      said: whether the request says how many it wants.

    Raises:
      RequestError: it wants more.
    """
    asked = params.max_tokens
    if most is None or asked is None or asked <= most:
        return params
    if said:
        raise RequestError(
            f"max_tokens is {asked}; this server allows at most {most} (--max-new-tokens)",
            param="max_tokens",
        )
    return dataclasses.replace(params, max_tokens=most)


def _with_room(
    params: SamplingParams, most: int, prompt: Prompt, engine: AsyncEngine
) -> SamplingParams:
    """The parameters of a request that does not say how many output tokens it wants."""
    limits = engine.limits
    room = min(limits.context, limits.kv_tokens + 1) - len(prompt.token_ids)
    if room <= most:
        return params
    if params.min_tokens > most:
        raise RequestError(
            f"min_tokens is {params.min_tokens}; this server allows at most {most} output tokens "
            "(--max-new-tokens)",
            param="min_tokens",
        )
    return dataclasses.replace(params, max_tokens=most)


async def whole(generation: Generation, serializer: ResponseSerializer) -> bytes:
    """Waits for a generation; the whole answer, as JSON.

    Raises:
      ForgeError: what ended the generation.
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
    """Submits a request for pooled hidden states, as `begin` does others."""
    engine = service.ready_engine()
    request.check_sampling()
    prompts = await embeddings.encode_inputs(engine, request, service.text_work(tenant))
    engine = service.ready_engine()  # that may have taken long
    return Generation(
        engine,
        prompts,
        embeddings.PARAMS,
        request_id=f"{request.ID_PREFIX}-{unique_id()}",
        priority=request.priority or 0,
        cache_salt=cache_salt,
        timeout_s=service.timeout_s(request.timeout),
        metrics=service.metrics,
        pooling=request.pooling or engine.pooling,  # type: ignore[arg-type]
        lora=lora,
    )


async def pooled(service: Service, request: PoolingRequest, generation: Generation) -> bytes:
    """Waits for what `begin_pooling` began; the whole answer, as JSON.

    Raises:
      ForgeError: what ended the generation.
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
