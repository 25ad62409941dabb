"""The store of responses: its size, lifetime, and sharing."""

from __future__ import annotations

import json

import pytest

from forge_serve.errors import PreviousResponseNotFoundError, UnknownResponseError
from forge_serve.responses_api.store import (
    MAX_LOCAL,
    OVERHEAD_BYTES,
    LocalResponses,
    ResponseStore,
    StoredResponse,
    Turn,
)

BYTES = 2 * OVERHEAD_BYTES  # a response with its turn, and at most 200 more


def begun(
    store: ResponseStore, name: str, tenant: str = "", previous: Turn | None = None, size: int = 0
) -> StoredResponse:
    text = json.dumps([{"type": "message", "role": "user", "content": name + " " * size}])
    turn = Turn(previous, text.encode())
    response = StoredResponse(name, tenant, turn, lambda: b"{}")
    store.begin(response)
    return response


def kept(store: ResponseStore, name: str, *args, **kwargs) -> StoredResponse:
    response = begun(store, name, *args, **kwargs)
    head = json.dumps({"id": name}).encode()
    answer = [{"type": "message", "role": "assistant", "content": name.upper()}]
    store.finish(response, head, json.dumps(answer).encode())
    return response


def names(store: ResponseStore, *candidates: str, tenant: str = "") -> str:
    """Return the names that exist; reading all of them does not change the eviction order."""
    found = ""
    for name in candidates:
        try:
            store.get(tenant, name)
        except UnknownResponseError:
            continue
        found += name
    return found


def test_stored_response_is_returned_whole():
    store = ResponseStore(10, 10**6)
    response = kept(store, "a")
    body = json.loads(store.get("", "a").body())
    assert body["id"] == "a" and body["output"][0]["content"] == "A"
    assert not response.running


def test_conversation_has_all_of_its_turns():
    store = ResponseStore(10, 10**6)
    a = kept(store, "a")
    b = kept(store, "b", previous=a.turn)
    c = kept(store, "c", previous=b.turn)
    assert [item.content for item in c.turn.items()] == ["a", "A", "b", "B", "c", "C"]
    assert [json.loads(item)["content"] for item in c.turn.input_items()] == [*"aAbBc"]


def test_response_count_is_bounded():
    store = ResponseStore(3, 10**6)
    for name in "abcde":
        kept(store, name)
    assert names(store, *"abcde") == "cde" and store.num_responses == 3


def test_response_bytes_are_bounded():
    store = ResponseStore(100, 3 * (BYTES + 1000))
    for name in "abcde":
        kept(store, name, size=700)
    assert names(store, *"abcde") == "cde"
    kept(store, "f", size=2 * (BYTES + 1000))
    assert names(store, *"abcdef") == "f"
    kept(store, "g", size=9 * BYTES)  # too large even alone
    assert names(store, *"abcdefg") == "" and store.num_bytes == 0


def test_shared_turns_are_counted_once_and_kept_while_referenced():
    store = ResponseStore(100, 10**6)
    a = kept(store, "a", size=5000)
    alone = store.num_bytes
    b = kept(store, "b", previous=a.turn)
    both = store.num_bytes
    assert both < alone + BYTES + 200
    store.delete(a)
    assert both - 2 * OVERHEAD_BYTES < store.num_bytes < both
    assert b.turn.items()[0].content.startswith("a ")
    store.delete(b)
    assert store.num_bytes == 0 and store.num_responses == 0


def test_recently_used_response_stays():
    store = ResponseStore(2, 10**6)
    kept(store, "a")
    kept(store, "b")
    store.get("", "a")
    kept(store, "c")
    assert names(store, *"abc") == "ac"


def test_running_response_is_neither_evicted_nor_counted():
    store = ResponseStore(1, 10**6)
    running = begun(store, "a")
    kept(store, "b")
    kept(store, "c")
    assert names(store, *"abc") == "ac" and store.num_responses == 1
    store.finish(running, b'{"id":"a"}', b"[]")
    assert names(store, *"abc") == "a"


def test_response_deleted_while_running_is_not_kept():
    store = ResponseStore(10, 10**6)
    running = begun(store, "a")
    store.delete(running)
    store.finish(running, b'{"id":"a"}', b"[]")
    store.delete(running)
    assert names(store, "a") == "" and store.num_bytes == 0


@pytest.mark.parametrize("bound", ["number", "bytes"])
def test_largest_tenant_is_evicted_first(bound):
    store = ResponseStore(*((4, 10**6) if bound == "number" else (100, 4 * (BYTES + 200))))
    kept(store, "x", "few")
    for name in "abcdefgh":
        kept(store, name, "many")
    assert names(store, "x", tenant="few") == "x"
    assert names(store, *"abcdefgh", tenant="many") == "fgh"


def test_tenant_cannot_read_the_response_of_another():
    store = ResponseStore(10, 10**6)
    kept(store, "a", "one")
    assert names(store, "a", tenant="one") == "a"
    assert names(store, "a", tenant="two") == "" == names(store, "a")


# ---- local responses of WebSockets --------------------------------------------------------------


def local(
    store: ResponseStore, own: LocalResponses, name: str, previous: Turn | None = None
) -> StoredResponse:
    """Add a response that only its connection can continue."""
    response = StoredResponse(name, "", Turn(previous, b"[]"), lambda: b"{}", local=own)
    store.begin(response)
    own.add(response)
    store.finish(response, b"{}", b"[]")
    return response


def test_local_response_belongs_to_its_connection():
    store = ResponseStore(10, 10**6)
    own, other = LocalResponses(store), LocalResponses(store)
    response = local(store, own, "a")
    assert own.previous("", "a", "p") is response
    assert names(store, "a") == "" and store.num_responses == 0 < store.num_bytes
    with pytest.raises(PreviousResponseNotFoundError):
        other.previous("", "a", "p")
    own.forget("a")
    with pytest.raises(PreviousResponseNotFoundError):
        own.previous("", "a", "p")
    assert store.num_bytes == 0


def test_local_responses_share_turns_with_stored_ones():
    store = ResponseStore(10, 10**6)
    own = LocalResponses(store)
    a = kept(store, "a")
    before = store.num_bytes
    b = local(store, own, "b", previous=a.turn)
    kept(store, "c", previous=b.turn)
    for name in "ac":
        store.delete(store.get("", name))
    assert len(own) == 1 and store.num_bytes > before, "what b continues is held"
    own.close()
    assert store.num_bytes == 0 and len(own) == 0


def test_local_responses_are_evicted_after_stored_ones():
    store = ResponseStore(10, 4 * BYTES)
    own = LocalResponses(store)
    local(store, own, "a")
    for name in "bcde":
        kept(store, name)
    assert names(store, *"bcde") == "de" and len(own) == 1
    for name in "fghij":
        local(store, own, name)
    assert names(store, *"bcde") == "" and 0 < len(own) < 6
    assert own.previous("", "j", "p").id == "j", "the newest are kept"
    with pytest.raises(PreviousResponseNotFoundError):
        own.previous("", "a", "p")


def test_local_responses_never_evict_stored_ones_by_count():
    store = ResponseStore(1, 10**6)
    own = LocalResponses(store)
    kept(store, "a")
    for number in range(MAX_LOCAL + 3):
        local(store, own, str(number))
    assert names(store, "a") == "a" and len(own) == MAX_LOCAL
