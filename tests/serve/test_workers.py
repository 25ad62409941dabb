"""Lanes: the assignment of threads, dropped work, and partial tokenization of long texts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from forge_jax.checkpoint.hub import resolve
from forge_jax.engine.fake import fake_tokenizer
from forge_jax.engine.thread import Engine
from forge_jax.errors import OverloadedError
from forge_jax.text import Tokenizer
from forge_serve.config import ServerConfig
from forge_serve.generation.prompts import MARGIN_TOKENS, Kept
from forge_serve.generation.workers import PIECE_BYTES, SHORT_BYTES, Lane, in_pieces
from forge_serve.limits import Limits

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Held:
    """A lane whose only thread is busy until `let_go`; `ran` has the later calls."""

    def __init__(self, lane: Lane):
        self.lane = lane
        self.ran: list[str] = []
        self._go = threading.Event()
        self._task: asyncio.Task[bool] | None = None

    async def begin(self) -> None:
        begun = threading.Event()

        def block() -> bool:
            begun.set()
            return self._go.wait(60.0)

        self._task = asyncio.create_task(self.lane.run("blocker", block))
        await asyncio.to_thread(begun.wait, 60.0)

    async def leave(self) -> None:
        """Cancel the client of the running call, which continues."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def let_go(self) -> None:
        self._go.set()

    async def queue(self, tenant: str, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self.lane.run(tenant, lambda: self.ran.append(name)))
        await asyncio.sleep(0)
        return task


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    held = Held(Lane("test", 1, max_held_bytes=100))
    await held.begin()
    yield held
    held.let_go()
    held.lane.close()


async def test_lane_serves_tenants_in_turn(held):
    tasks = [await held.queue("a", f"a{i}") for i in range(3)]
    tasks += [await held.queue("b", f"b{i}") for i in range(2)]
    held.let_go()
    await asyncio.gather(*tasks)
    assert held.ran == ["a0", "b0", "a1", "b1", "a2"]


async def test_lane_drops_waiting_work_of_disconnected_clients(held):
    gone, stays = await held.queue("a", "gone"), await held.queue("a", "stays")
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert held.lane.num_waiting == 1
    held.let_go()
    await stays
    assert held.ran == ["stays"]


async def test_lane_thread_stays_busy_until_an_abandoned_call_returns(held):
    waiting = await held.queue("a", "next")
    await held.leave()
    await asyncio.sleep(0.01)
    assert held.ran == [] and held.lane.num_waiting == 1
    held.let_go()
    await waiting
    assert held.ran == ["next"]


async def test_lane_propagates_exceptions_and_stays_usable():
    lane = Lane("test", 1)
    with pytest.raises(ZeroDivisionError):
        await lane.run("a", lambda: 1 // 0)
    assert await lane.run("a", lambda: 7) == 7
    lane.close()


def test_lane_admits_half_of_its_bytes_to_a_tenant_and_all_to_several():
    lane = Lane("test", 1, max_held_bytes=100)
    with lane.admit("a", 1000):  # an empty lane
        pass
    with lane.admit("a", 40):
        with pytest.raises(OverloadedError), lane.admit("a", 20):
            pass
        with lane.admit("b", 50), pytest.raises(OverloadedError), lane.admit("c", 20):
            pass
        assert lane.held_bytes == 40
    assert lane.held_bytes == 0


def test_pieces_keep_order_and_are_small():
    items = [b"x" * 1000] * 100
    pieces = list(in_pieces(items, len))
    assert [item for piece in pieces for item in piece] == items
    assert all(sum(map(len, piece)) < PIECE_BYTES + 1000 for piece in pieces)
    assert list(in_pieces([], len)) == []


# ---- truncation ------------------------------------------------------------------------------


class Counting:
    """A tokenizer's `encode` that sums up its input."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.num_chars = 0

    def __call__(self, text: str) -> list[int]:
        self.num_chars += len(text)
        return self._tokenizer.encode(text)


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    tokenizer = Tokenizer.from_folder(resolve("forge-tiny"))
    assert tokenizer is not None
    return tokenizer


WORDS = "The river 7 ran over  thé stones,\n\nand    the boat's lamp was (still) lit. "
TEXTS = [WORDS * 400, "a" * 30_000, " " * 30_000, "漢字かな" * 5_000, "ab\n" * 9_000]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:4]))
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("keep", [1, 7, 500])
def test_truncated_text_has_the_tokens_of_the_whole_text(tiny, text, first, keep):
    kept, encode = Kept(keep, first), Counting(tiny)
    ids, whole = kept.encode(text, encode, len(text))
    expected = tiny.encode(text)
    assert (ids[:keep] == expected[:keep]) if first else (ids[-keep:] == expected[-keep:])
    assert whole == (ids == expected)


def test_truncation_tokenizes_in_proportion_to_the_kept_tokens(tiny):
    text, encode = WORDS * 20_000, Counting(tiny)
    Kept(10, first=False).encode(text, encode, len(text))
    assert encode.num_chars < 8 * (10 + MARGIN_TOKENS) + 1 < len(text) / 100


def test_truncation_stops_at_the_limit_if_the_text_has_few_tokens():
    encode = []
    kept = Kept(10, first=False)
    ids, whole = kept.encode("x" * 10**6, lambda text: encode.append(len(text)) or [1], 10**5)
    assert (ids, whole) == ([1], False)
    assert max(encode) <= 10**5 and sum(encode) <= 3 * 10**5


# ---- over HTTP -------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """Record the characters of each text that is tokenized."""
    sizes: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    return sizes


@pytest.mark.parametrize("side", ["left", "right"])
async def test_long_truncated_prompt_is_tokenized_in_part(server, encoded, side):
    text = "".join(chr(97 + i % 26) for i in range(3_000_000))
    body = {"prompt": text, "truncate_prompt_tokens": 5, "truncation_side": side}
    status, answer = await server.post(
        COMPLETIONS, {**body, "max_tokens": 1, "return_token_ids": True}
    )
    assert status == 200
    tokenizer = fake_tokenizer()
    end = text[-50:] if side == "left" else text[:50]
    expected = tokenizer.encode(end)
    expected = expected[:5] if side == "right" else expected[-5:]
    assert answer["choices"][0]["prompt_token_ids"] == expected
    assert sum(encoded[:-1]) < 10_000


async def test_truncation_beyond_the_context_is_rejected_before_tokenizing(server, encoded):
    body = {"prompt": "a" * 100_000, "truncate_prompt_tokens": 1025}
    status, answer = await server.post(COMPLETIONS, body)
    assert status == 400 and answer["error"]["param"] == "truncate_prompt_tokens"
    assert not encoded


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": ["a" * 500] * 3}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 1500}]}, "messages"),
        (COMPLETIONS, {"prompt": ["a" * 500] * 3}, "prompt"),
        ("/v1/embeddings", {"input": ["a" * 500] * 3}, "input"),
        ("/score", {"text_1": "a", "text_2": ["a" * 500] * 3}, "text_1"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 1500}],
                "truncate_prompt_tokens": 4}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a" * 1500}]},
         "messages"),
        ("/v1/responses/input_tokens", {"input": "a" * 1500}, "input"),
    ],
)  # fmt: skip
async def test_total_text_of_a_request_is_limited(start, encoded, path, body, param):
    engine = Engine.fake(max_model_len=4096)
    server = await start(engine, ServerConfig(limits=Limits(text_bytes=1024)))
    status, answer = await server.post(path, body)
    assert status == 400, answer
    assert "at most 1024" in answer["error"]["message"]
    assert answer["error"].get("param", param) == param
    assert not encoded


async def test_long_texts_do_not_delay_short_ones(start):
    server = await start(Engine.fake(max_model_len=2**20))
    lane = server.service.workers.long_texts
    helds = [Held(lane) for _ in range(lane._free)]
    for held in helds:
        await held.begin()
    async with asyncio.timeout(20):
        long = asyncio.create_task(server.post("/tokenize", {"prompt": "a" * (SHORT_BYTES + 1)}))
        while not lane.num_waiting:
            await asyncio.sleep(0.001)
        status, answer = await server.post("/tokenize", {"prompt": "a" * 5000})
        assert status == 200 and answer["count"] >= 5000
        assert not long.done()
        for held in helds:
            held.let_go()
        assert (await long)[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a" * 100_000, "truncate_prompt_tokens": 4}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 100_000}],
                "truncate_prompt_tokens": 4}),
        ("/tokenize", {"prompt": ["a" * 1000] * 100}),
        ("/detokenize", {"tokens": [5] * 100_000}),
        ("/v1/embeddings", {"input": ["a" * 1000] * 100}),
    ],
)  # fmt: skip
async def test_text_of_a_disconnected_client_is_not_processed(start, encoded, path, body):
    server = await start(Engine.fake(max_model_len=1024))
    workers = server.service.workers
    lanes = (workers.short_texts, workers.long_texts)
    helds = [Held(lane) for lane in lanes for _ in range(lane._free)]
    for held in helds:
        await held.begin()
    async with asyncio.timeout(20):
        task = asyncio.create_task(server.post(path, body))
        while not any(lane.num_waiting for lane in lanes):
            await asyncio.sleep(0.001)
        task.cancel()
        while any(lane.num_waiting for lane in lanes):
            await asyncio.sleep(0.001)
        for held in helds:
            held.let_go()
        status, _ = await server.post("/tokenize", {"prompt": "a" * 5000})
    assert status == 200
    assert encoded == [5000]
