"""Every row of the table of limits, at the limit and one above it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError, RequestError
from forge_jax.sampling_params import SamplingParams
from forge_jax.text import ChatTemplate
from forge_serve.cli import main as cli
from forge_serve.config import ServerConfig
from forge_serve.limits import Limits, Row, rows
from forge_serve.openai import handler
from forge_serve.openai import validation as validate
from forge_serve.openai.requests import ChatRequest, CompletionRequest
from forge_serve.openai.validation import check_logprob_values

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROWS = {row.name: row for row in rows()}
USER = {"role": "user", "content": "a"}
FILE = {"type": "file", "file": {"filename": "a.txt", "file_data": "YQ=="}}
UNSUPPORTED = "not supported yet"
OUTSIDE = "outside the model's vocabulary"
NO_VECTORS = "no steering vectors are loaded"
OF_ENGINE = (OUTSIDE, NO_VECTORS)  # errors of the engine, not of the body's reader
KINDS = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}


@dataclass(frozen=True)
class Case:
    """A request with exactly this much of what a row counts."""

    row: str
    path: str
    body: Callable[[int], dict[str, Any] | bytes]  # returns the body for a number
    param: str | None
    otherwise: str = ""  # the error at the limit, or "" if it is served
    more: dict[str, int] = field(
        default_factory=dict
    )  # other limits, so that they do not interfere
    id: str = ""


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def object_of(size: int) -> dict[str, str]:
    return {"a": "x" * (size - len('{"a":""}'))}


def lark_of(size: int) -> str:
    """Return a grammar of this many bytes, most of them a comment."""
    rest = size - len('start: "a" //')
    return f'start: "a" //{"é" * (rest // 2)}{"x" * (rest % 2)}'


def choices_of(size: int) -> list[str]:
    number, rest = divmod(size - 2, 200)
    choices = [f"{i:197}" for i in range(number)]
    return [*choices[:-1], choices[-1] + "x" * (rest + 1)] if choices else ["x" * (rest - 2)]


def sent(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def padded(size: int) -> bytes:
    return b'{"prompt": "a", "max_tokens": 1}'.ljust(size)


def completion(
    row: str, name: str, value: Callable[[int], Any], param: str | None = "its name", **more: Any
) -> Case:
    def body(k: int) -> dict[str, Any]:
        return {"prompt": "a", "max_tokens": 1, name: value(k)}

    param = name if param == "its name" else param
    return Case(row, COMPLETIONS, body, param, id=f"{row}-{name}", **more)


def chat(
    row: str, name: str, value: Callable[[int], Any], param: str | None = "its name", **more: Any
) -> Case:
    def body(k: int) -> dict[str, Any]:
        return {"messages": [USER], "max_tokens": 1, "logprobs": True, name: value(k)}

    param = name if param == "its name" else param
    return Case(row, CHAT, body, param, id=f"{row}-chat-{name}", **more)


def schemas(row: str, make: Callable[[int], Any]) -> Iterator[Case]:
    """Yield the cases for each place that a schema can have."""
    yield completion(row, "guided_json", make)
    yield completion(row, "guided_json", lambda k: json.dumps(make(k), separators=(",", ":")))
    yield completion(row, "json_schema", make)
    path = "structured_outputs.json"
    yield completion(row, "structured_outputs", lambda k: {"json": make(k)}, path)
    path = "response_format.json_schema.schema"
    yield chat(
        row,
        "response_format",
        lambda k: {"type": "json_schema", "json_schema": {"name": "x", "schema": make(k)}},
        path,
    )
    path = "tools[1].function.parameters"
    tool = {"type": "function", "function": {"name": "f"}}
    yield chat(
        row,
        "tools",
        lambda k: [tool, {"type": "function", "function": {"name": "f", "parameters": make(k)}}],
        path,
    )
    path = "functions[0].parameters"
    yield chat(row, "functions", lambda k: [{"parameters": make(k)}], path,
               otherwise="not supported")  # fmt: skip


TAKES_TOOLS = "a{{ messages[0].content }}{% if tools %}<tool_call>{% endif %}"
CASES = [
    Case("body_bytes", COMPLETIONS, padded, None),
    completion("json_depth", "x", lambda k: nested(k - 1), None),
    completion("json_containers", "x", lambda k: [[]] * (k - 2), None),
    completion("json_keys", "x", lambda k: {str(i): 1 for i in range(k - 3)}, None),
    completion("json_strings", "x", lambda k: ['a"'] * (k - 4), None),
    completion("json_values", "x", lambda k: [0] * (k - 2), None),
    completion("number_digits", "x", lambda k: 10 ** (k - 1), None),
    completion("number_digits", "x", lambda k: [{"a": -(10 ** (k - 1))}, "9" * k], None),
    Case("text_bytes", "/tokenize",
         lambda k: {"prompt": ["a" * 2048] * (k // 2048) + ["a"] * (k % 2048)}, "prompt"),
    completion("prompts", "prompt", lambda k: ["a"] * k),
    chat("messages", "messages", lambda k: [USER] * k),
    chat("files", "messages", lambda k: [{"role": "user", "content": [FILE] * k}]),
    completion("n", "n", lambda k: k),
    chat("n", "n", lambda k: k),
    completion("choices", "prompt", lambda k: ["a"] * k, "n", more={"prompts": 2**16}),
    Case("choices", CHAT, lambda k: {"messages": [USER], "max_tokens": 1, "n": k}, "n",
         more={"n": 128}),
    completion("logprobs", "logprobs", lambda k: k),
    chat("logprobs", "top_logprobs", lambda k: k),
    Case(
        "logprob_values",
        COMPLETIONS,
        lambda k: {"prompt": [1], "max_tokens": k, "logprobs": 0, "ignore_eos": True},
        "logprobs",
    ),
    completion("stop_strings", "stop", lambda k: [f"stop {i}" for i in range(k)]),
    completion("stop_string_bytes", "stop", lambda k: "x" * k),
    completion("stop_string_bytes", "stop", lambda k: ["é" * (k // 2) + "x" * (k % 2)]),
    completion("stop_token_ids", "stop_token_ids", lambda k: list(range(k))),
    completion(
        "logit_bias", "logit_bias", lambda k: {str(i): 1 for i in range(k)},
        otherwise=OUTSIDE,
    ),
    completion("logprobs", "prompt_logprobs", lambda k: k),
    completion("allowed_token_ids", "allowed_token_ids", lambda k: [5] * k),
    completion("bad_words", "bad_words", lambda k: [f"word {i}" for i in range(k)]),
    completion("bad_word_bytes", "bad_words", lambda k: ["x" * k]),
    completion("bad_word_bytes", "bad_words", lambda k: ["é" * (k // 2) + "x" * (k % 2)]),
    completion(
        "steering_vectors", "steering_vectors", lambda k: [{"name": "v"}] * k,
        otherwise=NO_VECTORS,
    ),
    completion("cache_salt_chars", "cache_salt", lambda k: "é" * k),
    chat("template_kwargs_bytes", "chat_template_kwargs", object_of),
    chat("tools", "tools", lambda k: [{"type": "function", "function": {"name": "f"}}] * k),
    chat("tools", "functions", lambda k: [{"name": "f"}] * k, otherwise="not supported"),
    chat(
        "tools",
        "messages",
        lambda k: [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * k}, USER],
        "messages[0].tool_calls",
    ),
    *schemas("schema_bytes", object_of),
    *schemas("schema_depth", nested),
    completion("schema_bytes", "guided_grammar", lark_of),
    completion("schema_bytes", "ebnf", lark_of),
    completion("schema_bytes", "grammar", lark_of),
    completion("schema_bytes", "guided_choice", choices_of),
    completion("literal_bytes", "guided_choice", lambda k: ["a", "é" * (k // 2) + "x" * (k % 2)]),
    completion("literal_bytes", "structured_outputs", lambda k: {"choice": ["x" * k]},
               "structured_outputs.choice"),
    completion("literal_bytes", "guided_json", lambda k: {"enum": ["a", "x" * k]}),
    completion("literal_bytes", "guided_json", lambda k: json.dumps({"const": {"a": ["x" * k]}})),
    completion("literal_bytes", "json_schema", lambda k: {"properties": {"x" * k: {}}}),
    completion(
        "schema_bytes", "structured_outputs", lambda k: {"grammar": lark_of(k)},
        "structured_outputs.grammar",
    ),
    completion("regex_bytes", "guided_regex", lambda k: "x" * k),
    completion("regex_bytes", "regex", lambda k: "x" * k),
    completion("regex_bytes", "stop_regex", lambda k: "x" * k, otherwise="use stop"),
    completion(
        "regex_bytes", "structured_outputs", lambda k: {"regex": "x" * k},
        "structured_outputs.regex",
    ),
    completion(
        "regex_bytes", "structured_outputs",
        lambda k: {"json": {}, "whitespace_pattern": " " * k},
        "structured_outputs.whitespace_pattern",
    ),
]  # fmt: skip

LATER = ("body_bytes", "logprob_values", "text_bytes")  # not of a body that is being decoded

HEADS: dict[str, Callable[[int], bytes]] = {  # everything before a body, with this much of it
    "target_bytes": lambda k: head("/health?" + "x" * (k - len("/health?"))),
    "header_bytes": lambda k: head("/health", "X-Filler: " + "x" * k),
    "headers": lambda k: head("/health", *[f"X-{i}: x" for i in range(k - 2)]),
}


def head(target: str, *headers: str) -> bytes:
    lines = (f"GET {target} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", "")
    return "\r\n".join(lines).encode()


def numbers(row: Row) -> list[int]:
    """Return the values with which a limit is tested."""
    return sorted({row.default, row.low}) if row.flag else [row.default]


def test_every_row_is_tested():
    assert {case.row for case in CASES} | set(HEADS) == set(ROWS)


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        pytest.param(case, limit, id=f"{case.id or case.row}-{limit}")
        for case in CASES
        if case.row
        not in ("body_bytes", "logprob_values", "text_bytes")  # not of a body that has been read
        for limit in numbers(ROWS[case.row])
        if not (
            case.row == "choices" and case.path == CHAT and limit > 128
        )  # n has another limit before
    ],
)
def test_body_may_reach_a_limit_but_not_exceed_it(case, limit):
    limits = Limits(**{case.row: limit}, **case.more)

    def read(number: int) -> None:
        validate.decode(sent(case.body(number)), KINDS[case.path], limits)

    if case.otherwise not in ("", *OF_ENGINE):
        with pytest.raises(RequestError, match=case.otherwise):
            read(limit)
    else:
        read(limit)
    with pytest.raises(RequestError, match=rf"\b{limit}\b") as refused:
        read(limit + 1)
    assert refused.value.param == case.param
    assert not case.otherwise or case.otherwise not in str(refused.value)


async def test_server_has_the_limits_of_the_table(start):
    """Uses the defaults unless they take too long, as seen by a client."""
    config = ServerConfig(limits=Limits(logprob_values=1024, messages=8, text_bytes=2**18))
    engine = Engine.fake(max_model_len=2048)
    engine.chat_template = ChatTemplate(TAKES_TOOLS)
    server = await start(engine, config)
    for case in CASES:
        limit = getattr(config.limits, case.row)
        if case.more:  # reached before the limit under test
            continue
        status, answer = await server.post(case.path, sent(case.body(limit)))
        if case.otherwise:
            assert status == 400
            assert case.otherwise in answer["error"]["message"]
        else:
            assert status == 200, (case.id, answer)
        status, answer = await server.post(case.path, sent(case.body(limit + 1)))
        assert status == (413 if case.row == "body_bytes" else 400), (case.id, answer)
        assert answer["error"]["param"] == case.param, case.id


@pytest.mark.parametrize("row", HEADS)
async def test_request_line_and_headers_are_limited(start, row):
    for limit in numbers(ROWS[row]):
        server = await start(Engine.fake(), ServerConfig(limits=Limits(**{row: limit})))
        port = int(server.url.rpartition(":")[2])
        for number, status in ((limit, b"200"), (limit + 1, b"400")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEADS[row](number))
            assert (await reader.read()).split()[1] == status
            writer.close()
            await writer.wait_closed()


def test_logprobs_budget_counts_choices_tokens_and_alternatives():
    limit = ROWS["logprob_values"].default
    fits = SamplingParams(n=32, max_tokens=limit // 32 // 16, logprobs=15)
    check_logprob_values(fits, [1], limit, Limits())
    for params, prompt_lens in (
        (SamplingParams(n=32, max_tokens=limit // 32 // 16, logprobs=16), [1]),
        (SamplingParams(n=32, max_tokens=limit // 32 // 16 + 1, logprobs=15), [1]),
        (fits, [1, 1]),
        (SamplingParams(logprobs=0), [limit]),  # up to the end of the context
        (SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=1), [limit // 2 + 1]),
    ):
        with pytest.raises(RequestError) as refused:
            check_logprob_values(params, prompt_lens, 2 * limit + 1, Limits())
        assert refused.value.param == "logprobs"
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
    check_logprob_values(scored, [limit // 2], limit, Limits())
    with pytest.raises(RequestError) as refused:
        check_logprob_values(scored, [limit // 2 + 1], limit, Limits())
    assert refused.value.param == "prompt_logprobs"
    check_logprob_values(SamplingParams(n=128, max_tokens=limit), [1], limit, Limits())
    check_logprob_values(SamplingParams(n=1, logprobs=0), [1], limit, Limits())  # no more fits


async def test_context_limits_the_tokens_of_a_request(server):
    room = server.engine.max_model_len - 3
    body = {"prompt": [1, 2, 3], "ignore_eos": True}
    assert (await server.post(COMPLETIONS, {**body, "max_tokens": room}))[0] == 200
    status, answer = await server.post(COMPLETIONS, {**body, "max_tokens": room + 1})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_limit_has_its_own_range(row, capsys, monkeypatch):
    assert row.low <= row.default <= row.high
    for value in (row.low, row.high):
        assert getattr(Limits(**{row.name: value}), row.name) == value
    for value in (row.low - 1, row.high + 1, True, 1.5, "1"):
        with pytest.raises(ConfigError, match=row.flag or row.name):
            Limits(**{row.name: value})
    if row.flag is None:
        assert row.high == row.default, "nobody can raise it"
        return
    monkeypatch.setattr(
        "forge_serve.server.process.serve", lambda *_: pytest.fail("it must not start")
    )
    assert cli.main(["serve", row.flag, str(row.high + 1)]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith(f"forge-jax: error: {row.flag} must be between") and error.count("\n") == 1
    )


def test_limit_flags_take_effect(monkeypatch):
    seen: list[ServerConfig] = []
    monkeypatch.setattr(
        "forge_serve.server.process.serve", lambda engine, server, _: seen.append(server)
    )
    raised = {row.name: row.high for row in ROWS.values() if row.flag}
    flags = [arg for row in ROWS.values() if row.flag for arg in (row.flag, str(row.high))]
    cli.main(["serve", *flags])
    assert seen == [ServerConfig(limits=Limits(**raised))]


def test_long_schema_descriptions_do_not_count_as_literals():
    schema = {"type": "string", "description": "x" * 10_000, "default": "x" * 10_000}
    validate.decode(sent({"prompt": "a", "guided_json": schema}), CompletionRequest, Limits())


def test_characters_in_strings_do_not_count_as_keys_or_values():
    text = 'x:,"' * 300_000
    validate.decode(sent({"prompt": text}), CompletionRequest, Limits())


class Threads:
    """A recorder of the threads in which bodies are decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.names: list[str] = []
        read = validate.decode_form

        def noted(*args: Any) -> Any:
            self.names.append(threading.current_thread().name)
            return read(*args)

        for module in (handler, validate):
            monkeypatch.setattr(module, "decode_form", noted)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1}, 200),
        (CHAT, {"messages": [USER], "max_tokens": 1}, 200),
        ("/v1/messages", {"messages": [USER], "max_tokens": 1}, 200),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}, 200),
        ("/v1/embeddings", {"input": "a"}, 200),
        ("/tokenize", {"prompt": "a"}, 200),
        ("/detokenize", {"tokens": [5]}, 200),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}, 400),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}, 400),
    ],
)
async def test_large_bodies_are_decoded_in_a_thread(server, monkeypatch, path, body, status):
    threads, main = Threads(monkeypatch), threading.current_thread().name
    assert (await server.post(path, body))[0] == status
    assert threads.names == [main]
    large = body | {"filler": "x" * validate.SMALL_BODY_BYTES}
    assert (await server.post(path, large))[0] == status
    assert len(threads.names) == 2 and threads.names[1].startswith("forge-body")


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (COMPLETIONS, {"prompt": "a"}, ["max_tokens"]),
        (CHAT, {"messages": [USER]}, ["max_tokens", "max_completion_tokens"]),
        ("/v1/messages", {"messages": [USER]}, ["max_tokens"]),
        ("/v1/responses", {"input": "a"}, ["max_output_tokens"]),
        ("/generate", {"prompt": "a"}, ["max_tokens", "max_new_tokens"]),
    ],
)
async def test_server_limits_the_output(start, path, body, names):
    server = await start(Engine.fake(max_model_len=256), ServerConfig(max_new_tokens=7))
    body = body | {"ignore_eos": True}
    for name in names:
        assert (await server.post(path, body | {name: 7}))[0] == 200
        status, answer = await server.post(path, body | {name: 8})
        assert status == 400
        message = answer["error"]["message"]
        assert message == f"{name} must be at most 7 on this server (--max-new-tokens), got 8"
        assert answer["error"].get("param", name) == name
    status, answer = await server.post(path, body)
    usage = answer.get("usage", answer)
    assert status == 200
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 7


async def test_limited_output_still_fits_the_context(start):
    server = await start(Engine.fake(max_model_len=128), ServerConfig(max_new_tokens=120))
    body = {"messages": [{"role": "user", "content": "a" * 40}], "ignore_eos": True}
    status, answer = await server.post(CHAT, body)
    assert status == 200 and answer["usage"]["total_tokens"] == 128


async def test_min_tokens_above_the_servers_limit_is_rejected(start):
    server = await start(Engine.fake(max_model_len=256), ServerConfig(max_new_tokens=7))
    for path, body in ((CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "a"})):
        status, answer = await server.post(path, body | {"min_tokens": 8})
        assert status == 400 and answer["error"]["param"] == "min_tokens"


def test_output_limit_must_be_positive():
    with pytest.raises(ConfigError, match="--max-new-tokens must be at least 1"):
        ServerConfig(max_new_tokens=0)
