"""Rejections: their format, and no internal errors for any client input."""

from __future__ import annotations

import gzip
import io
import json
import re
import threading
import zlib
from pathlib import Path
from typing import Any

import openai
import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.fake import assemble_fake, fake_tokenizer
from forge_jax.engine.thread import Engine
from forge_jax.errors import ForgeError
from forge_jax.text import ChatTemplate
from forge_serve import errors
from forge_serve.limits import Limits

ROOT = Path(__file__).parents[2]
BODY_BYTES = Limits().body_bytes
PROMPT = {"prompt": "Hello"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("prompt", None, "prompt"),
        ("prompt", [], "prompt"),
        ("prompt", [[]], "prompt"),
        ("prompt", ["a", 1], "prompt"),
        ("prompt", [[1], "a"], "prompt"),
        ("prompt", [-1], "prompt"),
        ("prompt", [10**9], "prompt"),
        ("prompt", ["a"] * 1025, "prompt"),
        ("prompt", {"text": "a"}, "prompt"),
        ("prompt", [["a"]], "prompt[0][0]"),
        ("prompt", [True], "prompt[0]"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", "many", "max_tokens"),
        ("max_tokens", 10**9, "max_tokens"),
        ("max_tokens", 10**40, "max_tokens"),
        ("min_tokens", 17, "min_tokens"),
        ("n", 0, "n"),
        ("n", 129, "n"),
        ("best_of", 2, "best_of"),
        ("temperature", -1, "temperature"),
        ("temperature", "hot", "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", 1.1, "top_p"),
        ("top_k", -2, "top_k"),
        ("min_p", 2, "min_p"),
        ("seed", 2**64, "seed"),
        ("presence_penalty", 3, "presence_penalty"),
        ("frequency_penalty", -3, "frequency_penalty"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("logit_bias", {"1": 101}, "logit_bias"),
        ("logit_bias", {"one": 1}, "logit_bias"),
        ("logit_bias", {"100000000": 1}, "logit_bias"),
        ("stop", ["x"] * 17, "stop"),
        ("stop", [""], "stop"),
        ("stop", 5, "stop"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("stop_token_ids", [2**31], "stop_token_ids"),
        ("logprobs", 21, "logprobs"),
        ("logprobs", True, "logprobs"),
        ("suffix", "end", "suffix"),
        ("cache_salt", "", "cache_salt"),
        ("cache_salt", "s" * 129, "cache_salt"),
        ("priority", 2**40, "priority"),
        ("stream", "perhaps", "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("stream_options", 5, "stream_options"),
        ("response_format", {"type": "xml"}, "response_format"),
        ("guided_json", {"type": "thing"}, "guided_json"),
        ("structured_outputs", {"regex": "a", "json": {}}, "structured_outputs"),
        ("use_beam_search", True, "use_beam_search"),
        ("length_penalty", 0.5, "length_penalty"),
        ("no_stop_trim", True, "no_stop_trim"),
        ("thinking_token_budget", 0, "thinking_token_budget"),
        ("repetition_detection", {"max_pattern_size": 3}, "repetition_detection"),
        ("watermarking", True, "watermarking"),
        ("guided_whitespace_pattern", " ", "guided_whitespace_pattern"),
        ("typical_p", 0.9, "typical_p"),
        ("xtc_probability", 0.1, "xtc_probability"),
        ("dry_multiplier", 0.8, "dry_multiplier"),
        ("dynatemp_range", 0.5, "dynatemp_range"),
        ("mirostat", 2, "mirostat"),
        ("logits_processors", ["x"], "logits_processors"),
        ("custom_logit_processor", "x", "custom_logit_processor"),
        ("lora_path", "x", "lora_path"),
        ("kv_transfer_params", {"do_remote_decode": True}, "kv_transfer_params"),
        ("return_hidden_states", True, "return_hidden_states"),
        ("prompt_logprobs", 21, "prompt_logprobs"),
        ("prompt_logprobs", -1, "prompt_logprobs"),
        ("allowed_token_ids", [], "allowed_token_ids"),
        ("allowed_token_ids", [10**8], "allowed_token_ids"),
        ("allowed_token_ids", "5", "allowed_token_ids"),
        ("bad_words", "word", "bad_words"),
        ("bad_words", [""], "bad_words"),
        ("return_activations", {}, "return_activations.names"),
        ("return_activations", {"names": []}, "return_activations"),
        ("return_activations", {"names": [5]}, "return_activations.names[0]"),
        ("return_activations", {"names": ["a"], "tokens": "prompt"}, "return_activations.tokens"),
        ("return_activations", {"names": ["layers.0.resid"]}, "return_activations"),
        ("steering_vectors", [{}], "steering_vectors[0].name"),
        ("steering_vectors", [{"name": "v"}], "steering_vectors"),
        ("steering_vectors", [{"name": "v", "scale": 1e7}], "steering_vectors"),
        ("steering_vectors", [{"name": "v", "layers": []}], "steering_vectors"),
        ("steering_vectors", [{"name": "v", "layers": "0"}], "steering_vectors[0].layers"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
        ("truncate_prompt_tokens", -2, "truncate_prompt_tokens"),
        ("truncate_prompt_tokens", 10**6, "truncate_prompt_tokens"),
        ("truncation_side", "middle", "truncation_side"),
        ("request_id", "a b", "request_id"),
        ("request_id", "x" * 129, "request_id"),
        ("regex", "(?=a)", "regex"),
        ("ebnf", "root ::= 'a'", "ebnf"),
        ("json_schema", {"not": {}}, "json_schema"),
        ("grammar", "root ::= 'a'", "grammar"),
        ("stop_regex", "a+", "stop_regex"),
        ("logprob_token_ids", [5], "logprob_token_ids"),
    ],
)
async def test_invalid_completion_field_is_named_in_the_error(server, field, value, param):
    await _refused(server, "/v1/completions", {**PROMPT, field: value}, param)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", None, "messages"),
        ("messages", [], "messages"),
        ("messages", ["a"], "messages[0]"),
        ("messages", [{"role": "a robot", "content": "a"}], "messages[0].role"),
        ("messages", [{"content": "a"}], "messages[0].role"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"role": "user", "content": [IMAGE]}], "messages[0].content[0]"),
        ("top_logprobs", 2, "top_logprobs"),
        ("top_logprobs", 21, "top_logprobs"),
        ("max_completion_tokens", -1, "max_completion_tokens"),
        ("chat_template", "{{ messages }}", "chat_template"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("functions", [{"name": "f"}], "functions"),
        ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format"),
        ("continue_final_message", True, "continue_final_message"),
        ("modalities", ["audio"], "modalities"),
    ],
)
async def test_invalid_chat_field_is_named_in_the_error(server, field, value, param):
    await _refused(server, "/v1/chat/completions", {**CHAT, field: value}, param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
async def test_error_names_the_type_of_a_rejected_part(server, kind):
    content = [{"type": "text", "text": "Hello"}, {"type": kind, kind: {"url": "data:,"}}]
    messages = {"messages": [{"role": "user", "content": content}]}
    status, answer = await server.post("/v1/chat/completions", messages)
    assert (status, answer["error"]["message"]) == (
        400,
        "messages[0].content[1]: only text and file parts are supported, not "
        f"{kind!r}: send the message without it",
    )


@pytest.mark.parametrize(
    ("part", "message", "param"),
    [
        (
            {"type": "\0secret"},
            "[1]: only text and file parts are supported, not this type: send",
            "[1]",
        ),
        ({"type": "text"}, "[1].text is required", "[1].text"),
    ],
)
async def test_error_does_not_quote_an_unknown_part(server, part, message, param):
    content = [{"type": "text", "text": "Hello"}, part]
    messages = {"messages": [{"role": "user", "content": content}]}
    status, answer = await server.post("/v1/chat/completions", messages)
    assert status == 400
    assert answer["error"]["message"].startswith("messages[0].content" + message)
    assert answer["error"]["param"] == "messages[0].content" + param


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/completions", {"max_tokens": 5000}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 5000}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 5000}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": -1}, "max_completion_tokens"),
        ("/generate", {"max_new_tokens": 5000}, "max_new_tokens"),
        ("/generate", {"max_new_tokens": 10**12}, "max_new_tokens"),
        ("/generate", {"max_new_tokens": 5000, "max_tokens": 6000}, "max_tokens"),
    ],
)
async def test_limit_error_uses_the_clients_field_name(server, path, more, param):
    body = CHAT if "chat" in path else PROMPT
    await _refused(server, path, {**body, **more}, param)
    status, answer = await server.post(path, {**body, **more})
    names = re.findall(r"max_\w+", answer["error"]["message"])
    assert (status, set(names)) == (400, {param})


async def test_too_long_chat_error_names_messages(server):
    long = {"messages": [{"role": "user", "content": "x" * 2000}]}
    status, answer = await server.post("/v1/chat/completions", long)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert answer["error"]["code"] == "context_length_exceeded"


async def test_template_error_hides_its_internals(start):
    parts = assemble_fake(EngineConfig(), step_time_s=0.0, max_model_len=64, check=False)
    source = "{% for m in messages %}{{ loop + 1 }}{% endfor %}"  # its message has an address
    parts.chat_template = ChatTemplate(source)
    server = await start(Engine(parts))
    status, answer = await server.post("/v1/chat/completions", CHAT)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert answer["error"]["message"].endswith("cannot render these messages (TypeError)")


async def test_long_tool_calls_are_rendered_in_a_thread(server, monkeypatch):
    threads = []
    encode = server.engine.chat_template.encode

    def watched(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(*args, **kwargs)

    monkeypatch.setattr(server.engine.chat_template, "encode", watched)
    for size in (1, 10_000):
        call = {"function": {"name": "f", "arguments": "x" * size}}
        messages = [{"role": "assistant", "tool_calls": [call]}, *CHAT["messages"]]
        body = {"messages": messages, "max_tokens": 1}
        assert (await server.post("/v1/chat/completions", body))[0] == 200
    assert threads == [True, False]


async def test_unknown_role_error_lists_the_known_ones(server):
    body = {"messages": [{"role": "a robot", "content": "a"}]}
    _, answer = await server.post("/v1/chat/completions", body)
    for role in ("system", "user", "assistant", "tool", "developer"):
        assert role in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_text_that_cannot_fit_is_not_tokenized(server, monkeypatch, path):
    def tokenized(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("this text need not have been tokenized")

    monkeypatch.setattr(server.engine.tokenizer, "encode", tokenized)
    monkeypatch.setattr(server.engine.chat_template, "encode", tokenized)
    longest = max(len(piece) for piece in server.engine.tokenizer.table.pieces if piece)
    text = "é" * (server.engine.max_model_len * longest // 2 + 1)
    param = "messages" if "chat" in path else "prompt"
    body = {"messages": [{"role": "user", "content": text}], "prompt": text}
    status, answer = await server.post(path, body)
    assert status == 400, answer
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, "context_length_exceeded")


async def test_prompt_of_the_longest_tokens_is_not_rejected_for_its_bytes(server):
    tokenizer = server.engine.tokenizer
    longest = max(range(tokenizer.vocab_size), key=lambda id: len(tokenizer.token_bytes(id)))
    text = tokenizer.decode([longest]) * server.engine.max_model_len
    status, answer = await server.post("/v1/completions", {"prompt": text})
    assert status == 400
    assert " tokens; the context holds" in answer["error"]["message"], "it has been tokenized"


async def test_fields_without_effect_are_accepted(server):
    odd = {
        "max_tokens": "3",
        "n": 1.0,
        "temperature": 1,
        "stop": None,
        "logit_bias": None,
        "best_of": 1,
        "user": "me",
        "response_format": {"type": "text"},
        "stream": False,
        "stream_options": None,
        "prompt_logprobs": None,
        "use_beam_search": False,
        "regex": "",
        "bad_words": [],
        "allowed_token_ids": None,
        "length_penalty": 1,
        "typical_p": 1.0,
        "mirostat": 0,
        "kv_transfer_params": {},
        "echo": False,
        "metadata": {"a": "b"},
        "json_schema": {},
        "something_new": {"deep": [1, 2, {"er": None}]},
    }
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        status, answer = await server.post(path, {**body, **odd})
        assert status == 200, answer
    status, _ = await server.post("/v1/chat/completions", {**CHAT, "tools": [], "max_tokens": 1})
    assert status == 200


async def test_openai_client_raises_its_own_errors(server):
    with pytest.raises(openai.BadRequestError) as refused:
        await server.openai.completions.create(model=server.model, prompt="a", temperature=200)
    assert refused.value.param == "temperature"
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        await server.openai.completions.create(model="another", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await server.openai.models.retrieve("another/one")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"prompt"',
        b'{"prompt": "a"} x',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"prompt": "a", "stop": "\\ud83d"}',
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"\x00",
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b'{"prompt": "a", "x": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"prompt": "' + b"[" * 70,
        b'{"prompt": "a", "prompt": 5}',
        gzip.compress(b'{"prompt": "a"}', mtime=0),
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_odd_json_is_a_client_error(server, body):
    status, answer = await server.post("/v1/completions", body)
    assert status == 400
    _check_form(answer)
    assert len(json.dumps(answer)) < 1000


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "[[[{{{\\"' + b"[" * 100 + b'", "max_tokens": 1}',
        b'{"prompt": "a", "max_tokens": 1, "x": ' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"prompt": "a\\u0000\\ud83d\\ude00", "max_tokens": 1}',
        b' \n{"prompt": "a", "max_tokens": 1e0}\n ',
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_unusual_valid_json_is_accepted(server, body):
    status, answer = await server.post("/v1/completions", body)
    assert status == 200, answer


async def test_unknown_paths_and_wrong_methods_are_rejected(server):
    for path in ("/v1", "/v1/", "/v1/unknown", "/../etc/passwd", "/%ff"):
        async with server.http.get(server.url + path) as response:
            assert response.status == 404
            _check_form(await response.json())
    async with server.http.get(server.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        _check_form(await response.json())
    async with server.http.put(server.url + "/metrics") as response:
        assert response.status == 405


async def test_too_large_body_is_rejected(server):
    body = b'{"prompt": "' + b"a" * BODY_BYTES + b'"}'
    async with server.http.post(server.url + "/v1/completions", data=io.BytesIO(body)) as response:
        assert response.status == 413
        _check_form(await response.json())
    bomb, headers = gzip.compress(body), {"Content-Encoding": "gzip"}
    assert len(bomb) < BODY_BYTES / 100
    url = server.url + "/v1/completions"
    async with server.http.post(url, data=bomb, headers=headers) as response:
        assert response.status == 413


COMPRESSED = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "deflate without a header": lambda body: zlib.compress(body, wbits=-15),
}


@pytest.mark.parametrize("form", COMPRESSED)
async def test_compressed_body_is_read(server, form):
    body, headers = COMPRESSED[form](b'{"prompt": "a", "max_tokens": 1}'), {}
    headers["Content-Encoding"] = form.split()[0].upper()
    url = server.url + "/v1/completions"
    async with server.http.post(url, data=body, headers=headers) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "x"])
async def test_unsupported_content_coding_is_rejected(server, coding):
    url, headers = server.url + "/v1/completions", {"Content-Encoding": coding}
    async with server.http.post(url, data=b"{}", headers=headers) as response:
        assert response.status == 415
        assert response.headers["Accept-Encoding"] == "gzip, deflate"
        answer = await response.json()
    _check_form(answer)
    assert answer["error"]["code"] == "content_coding_not_supported"


async def test_bodies_are_decompressed_in_a_thread_and_only_when_read(server, monkeypatch):
    """On the event loop a small body could block all requests before its key is checked."""
    threads: list[str] = []
    make = zlib.decompressobj

    def decompressobj(*args, **kwargs):
        threads.append(threading.current_thread().name)
        return make(*args, **kwargs)

    monkeypatch.setattr(zlib, "decompressobj", decompressobj)
    monkeypatch.setattr("aiohttp.http_parser.DeflateBuffer.__init__", _never)
    body, headers = gzip.compress(bytes(BODY_BYTES + 1)), {"Content-Encoding": "gzip"}
    for path, status in (("/unknown", 404), ("/health", 405), ("/v1/completions", 413)):
        async with server.http.post(server.url + path, data=body, headers=headers) as response:
            assert response.status == status
    assert len(threads) == 1 and threads[0].startswith("forge-body")


def _never(*args, **kwargs):
    raise AssertionError("aiohttp decompresses on the event loop")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_body_that_contradicts_its_encoding_is_rejected(server, caplog, encoding):
    headers = {"Content-Encoding": encoding}
    url = server.url + "/v1/completions"
    whole = COMPRESSED[encoding](b'{"prompt": "a", "max_tokens": 1}')
    for body in (b'{"prompt": "a"}', b"", whole[:20], whole + whole):
        async with server.http.post(url, data=body, headers=headers) as response:
            assert response.status == 400
            _check_form(await response.json())
    assert not [record for record in caplog.records if record.name.startswith("forge_serve.err")]


@pytest.mark.parametrize("wider", [8, -8], ids=["wider", "narrower"])
async def test_token_ids_are_limited_by_the_model_not_the_tokenizer(start, wider):
    width = fake_tokenizer().vocab_size + wider
    sizes = {"step_time_s": 0.0, "max_model_len": 64, "vocab_size": width}
    parts = assemble_fake(EngineConfig(), **sizes, check=False)
    assert parts.tokenizer is not None
    server = await start(Engine(parts))
    fields = {
        "prompt": lambda token: {"prompt": [token]},
        "stop_token_ids": lambda token: {"stop_token_ids": [token]},
        "logit_bias": lambda token: {"logit_bias": {str(token): 1}},
        "allowed_token_ids": lambda token: {"allowed_token_ids": [1, token]},
    }
    words = {"prompt": [1], "max_tokens": 1, "bad_words": [parts.tokenizer.eos_token]}
    assert (await server.post("/v1/completions", words))[0] == 200
    for name, body in fields.items():
        beyond = 200 if name == "stop_token_ids" else 400  # a stop token that is never sampled
        for token, expected in ((width - 1, 200), (width, beyond), (-1, 400), (2**31, 400)):
            sent = {"prompt": [1], "max_tokens": 1, **body(token)}
            status, answer = await server.post("/v1/completions", sent)
            assert status == expected, (name, token, answer)
            assert expected == 200 or answer["error"]["param"] == name


async def test_too_many_choices_are_rejected(server):
    status, answer = await server.post("/v1/completions", {"prompt": ["a"] * 1000, "n": 5})
    assert (status, answer["error"]["param"]) == (400, "n")


async def test_request_ids_are_returned(server):
    async def id_of(given: str | None, path: str = "/v1/completions") -> str:
        headers = {} if given is None else {"X-Request-Id": given}
        async with server.http.post(server.url + path, json=PROMPT, headers=headers) as response:
            return response.headers["X-Request-Id"]

    assert await id_of("trace-1.2:3") == "trace-1.2:3"
    assert await id_of("trace", "/nowhere") == "trace"
    made = {await id_of(None), await id_of("a b"), await id_of("x" * 200), await id_of("é")}
    assert len(made) == 4
    assert all(len(id) == 32 for id in made)


async def test_unexpected_error_reveals_nothing(server, monkeypatch, caplog):
    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError("/secret/path is gone")

    monkeypatch.setattr(server.engine, "submit", broken)
    status, answer = await server.post("/v1/completions", PROMPT)
    assert status == 500
    assert answer["error"]["message"] == "internal error"
    assert "/secret/path" in caplog.text


async def _refused(server: Any, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = await server.post(path, body)
    assert status == 400, answer
    _check_form(answer)
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert param.split("[")[0].split(".")[-1] in answer["error"]["message"]


def _check_form(answer: Any) -> None:
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    message = answer["error"]["message"]
    assert message
    for leak in ("Traceback", "<class", "object at 0x", str(ROOT), "site-packages"):
        assert leak not in message


ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ForgeError) and kind is not ForgeError
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_server_error_has_a_rule(kind):
    error = kind() if kind is errors.BodyTooLargeError else kind("text")
    reply = errors.error_reply(error)
    assert reply.name != "internal_error" and 400 <= reply.status < 600


def test_error_without_a_rule_is_internal_and_reveals_nothing():
    reply = errors.error_reply(ValueError("a secret"))
    assert (reply.status, reply.code) == (500, "internal_error") and "secret" not in reply.text


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_documentation_lists_the_status_and_code_of_every_error(kind):
    page = (ROOT / "docs/http.md").read_text().split("\n## Errors\n")[1].split("\n## ")[0]
    reply = errors.error_reply(kind() if kind is errors.BodyTooLargeError else kind("text"))
    rows = [line for line in page.splitlines() if line.startswith(f"| {reply.status} |")]
    assert any((f"`{reply.code}`" if reply.code else "null") in row for row in rows)
