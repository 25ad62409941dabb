"""The front-end benchmark's client: its counts, and its detection of wrong answers."""

from __future__ import annotations

import json

import pytest

from benchmarks.epoll_client import BadAnswerError, Body, _Connection, check_stream, check_whole

BODY = Body(request=b"", text="a bc", tokens=3)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


def stream(*chunks: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"


GOOD = stream(event("a") + event(" b"), event("c", "length") + b"data: [DONE]\n\n")


def test_correct_answer_passes():
    check_stream(BODY, GOOD)


@pytest.mark.parametrize(
    "answer",
    [
        stream(event("a"), event("c", "length") + b"data: [DONE]\n\n"),
        stream(event("a"), event(" bc", "length")),
        stream(event("a", "length"), event(" bc", "length") + b"data: [DONE]\n\n"),
        stream(event("a"), event(" bc") + b"data: [DONE]\n\n"),
        GOOD.replace(b"\r\n0\r\n", b"\r\n"),
        GOOD + b"HTTP/1.1 200 OK",
        GOOD.replace(HEAD, HEAD + b"7\r\n"),
    ],
    ids=["text", "no end", "two ends", "no reason", "cut off", "goes on", "chunk length"],
)
def test_wrong_answer_is_detected(answer):
    with pytest.raises((BadAnswerError, ValueError)):
        check_stream(BODY, answer)


def test_wrong_whole_answer_is_detected():
    answer = {"choices": [{"text": "a bd"}], "usage": {"completion_tokens": 3}}
    with pytest.raises(BadAnswerError):
        check_whole(BODY, b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(answer).encode())


@pytest.mark.parametrize("size", [1, 5, 7, 50, 10_000])
def test_events_are_counted_once_for_any_split(size):
    connection = _Connection.__new__(_Connection)
    connection.streams, connection.kept = True, None
    connection.events, connection.tail = 0, b""
    pieces = [GOOD[i : i + size] for i in range(12, len(GOOD), size)]
    complete = [connection.take(data) for data in [GOOD[:12], *pieces]]
    assert connection.events == 3
    assert complete[-1] and not any(complete[:-1])
