"""The provider `forge-jax` of Inspect, compared with `LLM` on the same model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import read_eval_log
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelOutput,
)
from inspect_ai.tool import ToolCall, ToolFunction, ToolInfo, ToolParams
from inspect_ai.util import JSONSchema

from forge_jax import LLM, SamplingParams
from forge_jax.errors import ConfigError, EngineError, RequestError
from forge_serve.integrations.inspect import forge_jax as get_provider
from forge_serve.integrations.inspect import provider
from forge_serve.integrations.inspect.messages import chat_body, model_output
from forge_serve.integrations.inspect.provider import ForgeAPI

ROOT = Path(__file__).parents[3]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "chat_template": str(ROOT / "tests/clients/tools.jinja"),
}
QUESTION = "What is the capital of France?"
GREEDY = GenerateConfig(temperature=0, max_tokens=24)
WEATHER = ToolInfo(
    name="weather",
    description="Return the weather of a city.",
    parameters=ToolParams(
        properties={"city": JSONSchema(type="string", enum=["Oslo", "Rome"])}, required=["city"]
    ),
)


@pytest.fixture(scope="module")
def api() -> ForgeAPI:
    return ForgeAPI("forge-tiny", **OPTIONS)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("forge-tiny", **OPTIONS)


async def answer(
    api: ForgeAPI, text: str = QUESTION, config: GenerateConfig = GREEDY
) -> ModelOutput:
    output, call = await api.generate([ChatMessageUser(content=text)], [], "none", config)
    assert call.request["messages"] == [{"role": "user", "content": text}]
    return output


def test_package_declares_the_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["inspect_ai"] == {
        "forge-jax": "forge_serve.integrations.inspect"
    }


async def test_output_logprobs_and_usage_equal_those_of_llm(api, llm):
    config = GREEDY.merge(GenerateConfig(logprobs=True, top_logprobs=3, prompt_logprobs=2))
    output = await answer(api, config=config)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=3, prompt_logprobs=2)
    [expected] = llm.chat([{"role": "user", "content": QUESTION}], params, progress=False)
    [choice] = output.choices
    assert choice.message.text == expected.text == "The capital of France is Paris."
    assert choice.stop_reason == "stop" and output.model == "forge-tiny"
    usage, prompt_len = output.usage, len(expected.prompt_token_ids)
    assert usage.input_tokens + usage.input_tokens_cache_read == prompt_len
    assert usage.output_tokens == len(expected.outputs[0].token_ids)
    own = [entry.logprob for entry in choice.logprobs.content]
    theirs = [entry.logprob for entry in expected.outputs[0].logprobs][: len(own)]
    assert own == pytest.approx(theirs, abs=1e-4)
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    of_prompt = [entry.logprob for entry in choice.prompt_logprobs.content]
    assert of_prompt == pytest.approx([e.logprob for e in expected.prompt_logprobs], abs=1e-4)


async def test_sampling_options_reach_the_engine(api):
    sampled = GenerateConfig(temperature=2.0, max_tokens=12, num_choices=2)
    one, same, other = [
        [c.message.text for c in (await answer(api, config=config)).choices]
        for config in (sampled.merge(GenerateConfig(seed=seed)) for seed in (1, 1, 2))
    ]
    assert one == same != other and len(set(one)) == 2
    output = await answer(api, config=GREEDY.merge(GenerateConfig(stop_seqs=["France"])))
    assert output.completion == "The capital of "
    output = await answer(api, config=GenerateConfig(temperature=0, max_tokens=2))
    assert output.stop_reason == "max_tokens"


async def test_required_and_named_tools_are_called(api):
    question = [ChatMessageUser(content="What is the weather in Rome?")]
    for choice in ("any", ToolFunction(name="weather")):
        output, _ = await api.generate(question, [WEATHER], choice, GenerateConfig(temperature=0))
        [call] = output.message.tool_calls
        assert (call.function, call.parse_error) == ("weather", None)
        assert call.arguments["city"] in ("Oslo", "Rome")
        assert output.stop_reason == "tool_calls"
    result = ChatMessageTool(content="sunny", tool_call_id=call.id, function=call.function)
    messages = [*question, output.message, result]
    output, _ = await api.generate(messages, [WEATHER], "none", GREEDY)
    assert output.message.tool_calls is None and output.completion


async def test_concurrent_chats_equal_separate_ones(api):
    texts = [f"What is {i}+{i}?" for i in range(1, 9)]
    together = await asyncio.gather(*(answer(api, text) for text in texts))
    separate = [await answer(api, text) for text in texts]
    assert [o.completion for o in together] == [o.completion for o in separate]


def test_provider_serves_several_event_loops_and_cancellation(api):
    async def cancelled() -> None:
        endless = GenerateConfig(temperature=2.0, extra_body={"ignore_eos": True})
        task = asyncio.create_task(answer(api, config=endless))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    first = asyncio.run(answer(api))
    asyncio.run(cancelled())
    assert asyncio.run(answer(api)).completion == first.completion


async def test_prompt_beyond_the_context_ends_the_sample(api):
    output = await answer(api, text="word " * 1100)
    assert output.stop_reason == "model_length" and "1024" in output.error


async def test_closed_provider_raises():
    api = ForgeAPI("forge-tiny", **OPTIONS)
    assert await api.count_text_tokens(QUESTION) == len(await api.tokenize(QUESTION)) > 3
    await api.aclose()
    await api.aclose()
    with pytest.raises(EngineError, match="closed"):
        await answer(api)


class FakeBackend:
    """Backend that loads once `loadable` is set. Its requests never finish."""

    def __init__(self) -> None:
        self.loads = 0
        self.error: Exception | None = None
        self.close_error: Exception | None = None
        self.loading, self.loadable = threading.Event(), threading.Event()
        self.asked, self.closed = threading.Event(), False
        self.compilable = threading.Event()
        self.compilable.set()

    def load(self, *_: Any) -> FakeBackend:
        self.loads += 1
        self.loading.set()
        assert self.loadable.wait(30)
        if self.error is not None:
            raise self.error
        return self

    async def finish_compiling(self) -> None:
        while not self.compilable.is_set():
            await asyncio.sleep(0.001)

    async def whole(self, *_: Any) -> bytes:
        assert self.compilable.is_set()
        self.asked.set()
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        self.closed = True
        if self.close_error is not None:
            raise self.close_error


@pytest.fixture
def fake(monkeypatch) -> FakeBackend:
    backend = FakeBackend()
    monkeypatch.setattr(provider.LocalBackend, "load", backend.load)
    return backend


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "forge-jax-inspect"]


async def test_request_cancelled_during_the_load_leaves_one_load(fake):
    api = ForgeAPI("forge-tiny")
    first = asyncio.create_task(answer(api))
    await until(fake.loading)
    await cancel(first)
    second = asyncio.create_task(answer(api))
    fake.compilable.clear()
    fake.loadable.set()
    third = asyncio.create_task(answer(api))
    await asyncio.sleep(0.05)
    await cancel(third)
    assert not fake.asked.is_set(), "still compiling"
    fake.compilable.set()
    await until(fake.asked)
    assert fake.loads == 1
    await cancel(second)
    await api.aclose()


async def test_failed_load_is_shared_and_the_next_request_loads_again(fake):
    api = ForgeAPI("forge-tiny")
    fake.error = EngineError("no memory")
    together = [asyncio.create_task(answer(api)) for _ in range(3)]
    await until(fake.loading)
    fake.loadable.set()
    for each in together:
        with pytest.raises(EngineError, match="no memory"):
            await each
    loads, fake.error = fake.loads, None
    again = asyncio.create_task(answer(api))
    await until(fake.asked)
    assert fake.loads == loads + 1
    await api.aclose()
    with pytest.raises(EngineError, match="closed"):
        await again


@pytest.mark.parametrize("fails", [False, True])
async def test_closing_during_the_load_ends_its_requests(fake, fails):
    others = threads()
    api = ForgeAPI("forge-tiny")
    fake.error = EngineError("no memory") if fails else None
    request = asyncio.create_task(answer(api))
    await until(fake.loading)
    closing = asyncio.create_task(api.aclose())
    await asyncio.sleep(0.05)
    fake.loadable.set()
    async with asyncio.timeout(30):
        await closing
        with pytest.raises(EngineError, match="no memory" if fails else "closed"):
            await request
    assert fake.closed is not fails and threads() == others


async def test_failed_stop_still_ends_the_thread_and_its_requests(fake):
    others = threads()
    api = ForgeAPI("forge-tiny")
    fake.loadable.set()
    fake.close_error = TimeoutError("the engine does not stop")
    request = asyncio.create_task(answer(api))
    await until(fake.asked)
    async with asyncio.timeout(30):
        with pytest.raises(TimeoutError, match="does not stop"):
            await api.aclose()
        with pytest.raises(EngineError, match="closed"):
            await request
    assert threads() == others


async def test_requests_outside_asyncio_and_thread_errors_raise_different_errors(monkeypatch):
    coroutine = ForgeAPI("forge-tiny").count_text_tokens(QUESTION)
    with pytest.raises(EngineError, match="backend asyncio"):
        await asyncio.to_thread(coroutine.send, None)

    def no_thread(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            await ForgeAPI("forge-tiny").count_text_tokens(QUESTION)


@pytest.mark.parametrize(
    ("content", "config", "param"),
    [
        ([ContentImage(image="data:image/png;base64,")], {}, "messages[0].content[0]"),
        (QUESTION, {"reasoning_tokens": 100}, "thinking_token_budget"),
        (QUESTION, {"modalities": ["image"]}, "modalities"),
    ],
)
async def test_unsupported_requests_are_named_in_the_error(api, content, config, param):
    with pytest.raises(RequestError) as caught:
        await api.generate([ChatMessageUser(content=content)], [], "auto", GenerateConfig(**config))
    assert caught.value.param == param


def test_invalid_options_are_named_in_the_error():
    with pytest.raises(ConfigError, match="openai-api"):
        ForgeAPI("forge-tiny", base_url="http://127.0.0.1:8000/v1")
    with pytest.raises(ConfigError, match="dtyp"):
        ForgeAPI("forge-tiny", dtyp="float32")


def test_messages_keep_reasoning_calls_and_errors():
    call = ToolCall(id="c1", function="weather", arguments={"city": "Rome"})
    redacted = ContentReasoning(reasoning="c2VjcmV0", redacted=True)
    parts = [ContentReasoning(reasoning="hm"), redacted, ContentText(text="I ask.")]
    failed = ChatMessageTool(
        content="", tool_call_id="c1", error={"type": "timeout", "message": "too slow"}
    )
    messages = [ChatMessageAssistant(content=parts, tool_calls=[call]), failed]
    said, result = chat_body(messages, [], "auto", GenerateConfig())["messages"]
    assert said["reasoning_content"] == "hm"
    assert said["content"] == [{"type": "text", "text": "I ask."}]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    assert result["content"] == "Error: too slow" and result["tool_call_id"] == "c1"


def test_reasoning_that_is_all_redacted_is_omitted():
    parts = [ContentReasoning(reasoning="c2VjcmV0", redacted=True), ContentText(text="Yes.")]
    [said] = chat_body([ChatMessageAssistant(content=parts)], [], "auto", GREEDY)["messages"]
    assert "reasoning_content" not in said


def test_older_configs_without_some_options_are_read():
    missing = ("verbosity", "modalities", "prompt_logprobs", "best_of")
    older = types.SimpleNamespace(**GREEDY.model_dump(exclude=set(missing)))
    body = chat_body([ChatMessageUser(content=QUESTION)], [], "auto", older)
    assert (body["temperature"], body["max_tokens"]) == (0, 24)


def test_older_inspect_is_named_with_its_upgrade(monkeypatch):
    monkeypatch.delattr("inspect_ai.model.RetryDecision")
    monkeypatch.delitem(sys.modules, provider.__name__)
    with pytest.raises(ImportError, match=r"RetryDecision.*pip install --upgrade inspect_ai"):
        get_provider()


def test_other_missing_packages_keep_their_error(monkeypatch):
    monkeypatch.delitem(sys.modules, provider.__name__)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(ModuleNotFoundError, match="msgspec") as caught:
        get_provider()
    assert "inspect_ai" not in str(caught.value)


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]"])
def test_invalid_arguments_become_a_parse_error(arguments):
    function = {"name": "weather", "arguments": arguments}
    message = {"content": None, "tool_calls": [{"id": "c1", "function": function}]}
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    [call] = model_output({"id": "r", "choices": [choice], "usage": usage}, "m").message.tool_calls
    assert call.arguments == {} and "weather" in call.parse_error


@pytest.mark.timeout(300)
def test_command_of_the_page_scores_all_questions(tmp_path):
    text = (ROOT / "docs/evaluation.md").read_text()
    [line] = [each for each in text.splitlines() if each.startswith("inspect eval")]
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", *line.replace("inspect ", "inspect_ai ", 1).split()]
    done = subprocess.run(
        [*command, "--display", "plain", "--log-dir", str(logs)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Exception" not in done.stderr
    [file] = logs.iterdir()
    log = read_eval_log(str(file))
    assert log.status == "success"
    [scores] = log.results.scores
    assert scores.metrics["accuracy"].value == 1.0
