"""/v1/embeddings, /score and /rerank: on the fake device, and on a model with OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
import threading
from typing import Any

import numpy as np
import pytest

from forge_jax.config import BatchConfig, EngineConfig, ModelConfig, Pooling
from forge_jax.engine.fake import fake_tokenizer
from forge_jax.engine.streams import QueueLimits
from forge_jax.engine.thread import Engine
from forge_jax.errors import EngineError
from forge_jax.sampling_params import SamplingParams
from forge_jax.testing import POOLED_SIZE, FakeDevice
from forge_serve.config import ServerConfig
from forge_serve.limits import Limits

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def stories(short_stories):
    return short_stories


def pooled(text: str | list[int], pooling: Any = "last", *, unit: bool = True) -> np.ndarray:
    """Return the vector that the fake device must give for a text."""
    device = FakeDevice(num_blocks=1, block_size=16, max_num_seqs=1)
    ids = fake_tokenizer().encode(text) if isinstance(text, str) else text
    vector = np.array(device.pooled(ids, pooling))
    return vector / np.linalg.norm(vector) if unit else vector


def cosine(a: str, b: str) -> float:
    return float(pooled(a) @ pooled(b))


def vectors_of(answer: dict[str, Any]) -> list[np.ndarray]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    assert {item["object"] for item in answer["data"]} == {"embedding"}
    return [np.array(item["embedding"]) for item in answer["data"]]


# ---- embeddings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    ["a quiet river", ["a quiet river", "stone", "мир"], [5, 6, 7], [[5, 6], [7], [5, 6, 7, 8]]],
)
@pytest.mark.parametrize("pooling", [None, "last", "mean"])
async def test_every_form_of_input_is_accepted(server, given, pooling):
    status, answer = await server.post(PATH, {"input": given, "pooling": pooling})
    assert status == 200 and answer["object"] == "list" and answer["model"] == server.model
    texts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    vectors = vectors_of(answer)
    assert len(vectors) == len(texts)
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_allclose(vector, pooled(text, pooling or "last"), atol=1e-6)
    tokens = [fake_tokenizer().encode(t) if isinstance(t, str) else t for t in texts]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == sum(map(len, tokens))
    assert answer["id"].startswith("embd-") and usage["completion_tokens"] == 0


async def test_base64_holds_the_same_floats(server):
    body = {"input": ["a dog", "a cat"]}
    _, plain = await server.post(PATH, body | {"encoding_format": "float"})
    _, packed = await server.post(PATH, body | {"encoding_format": "base64"})
    for one, other in zip(plain["data"], packed["data"], strict=True):
        raw = base64.b64decode(other["embedding"])
        assert len(raw) == 4 * POOLED_SIZE
        assert np.frombuffer(raw, "<f4").tolist() == one["embedding"]


@pytest.mark.parametrize("name", ["use_activation", "normalize"])
async def test_vectors_are_unnormalized_on_request(server, name):
    _, answer = await server.post(PATH, {"input": "a dog", name: False})
    np.testing.assert_allclose(vectors_of(answer)[0], pooled("a dog", unit=False), atol=1e-6)
    _, answer = await server.post(PATH, {"input": "a dog", name: True})
    assert np.linalg.norm(vectors_of(answer)[0]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("side", "kept"), [(None, [6, 7, 8]), ("left", [6, 7, 8]), ("right", [5, 6, 7])]
)
async def test_long_prompts_are_truncated_on_request(server, side, kept):
    body = {"input": [[5, 6, 7, 8], [9]], "truncate_prompt_tokens": 3, "truncation_side": side}
    _, answer = await server.post(PATH, body)
    first, second = vectors_of(answer)
    np.testing.assert_allclose(first, pooled(kept), atol=1e-6)
    np.testing.assert_allclose(second, pooled([9]), atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == 4
    status, answer = await server.post(PATH, {"input": [5] * 5000, "truncate_prompt_tokens": -1})
    assert status == 200 and answer["usage"]["prompt_tokens"] == 1024


async def test_mean_pooling_counts_every_token_across_chunks_and_cached_prefixes(start):
    config = EngineConfig(batch=BatchConfig(max_num_batched_tokens=32))
    server = await start(Engine.fake(config=config, check=True))
    text = [5 + i % 40 for i in range(150)]
    await server.post("/v1/completions", {"prompt": text, "max_tokens": 2})
    for pooling, cached in (("mean", 0), ("last", 144), ("mean", 0)):
        _, answer = await server.post(PATH, {"input": [text, text[:70]], "pooling": pooling})
        for ids, vector in zip([text, text[:70]], vectors_of(answer), strict=True):
            np.testing.assert_allclose(vector, pooled(ids, pooling), atol=1e-5)
        found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found >= cached and bool(found) == bool(cached)
    await server.idle()


async def test_option_sets_the_default_pooling(start):
    server = await start(Engine.fake(config=EngineConfig(model=ModelConfig(pooling="mean"))))
    _, answer = await server.post(PATH, {"input": "a quiet river"})
    np.testing.assert_allclose(vectors_of(answer)[0], pooled("a quiet river", "mean"), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 5]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [5, -1]}, "input"),
        ({"input": [[5], [10**6]]}, "input[1]"),
        ({"input": [[5], [5] * 1025]}, "input[1]"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "endianness": "big"}, "endianness"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 1025}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side"),
        ({"input": "a", "timeout": 0}, "timeout"),
        ({"input": "a", "model": "another"}, "model"),
    ],
)
async def test_unservable_inputs_are_rejected_by_name(server, body, param):
    status, answer = await server.post(PATH, body)
    assert status == (404 if param == "model" else 400), answer
    assert answer["error"]["param"] == param and param in answer["error"]["message"] + "model"
    assert server.engine.stats().num_running == server.engine.stats().num_waiting == 0


async def test_operator_limits_the_number_of_inputs(start):
    server = await start(Engine.fake(), ServerConfig(limits=Limits(prompts=2)))
    assert (await server.post(PATH, {"input": ["a", "b"]}))[0] == 200
    status, answer = await server.post(PATH, {"input": ["a", "b", "c"]})
    assert status == 400 and "at most 2" in answer["error"]["message"]
    status, answer = await server.post("/rerank", {"query": "a", "documents": ["b", "c"]})
    assert status == 400 and answer["error"]["param"] == "documents"


# ---- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
async def test_scores_are_cosine_similarities(server, path, names):
    one, many = "a brave dog", ["a cat", "a brave dog", "the city"]
    for first, second in ((one, many), ([one], many), (many, many), (one, "the city")):
        status, answer = await server.post(path, dict(zip(names, (first, second), strict=True)))
        assert status == 200 and answer["id"].startswith("score-")
        seconds = [second] if isinstance(second, str) else second
        firsts = list(first) if isinstance(first, list) else [first]
        firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
        expected = [cosine(a, b) for a, b in zip(firsts, seconds, strict=True)]
        assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-6)
        assert [item["index"] for item in answer["data"]] == list(range(len(seconds)))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_1"),
        ({"text_1": "a", "data_2": "b"}, "text_1"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"queries": "a", "items": []}, "items"),
        ({"queries": "a", "documents": ["b", ""]}, "documents[1]"),
        ({"data_1": "a", "data_2": ["b"] * 1025}, "data_2"),
    ],
)
async def test_mismatched_text_lists_are_rejected(server, body, param):
    status, answer = await server.post("/score", body)
    assert status == 400 and answer["error"]["param"] == param, answer


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_documents_are_ordered_by_similarity(server, path):
    query, documents = "a brave dog", ["a cat", "the city", "a brave dog", "song", "a cat"]
    body = {"query": query, "documents": documents}
    status, answer = await server.post(path, body)
    assert status == 200 and answer["model"] == server.model
    scores = [cosine(query, text) for text in documents]
    order = [result["index"] for result in answer["results"]]
    assert sorted(order) == list(range(5)) and order[0] == 2
    assert order.index(0) < order.index(4), "equals stay in their order"
    got = [result["relevance_score"] for result in answer["results"]]
    assert got == sorted(got, reverse=True)
    assert got == pytest.approx([scores[i] for i in order], abs=1e-6)
    assert [r["document"]["text"] for r in answer["results"]] == [documents[i] for i in order]
    assert answer["usage"]["total_tokens"] == sum(
        len(fake_tokenizer().encode(text)) for text in [query, *documents]
    )
    _, top = await server.post(path, body | {"top_n": 2, "return_documents": False})
    assert [result["index"] for result in top["results"]] == order[:2]
    assert "document" not in top["results"][0]
    _, every = await server.post(path, body | {"top_n": 0})
    assert every["results"] == answer["results"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ({"query": "a", "documents": ["b"], "instruction": "x"}, "instruction"),
    ],
)
async def test_invalid_rerank_request_is_rejected(server, body, param):
    status, answer = await server.post("/rerank", body)
    assert status == 400 and answer["error"]["param"] == param, answer


# ---- load ----------------------------------------------------------------------------------------


def slow_engine(**kwargs: Any) -> Engine:
    """Return an engine that runs one sequence at a time, 20 ms each."""
    config = EngineConfig(batch=BatchConfig(max_num_seqs=1))
    return Engine.fake(step_time_s=0.02, config=config, **kwargs)


async def test_client_disconnect_ends_its_work(start):
    server = await start(slow_engine())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await server.post(PATH, {"input": ["a"] * 1000})
    steps = server.engine.stats().steps
    await server.idle(timeout_s=1.0)  # a thousand steps would take 20 s
    assert 0 < steps < 50
    async with server.http.get(server.url + "/metrics") as response:
        text = await response.text()
    assert 'finished_reason="abort"' in text


async def test_deadline_ends_the_request(start):
    server = await start(slow_engine())
    status, answer = await server.post(PATH, {"input": ["a"] * 1000, "timeout": 0.1})
    assert status == 504 and answer["error"]["code"] == "deadline_exceeded"
    await server.idle(timeout_s=1.0)
    assert (await server.post(PATH, {"input": "a"}))[0] == 200


async def test_full_queue_rejects(start):
    engine = slow_engine(queue_limits=QueueLimits(samples=4))
    server = await start(engine)
    waiting = engine.submit([1], SamplingParams(max_tokens=500, ignore_eos=True), request_id="w")
    async with server.http.post(server.url + PATH, json={"input": ["a"] * 5}) as refused:
        assert refused.status == 503 and int(refused.headers["Retry-After"]) >= 1
        assert (await refused.json())["error"]["code"] == "overloaded"
    waiting.abort()
    while engine.streams.num_waiting:
        await asyncio.sleep(0.001)
    assert (await server.post(PATH, {"input": ["a"] * 3}))[0] == 200


async def test_outputs_and_vectors_share_steps(start):
    server = await start(Engine.fake(step_time_s=0.002))
    body = {"prompt": "a", "max_tokens": 30, "seed": 1, "ignore_eos": True}
    _, alone = await server.post("/v1/completions", body)
    answers = await asyncio.gather(
        server.post("/v1/completions", body),
        *(server.post(PATH, {"input": "a quiet river"}) for _ in range(20)),
    )
    assert answers[0][1]["choices"] == alone["choices"]
    for status, answer in answers[1:]:
        assert status == 200
        np.testing.assert_allclose(vectors_of(answer)[0], pooled("a quiet river"), atol=1e-6)


# ---- a model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(stories) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(stories)),
        batch=BatchConfig(max_num_seqs=1, max_num_batched_tokens=32),
    )


@pytest.mark.slow
async def test_openai_client_gets_the_vectors_of_a_model(start, config):
    """While the first request compiles, outputs continue. No late compilation is counted."""
    engine = Engine.load(config)
    server = await start(engine, ServerConfig(served_model_name="stories"))
    async with asyncio.timeout(60):
        while engine.stats().state != "ready":
            await asyncio.sleep(0.05)
    texts = ["Once upon a time", "a dog", "Lily went to the park. " * 20]
    asking = asyncio.ensure_future(server.openai.embeddings.create(model="stories", input=texts))
    prompt = {"prompt": "Once", "max_tokens": 5, "ignore_eos": True}
    during = 0
    while not asking.done():
        assert (await server.post("/v1/completions", prompt))[0] == 200
        during += 1
        await asyncio.sleep(0.05)  # leaves the cores to the compiler
    answer = await asking  # the client requests base64
    assert during > 1, "outputs waited for the compilation"
    assert engine.stats().compilations_after_ready == 0
    plain = await server.openai.embeddings.create(
        model="stories", input=texts, encoding_format="float"
    )
    expected = await submitted(engine, texts, "last")
    for given in (answer, plain):
        vectors = np.array([item.embedding for item in given.data])
        np.testing.assert_allclose(vectors, expected, atol=2e-5)
        assert given.usage.prompt_tokens == given.usage.total_tokens > 60
    means = await server.openai.embeddings.create(
        model="stories", input=texts, extra_body={"pooling": "mean"}
    )
    expected = await submitted(engine, texts, "mean")
    vectors = np.array([item.embedding for item in means.data])
    np.testing.assert_allclose(vectors, expected, atol=2e-5)


async def submitted(engine: Engine, texts: list[str], pooling: Pooling) -> np.ndarray:
    """Return the vectors without the server, one after the other, with unit length."""
    params = SamplingParams(max_tokens=0)
    vectors = []
    for i, text in enumerate(texts):
        ids = engine.tokenizer.encode(text) if engine.tokenizer is not None else []
        stream = engine.submit(ids, params, request_id=f"{pooling}-{i}", pooling=pooling)
        [delta] = [delta async for deltas in stream for delta in deltas]
        assert delta.pooled is not None
        vectors.append(np.frombuffer(delta.pooled, "<f4"))
    return np.stack([vector / np.linalg.norm(vector) for vector in vectors])


class _Compiling:
    """A `core.Pooler` that compiles until it is released."""

    def __init__(self, error: Exception | None = None):
        self.done = threading.Event()
        self.can_pool = False
        self.num_compiled = 0
        self.error = error

    def compile_pooling(self) -> None:
        self.num_compiled += 1
        assert self.done.wait(10)
        if self.error is not None:
            raise self.error

    def activate_pooling(self) -> None:
        self.can_pool = True


async def test_requests_during_compilation_wait_together_and_may_leave(start):
    engine = Engine.fake()
    pooler = engine._parts.pooler = _Compiling()
    server = await start(engine)
    posts = [asyncio.ensure_future(server.post(PATH, {"input": "a"})) for _ in range(3)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await server.post(PATH, {"input": ["a", "b"]})
    status, _ = await server.post(PATH, {"input": "a", "timeout": 0.05})
    assert status == 504
    assert (await server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}))[0] == 200
    assert not any(post.done() for post in posts) and len(engine._preparation) == 3
    pooler.done.set()
    for status, answer in await asyncio.gather(*posts):
        assert status == 200
        np.testing.assert_allclose(vectors_of(answer)[0], pooled("a"), atol=1e-6)
    assert pooler.num_compiled == 1 and pooler.can_pool and not len(engine._preparation)


async def test_compilation_failure_costs_only_the_request(start):
    engine = Engine.fake()
    pooler = engine._parts.pooler = _Compiling(EngineError("there is no room"))
    pooler.done.set()
    server = await start(engine)
    for _ in range(2):
        status, answer = await server.post(PATH, {"input": "a"})
        assert status == 503 and answer["error"]["code"] == "engine_unavailable"
    assert (await server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}))[0] == 200


async def test_server_stops_during_compilation(start):
    engine = Engine.fake()
    pooler = engine._parts.pooler = _Compiling()
    server = await start(engine)
    post = asyncio.ensure_future(server.post(PATH, {"input": "a"}))
    while not len(engine._preparation):
        await asyncio.sleep(0.001)
    await engine.stop()
    status, _ = await post
    assert status == 503
    pooler.done.set()
