"""The official client against the bundled model, over a real socket, without stand-ins."""

import asyncio

import pytest
from conftest import running

from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def server():
    config = EngineConfig.from_options(max_num_seqs=4, max_num_batched_tokens=64)
    async with running(await asyncio.to_thread(Engine.load, config)) as server:
        yield server


async def test_chat_and_completions_stream_real_text(server):
    create = server.openai.chat.completions.create
    answer = await create(model="forge-tiny", messages=CHAT, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"

    chunks = [c async for c in await create(
        model="forge-tiny", messages=CHAT, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )]  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage

    async def story(seed: int) -> str:
        completion = await server.openai.completions.create(
            model="forge-tiny", prompt="Once upon a time", max_tokens=40, seed=seed
        )
        return completion.choices[0].text

    stories = await asyncio.gather(*(story(seed) for seed in range(12)))
    assert len(set(stories)) == 12 and all(len(s.split()) > 15 for s in stories)

    # A client that leaves in the middle leaves nothing behind.
    stream = await create(
        model="forge-tiny", messages=CHAT, max_tokens=900, stream=True, extra_body={"ignore_eos": 1}
    )
    async for _ in stream:
        break
    await stream.close()
    await server.idle()
    stats = server.engine.stats()
    assert stats.num_used_blocks == stats.num_running == 0
    assert stats.compilations_after_ready == 0
