"""Prompts of many token ids: work in proportion to them runs outside the event loop's thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from forge_jax.engine.thread import Engine
from forge_jax.errors import RequestError
from forge_jax.schedule.request import TokenIds
from forge_serve.generation.prompts import THREAD_FROM_IDS

LARGE = [5] * (2 * THREAD_FROM_IDS)


@pytest.fixture
def read(monkeypatch) -> list[tuple[int, str]]:
    """Record how many ids are checked at once, and in which thread."""
    found: list[tuple[int, str]] = []
    of = TokenIds.of

    def spy(ids: Any) -> TokenIds:
        if not isinstance(ids, TokenIds):
            found.append((len(ids), threading.current_thread().name))
        return of(ids)

    monkeypatch.setattr(TokenIds, "of", spy)
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LARGE, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [LARGE, LARGE[:-1]], "max_tokens": 1}),
        ("/v1/completions", {"prompt": LARGE, "max_tokens": 1, "truncate_prompt_tokens": 5000}),
        ("/v1/completions", {"prompt": "a" * len(LARGE), "max_tokens": 1}),
        ("/generate", {"prompt": LARGE, "max_new_tokens": 1}),
        ("/v1/embeddings", {"input": LARGE}),
        ("/v1/embeddings", {"input": [LARGE, LARGE[:-1]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * len(LARGE)}],
                                  "max_tokens": 1}),
    ],
)  # fmt: skip
async def test_many_token_ids_are_checked_in_a_thread(start, read, path, body):
    server = await start(Engine.fake(max_model_len=16384))
    status, answer = await server.post(path, body)
    assert status == 200, answer
    large = [thread for number, thread in read if number > THREAD_FROM_IDS]
    assert large and all(thread.startswith("forge-") for thread in large), read


async def test_few_token_ids_are_checked_on_the_event_loop(start, read):
    server = await start(Engine.fake())
    assert (await server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 1}))[0] == 200
    assert read == [(2, threading.main_thread().name)]


async def test_bad_id_among_many_is_rejected(start):
    server = await start(Engine.fake(max_model_len=16384))
    for bad in (-1, 99999, 2**40):
        body = {"prompt": [*LARGE, bad], "max_tokens": 1}
        status, answer = await server.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "prompt")


def test_token_ids_have_bounds():
    ids = TokenIds.of([7, 3, 5])
    assert ids == (7, 3, 5) and (ids.low, ids.high) == (3, 7)
    assert TokenIds.of(ids) is ids
    assert (TokenIds.of([]).low, TokenIds.of([]).high) == (0, -1)
    with pytest.raises(RequestError, match="integers"):
        TokenIds.of(["a"])  # type: ignore[list-item]
