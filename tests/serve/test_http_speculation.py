"""Speculation in usage and metrics."""

import json

from prometheus_client.parser import text_string_to_metric_families

from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine

ASK = {"prompt": "Tell me about the river.", "max_tokens": 60, "temperature": 0}


def drafting(kind: str, **options) -> Engine:
    config = EngineConfig.from_options(speculation=kind, **options)
    return Engine.fake(max_model_len=1024, step_time_s=0.002, check=True, config=config)


async def test_usage_counts_drafts_and_the_text_is_unchanged(start):
    plain = await start(Engine.fake(max_model_len=1024))
    _, expected = await plain.post("/v1/completions", ASK)
    details = expected["usage"]["completion_tokens_details"]
    drafts = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert details == {**drafts, "reasoning_tokens": 0}

    server = await start(drafting("suffix"))
    accepted = []
    for _ in range(3):  # the second can draft from the first
        _, answer = await server.post("/v1/completions", ASK)
        assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 60
        details = answer["usage"]["completion_tokens_details"]
        assert details["rejected_prediction_tokens"] >= 0
        accepted.append(details["accepted_prediction_tokens"])
    assert max(accepted[1:]) > 20

    body = ASK | {"stream": True, "stream_options": {"include_usage": True}}
    *events, last, done = await server.events("/v1/completions", body)
    assert done == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == expected["choices"][0]["text"]
    details = json.loads(last)["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20


async def test_metrics_count_drafts_by_position(start):
    server = await start(drafting("suffix", max_draft_tokens=5))
    for _ in range(3):
        await server.post("/v1/completions", ASK)

    async def counters() -> dict[str, list[float]]:
        async with server.http.get(server.url + "/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            return {f.name: [s.value for s in f.samples] for f in families if "spec" in f.name}

    found = await counters()
    (drafts,) = found["vllm:spec_decode_num_drafts"]
    (tokens,) = found["vllm:spec_decode_num_draft_tokens"]
    (accepted,) = found["vllm:spec_decode_num_accepted_tokens"]
    by_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert 0 < drafts <= tokens <= 5 * drafts and 20 < accepted <= tokens
    assert len(by_position) == 5 and sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)


async def test_draft_metrics_are_absent_without_speculation(server):
    async with server.http.get(server.url + "/metrics") as response:
        assert "spec_decode" not in await response.text()
