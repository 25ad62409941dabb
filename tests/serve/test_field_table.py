"""The field tables in docs/http.md and docs/responses.md match the server's behavior."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forge_jax.engine.thread import Engine
from forge_jax.text import ChatTemplate
from tests.serve.conftest import Server, running

DOCS = Path(__file__).parent.parent.parent / "docs"
TEMPLATE = """\
{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"""
COMPLETION = {"prompt": "the dog", "max_tokens": 5, "seed": 1, "ignore_eos": True}
CHAT = {**COMPLETION, "messages": [{"role": "user", "content": "the dog"}]}
del CHAT["prompt"]
TOOLS = [{"type": "function", "function": {"name": "bark"}}]
SCHEMA = {"type": "object"}
FLAT_TOOLS = [{"type": "function", "name": "bark"}]
ASSISTANT = [*CHAT["messages"], {"role": "assistant", "content": "the"}]
# The sent value, or a whole body to add, by field.
IN_CHATS: dict[str, Any] = {
    "max_completion_tokens": 3,
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": TOOLS,
    "tool_choice": {"tools": TOOLS, "tool_choice": "auto"},
    "parallel_tool_calls": False,
    "audio": {"audio": {"voice": "a"}},
    "functions": [{"name": "bark"}],
    "function_call": "auto",
    "reasoning_effort": "low",
    "verbosity": "low",
    "modalities": {"modalities": ["text", "audio"]},
    "moderation": {"moderation": {"model": "a"}},
    "web_search_options": {"web_search_options": {"a": 1}},
    "include_reasoning": False,
    "add_generation_prompt": False,
    "continue_final_message": {"messages": ASSISTANT, "continue_final_message": True},
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"chat_template_kwargs": {"a": 1}},
    "documents": [{"text": "a"}],
    "echo": True,
    "prompt_embeds": "AAAA",
    "suffix": "the end",
    "mm_processor_kwargs": {"mm_processor_kwargs": {"a": 1}},
    "thinking_token_budget": 5,
}
IN_COMPLETIONS: dict[str, Any] = {
    "max_tokens": 3,
    "best_of": {"n": 2, "best_of": 2},
    "logit_bias": {"logit_bias": {"5": 1.5}},
    "stop": ["e"],
    "stop_token_ids": [5],
    "stop_regex": "e+",
    "truncate_prompt_tokens": 4,
    "truncation_side": "right",
    "no_stop_trim": True,
    "prompt_logprobs": 1,
    "logprob_token_ids": [5],
    "logprobs_mode": "processed_logprobs",
    "allowed_token_ids": [5, 6],
    "bad_words": ["dog"],
    "steering_vectors": {"steering_vectors": []},
    "return_activations": {"return_activations": None},
    "suffix": "the end",
    "prompt_embeds": "AAAA",
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"regex": "a+"}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_whitespace_pattern": "a",
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "json_schema": {"json_schema": SCHEMA},
    "regex": "a+",
    "ebnf": 'start: "a"',
    "grammar": 'root ::= "a"',
    "timeout": 20,
    "cache_salt": "a",
    "request_id": "a",
    "rid": "a",
    "user": "a",
    "lora_path": "a",
    "lora": [{"id": 0, "scale": 1.0}],
    "samplers": ["top_k"],
    "custom_params": {"custom_params": {"a": 1}},
    "custom_logit_processor": "a",
    "logits_processors": ["a"],
    "vllm_xargs": {"vllm_xargs": {"a": 1}},
    "kv_transfer_params": {"kv_transfer_params": {"a": 1}},
    "repetition_detection": {"repetition_detection": {"min_count": 2}},
    "length_penalty": 2,
    "typical_p": 0.5,
    "watermarking": {"watermarking": {"a": 1}},
    **dict.fromkeys(
        ["use_beam_search", "echo", "stream", "ignore_eos", "include_stop_str_in_output",
         "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens",
         "return_token_ids", "return_tokens_as_token_ids", "return_hidden_states"],
        True,
    ),
    **dict.fromkeys(
        ["n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "logprobs",
         "presence_penalty", "frequency_penalty", "repetition_penalty", "priority",
         "stream_interval", "mirostat", "xtc_probability", "dry_multiplier", "dynatemp_range"],
        1,
    ),
}  # fmt: skip
RESPONSE = {"input": "the dog", "max_output_tokens": 5, "seed": 1}
IN_RESPONSES: dict[str, Any] = {
    "input": [{"role": "user", "content": "a"}],
    "instructions": "bark",
    "previous_response_id": None,  # the test sets an existing id
    "store": False,
    "background": {"background": True, "store": True},
    "max_output_tokens": 3,
    "max_tool_calls": 2,
    "tools": FLAT_TOOLS,
    "tool_choice": {"tools": FLAT_TOOLS, "tool_choice": "auto"},
    "parallel_tool_calls": False,
    "text": {"text": {"format": {"type": "json_object"}}},
    "reasoning": {"reasoning": {"effort": "low"}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "truncation": "auto",
    "metadata": {"metadata": {"a": "b"}},
    "prompt_cache_key": "a",
    "safety_identifier": "a",
    "user": "a",
    "prompt": {"prompt": {"id": "a"}},
    "conversation": "a",
    "context_management": [{"type": "compaction"}],
    "moderation": {"moderation": {"model": "a"}},
    "prompt_logprobs": 1,
    "return_activations": {"return_activations": {"names": ["a"]}},
}
EMBEDDING = {"input": "the dog"}
IN_EMBEDDINGS: dict[str, Any] = {
    "input": ["a", "b"],
    "encoding_format": "base64",
    "dimensions": 3,
    "messages": CHAT["messages"],
    "pooling": "mean",
    "use_activation": False,
    "normalize": False,
    "embed_dtype": "float32",
    "endianness": "little",
    "truncate_prompt_tokens": 4,
    "truncation_side": "right",
    "add_special_tokens": False,
    "priority": 1,
    "cache_salt": "a",
    "request_id": "a",
    "timeout": 20,
    "user": "a",
}
# An endpoint: its path, a plain body, and the sent fields.
Endpoint = tuple[str, dict[str, Any], dict[str, Any]]
COMPLETIONS: Endpoint = ("/v1/completions", COMPLETION, IN_COMPLETIONS)
CHATS: Endpoint = ("/v1/chat/completions", CHAT, IN_CHATS)
# The endpoints, and the sections with the tables of their fields.
GENERATION = ("http.md#Fields", "http.md#Structured output")
TABLES: list[tuple[list[Endpoint], tuple[str, ...]]] = [
    ([COMPLETIONS, CHATS], GENERATION),
    ([("/v1/responses", RESPONSE, IN_RESPONSES)], ("responses.md#Fields",)),
    ([("/v1/embeddings", EMBEDDING, IN_EMBEDDINGS)], ("http.md#Embeddings",)),
]
SUBJECTS = {  # paths of the treatments that differ by endpoint
    "rejected in completions": COMPLETIONS[0],
    "ignored in chats": CHATS[0],
    "rejected in chats": CHATS[0],
}
ELSEWHERE = {"max_new_tokens"}  # a field of /generate only
WRONG = [{"no field": "is of this form"}]
TYPED = ("user", "max_tool_calls")  # ignored, but type-checked


def cells(section: str) -> list[tuple[str, list[str]]]:
    """Return the rows of a section's tables, each with the first cell of its header."""
    found, header = [], ""
    page, _, title = section.partition("#")
    text = (DOCS / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    for line in text.splitlines():
        if not line.startswith("|"):
            header = ""
            continue
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if header and not line.startswith("|---"):
            found.append((header, row))
        header = header or row[0]
    return found


def names(cell: str) -> list[str]:
    """Return the fields in a cell, in order: `text.format` is a part of the field `text`."""
    return list(dict.fromkeys(re.findall(r"`([a-z]\w*)[.`]", cell)))


def said_of(sections: tuple[str, ...], path: str) -> dict[str, str]:
    """Return the treatment of each field in the tables of these sections."""
    found: dict[str, str] = {}
    for header, row in itertools.chain.from_iterable(map(cells, sections)):
        if header == "field":
            said = row[-1] if row[-1].startswith(("ignored", "rejected")) else "supported"
            found |= dict.fromkeys(names(row[0]), said)
        elif header == "treatment":
            here = [part for part in row[0].split(", ") if path in SUBJECTS.get(part, path)]
            for name in names(row[1]):
                found[name] = here[0] if here else found.get(name, "ignored")
    return {name: said for name, said in found.items() if name not in ELSEWHERE}


def rows() -> list[Any]:
    """Return every row: its text, the field, and the endpoint."""
    return [
        pytest.param(said, name, endpoint, id=f"{endpoint[0]}:{name}")
        for endpoints, sections in TABLES
        for endpoint in endpoints
        for name, said in said_of(sections, endpoint[0]).items()
        if name in endpoint[2]
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Server]:
    engine = Engine.fake(max_model_len=1024)
    engine.chat_template = ChatTemplate(TEMPLATE)
    async with running(engine) as server:
        yield server


def test_tables_list_exactly_the_tested_fields():
    for endpoints, sections in TABLES:
        tried = {name for _, _, samples in endpoints for name in samples}
        assert said_of(sections, endpoints[0][0]).keys() == tried


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("said", "name", "endpoint"), rows())
async def test_field_behaves_as_the_table_states(served, said, name, endpoint):
    path, plain, samples = endpoint
    value = samples[name]
    if name == "previous_response_id":
        value = (await served.post(path, plain))[1]["id"]
    sent = {**plain, **(value if isinstance(value, dict) else {name: value})}
    async with served.http.post(served.url + path, json=sent) as response:
        status, answer = response.status, await response.text()
    wrong_status, refused = await served.post(path, {**plain, name: WRONG})
    if said.startswith("rejected"):
        assert status == 400, answer
        assert wrong_status == 400 and refused["error"]["param"].partition("[")[0] == name
    elif said == "supported":
        assert status == 200, answer
        assert wrong_status == 400, "no value of it is wrong: it is not read"
        assert (refused["error"]["param"] or name).startswith(name)
    else:
        assert said.startswith("ignored") and status == 200
        assert outcome(await served.post(path, sent)) == outcome(await served.post(path, plain))
        assert wrong_status == (400 if name in TYPED else 200)


def outcome(reply: tuple[int, Any]) -> Any:
    """Return the model's part of an answer."""
    status, answer = reply
    assert status == 200
    if "output" in answer:
        return [item["content"] for item in answer["output"]]
    return answer["choices"] if "choices" in answer else answer["data"]
