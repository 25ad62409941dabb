"""Pooled hidden states over HTTP: embeddings, similarity scores and reranking.

Requests and responses follow OpenAI's protocol for embeddings, vLLM's for scores, and Jina's for
reranking. Decoders have no relevance head, so a score is the cosine similarity of two embeddings.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import msgspec
import numpy as np

from forge_jax.config import Pooling
from forge_jax.errors import RequestError
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.pooled import normalized, stacked
from forge_serve.generation.generation import Generation, Updates
from forge_serve.generation.prompts import Prompt, encode_texts
from forge_serve.openai.prompts import kept_tokens
from forge_serve.openai.requests import GenerationRequest, prompts_of
from forge_serve.openai.response_types import (
    EmbeddingAnswer,
    EmbeddingData,
    PooledAnswer,
    PooledUsage,
    RankedDocument,
    RankedResult,
    RerankAnswer,
    ScoreAnswer,
    ScoreData,
)
from forge_serve.openapi.schema import (
    MAX_COUNT,
    About,
    Schema,
    prompts,
    refused,
    refused_fields,
    rule,
    texts,
)

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_serve.generation.workers import TextWork

PARAMS = SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)

SCORE_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)

FORMS = {  # options for the format of a vector
    "encoding_format": ("float", "base64"),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}


def _form(field: str) -> msgspec.Meta:
    return rule(schema={"enum": [*FORMS[field], None]})


def _documents(about: About) -> Schema:
    return texts(about.limits.prompts - 1)


def _text_or_texts(text: str | None = None) -> msgspec.Meta:
    return rule(
        text,
        schema=lambda about: {"anyOf": [{"type": ["string", "null"]}, _documents(about)]},
    )


Texts = str | list[str] | None
TEXTS_RULE = "The number of texts in a request is limited."
_OTHER_RULE = (
    "One text, or as many as the other field has. The number of texts in a request is limited."
)


class Input(msgspec.Struct, frozen=True):
    """A text or token ids. `param` is its path in the request, for example `input[3]`."""

    param: str
    given: str | list[int]


class PoolingRequest(GenerationRequest, kw_only=True):
    """Fields that all pooling endpoints share. Fields of the output have no effect."""

    pooling: Annotated[str | None, rule(schema={"enum": [*get_args(Pooling), None]})] = None

    ID_PREFIX: ClassVar[str]

    @classmethod
    def refusals(cls) -> Mapping[str, tuple[str, float | None]]:
        without = GenerationRequest.refusals()  # these only concern an output
        return {name: why for name, why in refused_fields(cls).items() if name not in without}

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        for name in GenerationRequest.refusals():
            schema["properties"][name] = {"description": "Ignored on this endpoint."}

    @property
    def inputs(self) -> list[Input]:
        raise NotImplementedError

    @property
    def list_name(self) -> str:
        """The field that determines the number of `inputs`."""
        raise NotImplementedError

    def check(self) -> None:
        GenerationRequest.check(self)
        one_of("pooling", self.pooling, get_args(Pooling))
        _ = self.inputs  # raises if there are none

    async def answer(self, vectors: np.ndarray, **common: Any) -> PooledAnswer:
        """Return the response.

        Args:
          vectors: f32[P, d], the pooled hidden states of the `inputs`.
          common: the fields that all responses share.
        """
        raise NotImplementedError


class EmbeddingRequest(PoolingRequest, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Annotated[
        str | list[str | int | list[int]],
        rule("Each input must fit the context.", schema=prompts),
    ]
    encoding_format: Annotated[str | None, _form("encoding_format")] = None
    use_activation: bool | None = None  # False: do not normalize vectors to unit length
    normalize: bool | None = None  # an older alias of use_activation
    embed_dtype: Annotated[str | None, _form("embed_dtype")] = None
    endianness: Annotated[str | None, _form("endianness")] = None
    dimensions: Annotated[Any, refused("shorter embeddings are not supported; omit it")] = None
    messages: Annotated[Any, refused("not supported; use input")] = None

    ID_PREFIX: ClassVar[str] = "embd"

    @property
    def inputs(self) -> list[Input]:
        given = prompts_of(self.input, "input")
        if len(given) == 1:
            return [Input("input", given[0])]
        return [Input(f"input[{i}]", item) for i, item in enumerate(given)]

    @property
    def list_name(self) -> str:
        return "input"

    def check(self) -> None:
        PoolingRequest.check(self)
        for name, values in FORMS.items():
            one_of(name, getattr(self, name), values)

    async def answer(self, vectors: np.ndarray, **common: Any) -> PooledAnswer:
        asked = self.normalize if self.use_activation is None else self.use_activation
        if asked is not False:
            vectors = normalized(vectors)
        data = []
        for i, vector in enumerate(vectors):
            if self.encoding_format == "base64":
                value: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            else:
                value = msgspec.Raw(msgspec.json.encode(vector.tolist()))
            data.append(EmbeddingData(index=i, embedding=value))
            await asyncio.sleep(0)  # encoding many vectors must not block the event loop
        return EmbeddingAnswer(**common, data=data)


class ScoreRequest(PoolingRequest, kw_only=True):
    """Body of POST /score: two lists of texts to compare pairwise, or one text and a list."""

    text_1: Annotated[
        Texts,
        _text_or_texts(
            "One text, or as many as `text_2` has. The number of texts in a request is limited."
        ),
    ] = None
    text_2: Annotated[Texts, _text_or_texts()] = None
    queries: Annotated[
        Texts,
        _text_or_texts(_OTHER_RULE),
    ] = None
    documents: Annotated[Texts, _text_or_texts(TEXTS_RULE)] = None
    items: Annotated[Texts, _text_or_texts()] = None
    data_1: Annotated[
        Texts,
        _text_or_texts(
            "One text, or as many as `data_2` has. The number of texts in a request is limited."
        ),
    ] = None
    data_2: Annotated[Texts, _text_or_texts()] = None

    ID_PREFIX: ClassVar[str] = "score"

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        PoolingRequest.narrow_schema(schema, about)
        names = sorted({name for pair in SCORE_PAIRS for name in pair})
        given, null = {"not": {"type": "null"}}, {"type": "null"}
        schema["oneOf"] = [
            {
                "required": list(pair),
                "properties": {name: given if name in pair else null for name in names},
            }
            for pair in SCORE_PAIRS
        ]

    @property
    def _names(self) -> tuple[str, str]:
        given = {name for pair in SCORE_PAIRS for name in pair if getattr(self, name) is not None}
        for pair in SCORE_PAIRS:
            if given == set(pair):
                return pair
        raise RequestError(
            "send text_1 and text_2, or queries and documents, or queries and items, or data_1 "
            "and data_2",
            param="text_1",
        )

    @property
    def _sides(self) -> tuple[list[Input], list[Input]]:
        first, second = (_texts(name, getattr(self, name)) for name in self._names)
        return first, second

    @property
    def inputs(self) -> list[Input]:
        first, second = self._sides
        return first + second

    @property
    def list_name(self) -> str:
        return self._names[1]

    def check(self) -> None:
        PoolingRequest.check(self)
        (first, second), (name, other) = self._sides, self._names
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"{name} must have one text or as many as {other}, which has {len(second)}; got "
                f"{len(first)}",
                param=name,
            )

    async def answer(self, vectors: np.ndarray, **common: Any) -> PooledAnswer:
        num_first = len(self._sides[0])
        scores = _similarity(vectors[:num_first], vectors[num_first:])
        data = [ScoreData(index=i, score=score) for i, score in enumerate(scores)]
        return ScoreAnswer(**common, data=data)


class RerankRequest(PoolingRequest, kw_only=True):
    """Body of POST /rerank: a query, and documents to sort by their similarity to it."""

    query: str
    documents: Annotated[list[str], rule(TEXTS_RULE, schema=_documents)]
    top_n: Annotated[int | None, rule(minimum=0, maximum=MAX_COUNT)] = None  # null or 0: all
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[Any, refused("not supported; use truncate_prompt_tokens")] = None
    max_chunks_per_doc: Annotated[Any, refused("not supported; use truncate_prompt_tokens")] = None
    instruction: Annotated[Any, refused("not supported; include it in query")] = None

    ID_PREFIX: ClassVar[str] = "rerank"

    @property
    def inputs(self) -> list[Input]:
        return [Input("query", self.query), *_texts("documents", self.documents)]

    @property
    def list_name(self) -> str:
        return "documents"

    def check(self) -> None:
        PoolingRequest.check(self)
        if self.top_n is not None and not 0 <= self.top_n <= MAX_COUNT:
            raise RequestError(
                f"top_n must be between 0 (all documents) and {MAX_COUNT}", param="top_n"
            )

    async def answer(self, vectors: np.ndarray, **common: Any) -> PooledAnswer:
        scores = _similarity(vectors[:1], vectors[1:])
        order = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable for equal scores
        results = []
        for i in order[: self.top_n or None]:
            result = RankedResult(i, scores[i])
            if self.return_documents is not False:
                result.document = RankedDocument(self.documents[i])
            results.append(result)
        return RerankAnswer(**common, results=results)


def one_of(param: str, value: str | None, values: Sequence[str]) -> None:
    """Raise `RequestError`, which names the field, if the value is not allowed."""
    if value is not None and value not in values:
        raise RequestError(f"{param} must be {' or '.join(values)}", param=param)


def _texts(param: str, given: str | list[str]) -> list[Input]:
    if isinstance(given, str):
        return [Input(param, given)]
    if not given:
        raise RequestError(f"{param} must not be empty", param=param)
    return [Input(f"{param}[{i}]", text) for i, text in enumerate(given)]


def _similarity(first: np.ndarray, second: np.ndarray) -> list[float]:
    """Return the cosine similarities of the rows of f32[1 or P, d] and f32[P, d]."""
    products = normalized(first.astype(np.float64)) * normalized(second.astype(np.float64))
    return products.sum(axis=1).tolist()


async def encode_inputs(
    engine: AsyncEngine, request: PoolingRequest, work: TextWork
) -> list[Prompt]:
    """Return the inputs of a request as token ids, truncated if requested.

    Long texts are tokenized in a thread.

    Raises:
      RequestError: an input cannot be served. `param` is its path.
      OverloadedError: too much text waits to be tokenized.
    """
    inputs = request.inputs
    special = True if request.add_special_tokens is None else request.add_special_tokens
    kept = kept_tokens(engine, request, PARAMS.max_tokens)
    given = [(each.param, each.given) for each in inputs]
    prompts = await encode_texts(engine, given, special, kept, work)
    for each, prompt in zip(inputs, prompts, strict=True):
        try:
            engine.check(prompt.token_ids, PARAMS)
        except RequestError as error:
            raise type(error)(f"{each.param}: {error}", param=each.param) from error
    return prompts


async def pooled(generation: Generation) -> np.ndarray:
    """Wait for the pooled hidden states of all prompts, f32[P, d].

    Raises:
      ForgeError: the generation failed.
    """
    over = asyncio.Event()
    vectors: dict[int, bytes] = {}

    def take(updates: Updates) -> None:
        for choice, delta in updates:
            if delta.pooled is not None:
                vectors[choice] = delta.pooled
        if generation.over:
            over.set()

    generation.begin(take)
    await over.wait()
    if generation.failure is not None:
        raise generation.failure
    return stacked([vectors[i] for i in range(len(vectors))])


def usage_of(generation: Generation) -> PooledUsage:
    usage = generation.usage
    return PooledUsage(
        prompt_tokens=usage.prompt_tokens,
        total_tokens=usage.prompt_tokens,
        prompt_tokens_details=usage.prompt_tokens_details,
    )
