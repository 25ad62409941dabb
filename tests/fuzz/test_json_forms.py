"""Valid and invalid JSON, by the classes of JSONTestSuite (github.com/nst/JSONTestSuite).

The texts are our own: `VALID` must be read, `INVALID` must be refused, and RFC 8259 leaves `EITHER`
open. Each is tried as a whole body, which is never valid, and as a field of one.
"""

from __future__ import annotations

import json
import time

import pytest
from test_fuzz import Case, check_error, fuzzed

from forge_jax.errors import RequestError
from forge_serve.limits import Limits
from forge_serve.openai.requests import CompletionRequest
from forge_serve.openai.validation import decode

SLOW_S = 0.3  # three times the time on an idle machine

VALID = [
    b"null", b"true", b"false", b"0", b"-0", b"-1", b"123", b"0.5", b"-0.5", b"1e1", b"1E+2",
    b"1e-2", b"0e1", b"0e+1", b"1.5e3", b"-0.0", b"123.456789", b"1E22", b"20e1", b"-1234567890",
    b"18446744073709551615", b"-9223372036854775808", b"9" * 100, b"0." + b"1" * 400, b'""', b'"a"',
    b'"asd "', b'"\\""', b'"\\\\"', b'"\\/"', b'"\\b\\f\\n\\r\\t"', b'"\\u0000"', b'"\\u00e9"',
    b'"\\u00E9"', b'"\\ud83d\\ude00"', b'"\\uDBFF\\uDFFF"', b'"\\u0012"', b'"\x7f"', b'"\\\\a"',
    b'"\\\\u0000"', b'"a/*b*/c"', b'"\\uFFFF"', b'"\\u2028"', b'"/"', b'"[{:,"', "\"é\"".encode(),
    "\"日本\"".encode(), "\"🙂\"".encode(), "\"\u2028\u2029\"".encode(), "\"\U0010ffff\"".encode(),
    "\"\uffff\"".encode(), "\"\u0800\"".encode(), "\"\ufeff\"".encode(), b"[]", b"[ ]", b"[[]]",
    b"[1]", b"[1,2]", b"[1 , 2]", b"[ 1]", b"[1 ]", b"[null,1,\"a\",{}]", b"{}", b"{ }", b'{"a":1}',
    b'{"a":1,"b":2}', b'{"":0}', b'{"a":[]}', b'{"a":{"a":{"a":1}}}', b'{ "a" : 1 }',
    b'{"a":"\\u005C"}', b'{"\\u0061":1}', b'{"a":1,\n"b":2}', b'{"\\u0000a":1}', b" 1", b"1 ",
    b"\n1\r\n", b"\t[\t1\t]\t", b"[" * 60 + b"]" * 60, b'{"a":' * 60 + b"1" + b"}" * 60,
]  # fmt: skip

INVALID = [
    # numbers
    b"01", b"-01", b"+1", b"1.", b".5", b"-.5", b"-", b"--1", b"1e", b"1e+", b"1E-", b"1.e1", b"0e",
    b"0x1", b"0x", b"1x", b"1a", b"1 2", b"1 000", b"1,5", b"-a", b"- 1", b"1e1.5", b"1.2.3",
    b"0.e1", b"NaN", b"-NaN", b"nan", b"Infinity", b"-Infinity", b"+Inf", b"inf", b"0b1", b"0o7",
    b"1_000", "１".encode(), b"2.e3", b"-1.0.", b"9.e+", b"0.3e", b"0.3e+", b"1eE2", b".-1", b"++1",
    b"\x001",
    # literals
    b"nul", b"nulll", b"tru", b"fals", b"True", b"FALSE", b"None", b"undefined", b"truetrue", b"t",
    # strings
    b'"', b'"a', b"a\"", b"'a'", b"a", b'"\\"', b'"\\\\\\"', b'"\\x41"', b'"\\a"', b'"\\0"', b'"\\',
    b'"\\u"', b'"\\u1"', b'"\\u12"', b'"\\u123"', b'"\\u123g"', b'"\\u00 1"', b'"\\U0041"',
    b'"\\\t"', b'"\n"', b'"\t"', b'"\r"', b'"\x00"', b'"\x1f"', b'"a\x01b"', "“a”".encode(),
    b'"\\\x00"', b"`a`", "\"\\é\"".encode(), "\"\\🙂\"".encode(), b'"a" "b"', b'"a"x',
    b"\\u0022a\\u0022",
    # bytes that are not UTF-8
    b'"\xff"', b'"\xfe"', b'"\x80"', b'"\xc3"', b'"\xc3("', b'"\xe2\x82"', b'"\xed\xa0\x80"',
    b"\xff", b'"\xc0\xaf"', b'"\xe0\x80\xaf"', b'"\xf0\x80\x80\xaf"', b'"\xf4\x90\x80\x80"',
    b'"\xf8\x88"', b'"\xed\xbf\xbf"', b'"\\u00e\xc3\xa9"', b"[\xe5]", b"1\xe5", b'{"\xff":1}',
    b"\xed\xa0\x80",
    # arrays
    b"[", b"]", b"[1", b"1]", b"[,]", b"[,1]", b"[1,]", b"[1,,2]", b"[1 2]", b"[1;2]", b"[1:2]",
    b"[}", b"[]]", b"[[]", b"[1}", b"{1]", b"[1]]", b'["a"', b'["a",', b"[a", b"[*]", b"[-]",
    b"(1)", b"[\x0c]", b"[\x00]", b"[]{", b"[][", b"[\"\": 1]", b'["x"]y', b"[ , ]", b"[1,\n",
    b"<null>", b"[...]",
    # objects
    b"{", b"}", b"{}}", b"{,}", b'{"a"}', b'{"a":}', b'{"a" 1}', b'{"a":1', b'{"a":1,}', b"{a:1}",
    b"{1:1}", b"{'a':1}", b'{"a":1 "b":2}', b'{"a":1,,"b":2}', b'{"a"::1}', b'{"a":1]', b"{null:1}",
    b'{"a","b"}', b'{"a":1;"b":2}', b'{"a":1}x', b'{"a":1}{', b'{:1}', b'{"a":1,"b"',
    b'{"a":/**/1}', b'{"a":1}//', b'{"a":1}#', b"{[]:1}", b"{true:1}", b'{"a":"a" 1}', b"{{}}",
    b'{"a', b'{"a":"b}',
    # around them
    b"", b" ", b"\n", b"\x00", b"\xef\xbb\xbf", b"\xef\xbb\xbf1", b"\xff\xfe1\x00",
    b"\xfe\xff\x001", b"//a\n1", b"/*a*/1", b"1 # a", b"\x0c1", "\u00a01".encode(),
    "\u20601".encode(), b"1\x00", b"\x1a", b"[" * 100_000, b'{"a":' * 100_000, b"]" * 100_000,
    b"[{" * 50_000, b'[{"a":' * 50_000, b'"' + b"\\" * 99_999, b"1" * 100_000 + b"x",
    b"-" * 100_000, b'"' + b"a" * 1_000_000, b"1e" * 50_000,
]  # fmt: skip

EITHER = [
    b"9" * 100_000, b"-" + b"9" * 100_000, b"0." + b"9" * 100_000, b"1e" + b"9" * 1000, b"1e400",
    b"-1e400", b"1e-400", b"123e65", b"1e" + b"0" * 1000 + b"1",
    b"1" + b"0" * 100_000 + b"e-100000", b'"\\ud800"', b'"\\udc00"', b'"\\ud800\\ud800"',
    b'"\\udc00\\ud800"', b'"\\ud83dx"', b'"\\ud83d\\n"', b'"\\ud83d\\u0041"', b'"\\uDADA"',
    b'"\\ud8"', b'"a\\uDFAAb"', b"[" * 100_000 + b"]" * 100_000, b"[" * 500 + b"]" * 500,
    b'{"a":' * 99_999 + b"1" + b"}" * 99_999, b'{"a":1,"a":2}', b'{"a":1,"a":1}',
    b"[" + b"[]," * 500_000 + b"[]]", b"[" + b"1," * 500_000 + b"1]",
    b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}",
    b'"' + b"\\u003a" * 500_000 + b'"', b'"' + b'\\"' * 1_000_000 + b'"',
    b"[" + b'"",' * 500_000 + b'""]', b'"' + b":" * 3_000_000 + b'"',
]  # fmt: skip

MIB = 2**20
LARGE = [
    b"[" * (7 * MIB), b'["' * (3 * MIB), b"[{}" * (2 * MIB), b"]" * (7 * MIB),
    b'"' + b"\\" * (7 * MIB), b"[1" + (b"," + b"9" * 400) * 17_000 + b"]",
    b"9" * (7 * MIB), b"0." + b"9" * (7 * MIB),
    b'{"a":1' + b',"":0' * (MIB + 1), b'"' + b"\\ud800" * MIB + b'"',
    b'"' + b"\xff" * (7 * MIB) + b'"',
]  # fmt: skip


def named(texts: list[bytes]) -> dict[str, bytes]:
    return {f"{i}-{text[:12]!r}": text for i, text in enumerate(texts)}


def as_field(text: bytes) -> bytes:
    return b'{"prompt": "a", "max_tokens": 1, "unknown": ' + text + b"}"


def refusal(body: bytes) -> str | None:
    try:
        decode(body, CompletionRequest, Limits())
    except RequestError as error:
        return str(error)
    return None


def test_json_samples_match_the_standard_librarys_verdict():
    """The standard library is more permissive in three points: constants, BOMs, and depth."""
    for text in VALID:
        json.loads(text.decode())
    for text in INVALID:
        wide = b"NaN" in text or b"Infinity" in text
        with pytest.raises((ValueError, RecursionError)):  # noqa: PT012
            json.loads(text.decode())
            if wide:
                raise ValueError("its own extension")


@pytest.mark.parametrize("text", VALID, ids=named(VALID))
def test_valid_json_is_accepted(text):
    assert refusal(as_field(text)) is None
    assert "not a valid request" in (refusal(text) or "") or b"{" in text[:12]
    assert "not valid JSON" not in (refusal(text) or "none at all")


@pytest.mark.parametrize("text", INVALID, ids=named(INVALID))
def test_invalid_json_is_rejected(text):
    for body in (text, as_field(text)):
        message = refusal(body)
        assert message is not None and len(message) < 200


@pytest.mark.parametrize("text", EITHER, ids=named(EITHER))
def test_ambiguous_json_is_accepted_or_rejected(text):
    for body in (text, as_field(text)):
        message = refusal(body)
        assert message is None or len(message) < 200


async def test_json_forms_are_handled_over_http():
    async with fuzzed() as server:
        first = await server.canary()
        for texts, statuses in ((VALID, {200}), (INVALID, {400}), (EITHER, {200, 400})):
            for text in texts:
                status, _, answer = await server.send(Case("/v1/completions", as_field(text)))
                assert status in statuses, (text[:60], answer)
                if status == 400:
                    check_error(json.loads(answer))
        assert await server.canary() == first


@pytest.mark.fuzz
def test_no_text_blocks_the_server():
    for text in (*VALID, *INVALID, *EITHER, *LARGE):
        for body in (text, as_field(text), b'{"prompt": ' + text + b"}"):
            taken_s = []
            for _ in range(3):
                begin_s = time.perf_counter()
                refusal(body)
                taken_s.append(time.perf_counter() - begin_s)
            assert min(taken_s) < SLOW_S, (
                f"{body[:60]!r} of {len(body)} bytes: {min(taken_s):.3f} s"
            )
