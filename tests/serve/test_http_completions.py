"""POST /v1/completions through OpenAI's own client."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.fake import WORDS, assemble_fake
from forge_jax.engine.thread import Engine
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.plan import TokenLogprobs
from forge_jax.testing import core_of
from forge_jax.text import Tokenizer
from forge_serve.generation.generation import CompletionTokensDetails, PromptTokensDetails, Usage
from forge_serve.generation.prompts import THREAD_FROM_CHARS, Prompt
from forge_serve.limits import Limits
from forge_serve.openai.requests import CompletionRequest
from forge_serve.openai.serializers import CompletionSerializer
from forge_serve.openai.validation import decode

ROOT = Path(__file__).parents[2]
STORIES = ROOT / "tests" / "fixtures" / "stories260k-hf"
FORGE_TINY = ROOT / "forge_jax" / "checkpoint" / "bundled" / "forge-tiny"


async def test_answer_has_the_openai_format(server):
    completion = await server.openai.completions.create(
        model=server.model, prompt="Hello", max_tokens=8, seed=1
    )
    assert completion.id.startswith("cmpl-")
    assert completion.object == "text_completion"
    assert completion.model == server.model
    assert completion.created > 0
    assert completion.system_fingerprint is None
    [choice] = completion.choices
    assert (choice.index, choice.logprobs) == (0, None)
    assert choice.finish_reason in ("stop", "length")
    usage = completion.usage
    num_prompt = len(server.engine.tokenizer.encode("Hello"))
    assert usage.prompt_tokens == num_prompt
    assert usage.total_tokens == num_prompt + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_deterministic_engine_returns_its_fingerprint(server):
    server.engine.system_fingerprint = "fp_0123456789ab"
    create = server.openai.completions.create
    options: dict[str, Any] = {"model": server.model, "prompt": "Hello", "max_tokens": 3}
    whole = await create(**options)
    chunks = [chunk async for chunk in await create(**options, stream=True)]
    chat = await server.openai.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=3
    )
    assert {a.system_fingerprint for a in (whole, *chunks, chat)} == {"fp_0123456789ab"}


async def test_max_tokens_defaults_to_sixteen(server):
    for max_tokens, expected in ((None, 16), (5, 5), (5.0, 5), ("5", 5), (0, 0)):
        status, answer = await server.post(
            "/v1/completions", {"prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True}
        )
        assert status == 200
        assert answer["usage"]["completion_tokens"] == expected
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_same_seed_gives_the_same_text_streamed_or_not(server):
    options: dict[str, Any] = {"model": server.model, "prompt": "Hi", "max_tokens": 60, "seed": 3}
    whole = await server.openai.completions.create(**options)
    again = await server.openai.completions.create(**options)
    other = await server.openai.completions.create(**{**options, "seed": 4})
    stream = await server.openai.completions.create(**options, stream=True)
    chunks = [chunk async for chunk in stream]
    assert whole.choices[0].text == again.choices[0].text != other.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"text_completion"}


async def test_samples_of_several_prompts_are_numbered_by_prompt(server):
    prompts = ["One", "Two", "Three"]
    options: dict[str, Any] = {"model": server.model, "max_tokens": 6, "seed": 7, "n": 2}
    options["extra_body"] = {"ignore_eos": True}
    both = await server.openai.completions.create(prompt=prompts, **options)
    assert [choice.index for choice in both.choices] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = await server.openai.completions.create(prompt=prompt, **options)
        pair = both.choices[2 * i : 2 * i + 2]
        assert [c.text for c in alone.choices] == [c.text for c in pair]
        assert pair[0].text != pair[1].text
    assert both.usage.completion_tokens == 36
    streamed = [""] * 6
    stream = await server.openai.completions.create(prompt=prompts, stream=True, **options)
    async for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in both.choices]


async def test_token_id_prompts_are_accepted_and_returned_on_request(server):
    ids = server.engine.tokenizer.encode("Hello")
    answers = []
    for prompt in ("Hello", ids, [ids], ["Hello"]):
        _, answer = await server.post(
            "/v1/completions",
            {"prompt": prompt, "max_tokens": 6, "seed": 1, "return_token_ids": True},
        )
        answers.append(answer["choices"])
    assert answers[1:] == answers[:-1]
    [choice] = answers[0]
    assert choice["prompt_token_ids"] == ids
    assert len(choice["token_ids"]) <= 6
    body = {"prompt": ids, "max_tokens": 6, "seed": 1, "return_token_ids": True, "stream": True}
    events = await server.events("/v1/completions", body)
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert [id for chunk in chunks for id in chunk["token_ids"]] == choice["token_ids"]
    assert chunks[0]["prompt_token_ids"] == ids
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


async def test_usage_is_streamed_only_on_request(server):
    body = {"prompt": "Hello", "max_tokens": 4, "stream": True, "ignore_eos": True}
    events = await server.events("/v1/completions", body)
    assert events[-1] == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events[:-1])
    body["stream_options"] = {"include_usage": True}
    *chunks, last, done = await server.events("/v1/completions", body)
    assert done == "[DONE]"
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    final = json.loads(last)
    assert final["choices"] == []
    assert final["usage"]["completion_tokens"] == 4
    body["stream_options"]["continuous_usage_stats"] = True
    *chunks, _, _ = await server.events("/v1/completions", body)
    counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 4]


async def test_stop_string_ends_the_text_before_it(server):
    options: dict[str, Any] = {"model": server.model, "prompt": "Hi", "max_tokens": 80, "seed": 5}
    options["extra_body"] = {"ignore_eos": True}
    text = (await server.openai.completions.create(**options)).choices[0].text
    stop = next(text[i : i + 2] for i in range(8, 40) if text.index(text[i : i + 2]) == i)
    for given in (stop, [stop], ["never seen in it", stop]):
        choice = (await server.openai.completions.create(**options, stop=given)).choices[0]
        assert choice.text == text[: text.index(stop)]
        assert choice.finish_reason == "stop"
        assert choice.stop_reason == stop  # an extension of the protocol
    options["extra_body"]["include_stop_str_in_output"] = True
    choice = (await server.openai.completions.create(**options, stop=stop)).choices[0]
    assert choice.text == text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_name_every_token_and_its_alternatives(server, stream):
    options = {"prompt": "Hi", "max_tokens": 12, "seed": 5, "logprobs": 3, "ignore_eos": True}
    logprobs = await _logprobs(server, options, stream)
    assert {len(values) for values in logprobs.values()} == {12}
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob <= 0.0
        assert token in top
        assert len(top) <= 4  # the token itself may not be among the three most likely
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0
    if stream:
        assert logprobs == await _logprobs(server, options, stream=False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("n", "max_tokens", "options"),
    [
        (1, 4, {"max_num_batched_tokens": 8, "max_num_seqs": 4}),
        (1, 0, {"max_num_batched_tokens": 8, "max_num_seqs": 4}),
        (2, 3, {"max_num_batched_tokens": 8, "max_num_seqs": 4}),
        (2, 3, {"prefix_cache": False, "max_num_seqs": 4}),  # sample 1 does not wait
    ],
)
async def test_echo_with_logprobs_scores_the_prompt(start, stream, n, max_tokens, options):
    server = await start(Engine.fake(config=EngineConfig.from_options(**options)))
    ids = server.engine.tokenizer.encode("A prompt of many small steps, longer than a block. " * 2)
    body = {"prompt": ids, "n": n, "max_tokens": max_tokens, "logprobs": 2, "echo": True}
    body |= {"ignore_eos": True, "seed": 1}
    for choice in range(n):
        logprobs = await _logprobs(server, body, stream, choice)
        names = [server.engine.tokenizer.token_text(id) for id in ids]
        assert logprobs["tokens"][: len(ids)] == names
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(logprob <= 0.0 for logprob in logprobs["token_logprobs"][1:])
        assert {len(values) for values in logprobs.values()} == {len(ids) + max_tokens}


async def test_logprob_of_minus_infinity_is_a_finite_number(server, monkeypatch):
    def impossible(rolling: int, token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(token, -math.inf, ((token, -math.inf),))

    monkeypatch.setattr(core_of(server.engine).device, "_logprobs", impossible)
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 1}
    logprobs = await _logprobs(server, body, stream=False)
    assert logprobs["token_logprobs"] == [-9999.0]
    assert list(logprobs["top_logprobs"][0].values()) == [-9999.0]


def test_text_offsets_point_at_the_tokens_of_the_text():
    tokenizer = Tokenizer.from_folder(STORIES)  # its decoder puts a space before the first word
    text = "Once upon a time, größer"
    ids = tokenizer.encode(text)
    logprobs = _echoed(tokenizer, Prompt(ids, text), ())["logprobs"]
    offsets, tokens = logprobs["text_offset"], logprobs["tokens"]
    assert offsets[:2] == [0, 0]
    for offset, token in zip(offsets[2:], tokens[2:], strict=True):
        assert text[offset:].startswith(token) or "\ufffd" in token


def test_text_offsets_count_the_clients_special_tokens():
    tokenizer = Tokenizer.from_folder(FORGE_TINY)
    text = "<|user|>hi<|end|><|assistant|>"
    output = tokenizer.encode("Hello there", add_special_tokens=False)
    for special in (True, False):  # with a BOS before it, which the client did not write
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert (ids[0] == tokenizer.bos_token_id) is special
        choice = _echoed(tokenizer, Prompt(ids, text), output)
        assert choice["text"] == text + "Hello there"
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[: len(ids)] == [0] * special + [0, 8, 10, 17]
        assert offsets[len(ids)] == len(text) == 30
        for offset, token in list(zip(offsets, choice["logprobs"]["tokens"], strict=True))[
            special:
        ]:
            assert choice["text"][offset:].startswith(token)
    # Special tokens given as ids are not in the text, so they have no length in it.
    choice = _echoed(tokenizer, Prompt(ids), output)
    assert choice["text"] == "hiHello there"
    assert choice["logprobs"]["text_offset"][:5] == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("max_tokens", [0, 1, 8])
@pytest.mark.parametrize("after", ["", "b"])
async def test_character_split_by_the_prompt_is_echoed_once(server, max_tokens, after):
    tokenizer = server.engine.tokenizer
    first_half = len(WORDS)  # the fake device always continues with the second half
    prompt = [*tokenizer.encode("a"), first_half, *tokenizer.encode(after)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "return_token_ids": True}
    body |= {"seed": 1, "ignore_eos": True}
    _, answer = await server.post("/v1/completions", body)
    [choice] = answer["choices"]
    assert choice["text"] == tokenizer.decode(prompt + choice["token_ids"])
    *events, _ = await server.events("/v1/completions", {**body, "stream": True})
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == choice["text"]


async def test_nothing_is_submitted_if_one_prompt_is_unservable(server, monkeypatch):
    submitted: list[str] = []
    submit = server.engine.submit

    def spy(*args: Any, **kwargs: Any) -> Any:
        submitted.append(kwargs["request_id"])
        return submit(*args, **kwargs)

    monkeypatch.setattr(server.engine, "submit", spy)
    status, answer = await server.post("/v1/completions", {"prompt": ["a", "b", "x" * 2000]})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert submitted == []
    assert (await server.post("/v1/completions", {"prompt": ["a", "b"]}))[0] == 200
    assert len(submitted) == 2


async def test_echo_puts_the_prompt_before_the_text(server):
    options: dict[str, Any] = {"model": server.model, "prompt": "Grüße!", "max_tokens": 5}
    options |= {"seed": 2, "n": 2}
    plain = await server.openai.completions.create(**options)
    echoed = await server.openai.completions.create(**options, echo=True)
    assert [c.text for c in echoed.choices] == ["Grüße!" + c.text for c in plain.choices]
    streamed = ["", ""]
    async for chunk in await server.openai.completions.create(**options, echo=True, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [c.text for c in echoed.choices]


async def test_cached_prefix_is_reported(server):
    prompt = "the same beginning " * 20
    first, second = [
        await server.openai.completions.create(model=server.model, prompt=prompt, max_tokens=2)
        for _ in range(2)
    ]
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    salted = await server.openai.completions.create(
        model=server.model, prompt=prompt, max_tokens=2, extra_body={"cache_salt": "mine"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


async def test_long_prompts_are_tokenized(server):
    assert THREAD_FROM_CHARS < 10_000
    status, answer = await server.post("/v1/completions", {"prompt": "x" * 10_000, "max_tokens": 1})
    assert status == 400
    assert "10000 tokens" in answer["error"]["message"]
    assert answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["param"] == "prompt"


async def test_model_without_tokenizer_takes_and_returns_token_ids(start):
    sizes = {"step_time_s": 0.0, "max_model_len": 256}
    parts = assemble_fake(EngineConfig(), **sizes, check=False, has_text=False)
    server = await start(Engine(parts))
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "logprobs": 1, "ignore_eos": True}
    status, answer = await server.post("/v1/completions", body)
    assert status == 200
    [choice] = answer["choices"]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 4
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in choice["token_ids"]]
    status, answer = await server.post("/v1/completions", {"prompt": "text"})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert "no tokenizer" in answer["error"]["message"]
    messages = [{"role": "user", "content": "text"}]
    status, answer = await server.post("/v1/chat/completions", {"messages": messages})
    assert (status, answer["error"]["param"]) == (400, "messages")


def _echoed(tokenizer: Tokenizer, prompt: Prompt, output: Sequence[int]) -> dict[str, Any]:
    """Return the choice of an answer with `echo` and `logprobs` to this prompt."""
    request = decode(b'{"prompt": "", "echo": true, "logprobs": 0}', CompletionRequest, Limits())
    serializer = CompletionSerializer(
        request, [prompt], tokenizer, unique_id="x", model="m", created_s=0
    )
    prompt_scores = tuple(TokenLogprobs(id, -1.0) for id in prompt.token_ids[1:])
    scores = tuple(TokenLogprobs(id, -1.0) for id in output)
    text = tokenizer.decode(output) if output else ""
    serializer.add(
        0,
        Delta(
            0,
            text=text,
            token_ids=tuple(output),
            logprobs=scores,
            prompt_logprobs=prompt_scores,
            finish_reason="length",
        ),
    )
    details = PromptTokensDetails(0), CompletionTokensDetails(0, 0, 0)
    answer = json.loads(serializer.body(Usage(1, 2, 3, *details)))
    return answer["choices"][0]


async def _logprobs(
    server: Any, options: dict[str, Any], stream: bool, choice: int = 0
) -> dict[str, list[Any]]:
    """Return the completion logprobs of one choice, assembled from its chunks if it streams."""
    if not stream:
        status, answer = await server.post("/v1/completions", options)
        assert status == 200, answer
        return answer["choices"][choice]["logprobs"]
    *chunks, done = await server.events("/v1/completions", {**options, "stream": True})
    assert done == "[DONE]"
    joined: dict[str, list[Any]] = {}
    for chunk in chunks:
        [part] = json.loads(chunk)["choices"]
        if part["index"] == choice:
            for key, values in part["logprobs"].items():
                joined.setdefault(key, []).extend(values)
    return joined
