"""Events and metrics without a server, compared with their structs and libraries."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Histogram

from forge_jax.engine.fake import fake_tokenizer
from forge_jax.schedule.outputs import Delta
from forge_serve.generation.generation import CompletionTokensDetails, PromptTokensDetails, Usage
from forge_serve.generation.prompts import Prompt
from forge_serve.openai.requests import ChatRequest, CompletionRequest, GenerateRequest, Message
from forge_serve.openai.response_types import ChatEvent, CompletionEvent, GenerateEvent
from forge_serve.openai.serializers import ChatSerializer, CompletionSerializer, GenerateSerializer
from forge_serve.telemetry.histogram import ModelHistogram

TEXTS = (
    "plain",
    '"quoted" \\ and\nlines\t\x00\x1f\x7f',
    "café 日本 🙂\u2028",
    "</script>",
    "%d %b",
)
FORMS = {
    "completions": (CompletionSerializer, CompletionRequest(prompt="a", stream=True)),
    "chat": (ChatSerializer, ChatRequest(messages=[Message("user", "a")], stream=True)),
    "generate": (GenerateSerializer, GenerateRequest(prompt="a", stream=True)),
}
EVENTS = {"completions": CompletionEvent, "chat": ChatEvent, "generate": GenerateEvent}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("text", TEXTS)
def test_plain_event_is_its_encoded_struct(name, text):
    form_type, request = FORMS[name]
    prompts = [Prompt([1]), Prompt([2])] if name == "completions" else [Prompt([1])]
    serializer = form_type(
        request, prompts, fake_tokenizer(), unique_id="x", model='m"odel', created_s=1
    )
    choice = len(prompts) - 1
    serializer.events(choice, Delta(0, "first", (5,)))
    delta = Delta(0, text, (6,))
    event = serializer.events(choice, delta)
    data = event.removeprefix(b"data: ").removesuffix(b"\n\n")
    assert msgspec.json.encode(msgspec.json.decode(data, type=EVENTS[name])) == data
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
    answer = json.loads(data)
    shown = answer["choices"][0] if "choices" in answer else answer
    assert shown.get("index", choice) == choice
    assert (shown["delta"]["content"] if "delta" in shown else shown["text"]) == text


@pytest.mark.parametrize(
    "more", [{"return_token_ids": True}, {"logprobs": 1}], ids=["token ids", "logprobs"]
)
def test_event_with_more_than_text_is_never_plain(more):
    request = CompletionRequest(prompt="a", stream=True, **more)
    serializer = CompletionSerializer(
        request, [Prompt([1])], fake_tokenizer(), unique_id="x", model="m", created_s=1
    )
    for token in (5, 6):
        answer = json.loads(
            serializer.events(0, Delta(0, "a", (token,), ())).removeprefix(b"data: ")
        )
        choice = answer["choices"][0]
        assert choice.get("token_ids") == [token] or choice["logprobs"] is not None


def test_continuous_usage_is_in_every_event():
    form_type, request = FORMS["completions"]
    serializer = form_type(
        request, [Prompt([1])], fake_tokenizer(), unique_id="x", model="m", created_s=1
    )
    usage = Usage(1, 2, 3, PromptTokensDetails(0), CompletionTokensDetails(0, 0, 0))
    for num_tokens in (1, 2):
        event = serializer.events(0, Delta(0, "a", (5,)), usage)
        found = json.loads(event.removeprefix(b"data: "))["usage"]
        assert (found["completion_tokens"], found["total_tokens"]) == (num_tokens, 1 + num_tokens)


def test_cheap_histogram_counts_like_prometheus_client():
    bounds = (0.001, 0.01, 0.25, 1, 10)
    registry, expected = CollectorRegistry(), CollectorRegistry()
    cheap = ModelHistogram("h", "doc", bounds, lambda: [{"model_name": "m"}])
    registry.register(cheap)
    library = Histogram("h", "doc", ("model_name",), buckets=bounds, registry=expected).labels("m")
    rng = random.Random(0)
    for value in [*bounds, 0.0, 11.0, *(rng.expovariate(1) for _ in range(100))]:
        cheap.observe(value)
        library.observe(value)

    def samples(of: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
        (family,) = of.collect()
        return [(s.name, s.labels, s.value) for s in family.samples if s.name != "h_created"]

    assert samples(registry) == samples(expected)


def test_histogram_hides_unreachable_bounds():
    registry = CollectorRegistry()
    labels = {"model_name": "m", "engine": "0"}
    histogram = ModelHistogram("h", "doc", (1, 10, 100, 1000), lambda: [labels], lambda: 100)
    registry.register(histogram)
    for value in (1, 50, 200):
        histogram.observe(value)
    (family,) = registry.collect()
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name == "h_bucket"}
    assert buckets == {"1.0": 1, "10.0": 1, "100.0": 2, "+Inf": 3}
    assert all(labels.items() <= sample.labels.items() for sample in family.samples)


def test_histogram_without_a_model_is_hidden():
    registry = CollectorRegistry()
    registry.register(ModelHistogram("h", "doc", (1,), list))
    assert not list(registry.collect())
