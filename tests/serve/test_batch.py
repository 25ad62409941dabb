"""`forge-jax batch`: a batch file in and its answers out, under all interruptions."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import io
import json
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_jax.testing import core_of
from forge_serve.batch import run as running_file
from forge_serve.batch.errors import BatchFileError
from forge_serve.batch.files import Input, Output
from forge_serve.batch.progress import Counts, Progress
from forge_serve.cli import main as cli
from forge_serve.config import ServerConfig
from tests.serve import families
from tests.serve.conftest import running, scripted_engine

FORGE = [sys.executable, "-W", "error", "-m", "forge_serve.cli.main"]
FAKE = ["--fake", "--quiet"]
CHAT = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 6, "seed": 5}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
# Bodies of every endpoint, some of which are refused.
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 3, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"choice": ["four", "five"]}}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {**CHAT, "request_id": "mine", "return_token_ids": True}),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 1000}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "yaml"}}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "seed": 3, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0, "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": "a", "temperature": -1}),
    ("/v1/completions", {"prompt": "a", "model": "another"}),
    ("/v1/completions", {"prompt": "a" * 9000}),
    ("/v1/completions", {"prompt": "a", "use_beam_search": True}),
    ("/v1/completions", {}),
    ("/v1/embeddings", {"input": ["one", "two"]}),
    ("/v1/embeddings", {"input": []}),
    ("/v1/embeddings", {"input": "a", "dimensions": 3}),
]


def posted(custom_id: str, url: str, body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def prompts(count: int, **more: Any) -> list[dict[str, Any]]:
    """Return plain lines of prompts without a common block, each with a seed."""
    return [{"id": f"q{i}", "prompt": f"{i} and on", "seed": i, **more} for i in range(count)]


def write(path: Path, lines: Iterable[Any]) -> Path:
    """Write lines of JSON, or bytes verbatim."""
    texts = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return path


def batch(source: Path, target: Path, *flags: str) -> list[dict[str, Any]]:
    """Run the command in this process; return the answers in the order of the input."""
    assert cli.main(["batch", str(source), str(target), *FAKE, *flags]) == 0
    return answers(target)


def answers(target: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in target.read_bytes().splitlines()]
    return sorted(found, key=lambda a: a["line"] if "line" in a else a["id"])


def without_time(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without the fields that differ between servers."""
    body = {name: value for name, value in body.items() if name not in ("created", "id")}
    return json.loads(re.sub(r'"call_\w+"', '"call"', json.dumps(body)))


def test_batch_line_has_the_body_of_an_http_response(tmp_path):
    requests = [posted(str(i), url, body) for i, (url, body) in enumerate(BODIES)]
    lines = batch(write(tmp_path / "in", requests), tmp_path / "out", "--no-prefix-cache")

    async def post_all() -> list[tuple[int, Any]]:
        engine = Engine.fake(config=EngineConfig.from_options(prefix_cache=False))
        async with running(engine) as server:
            return [await server.post(url, body) for url, body in BODIES]

    for line, request, (status, body) in zip(lines, requests, asyncio.run(post_all()), strict=True):
        assert line["custom_id"] == request["custom_id"] and line["error"] is None
        response = line["response"]
        assert response["status_code"] == status
        assert without_time(response["body"]) == without_time(body), request
    statuses = {line["response"]["status_code"] for line in lines}
    assert statuses == {200, 400, 404}
    assert lines[4]["response"]["request_id"] == "mine"
    assert lines[4]["response"]["body"]["id"] == "chatcmpl-mine"


def test_tool_calls_are_parsed(tmp_path, monkeypatch):
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    engine = scripted_engine(call, template=families.HERMES)
    monkeypatch.setattr(running_file, "load_engine", lambda *_: engine)
    lines = [{**CHAT, "max_tokens": 200, "tools": [TOOL]}]
    [answer] = batch(write(tmp_path / "in", lines), tmp_path / "out")
    assert answer["finish_reason"] == "tool_calls" and answer["text"] is None
    [called] = answer["choices"][0]["message"]["tool_calls"]
    assert called["function"] == {"name": "look", "arguments": "{}"}


def test_plain_lines_have_plain_answers(tmp_path):
    plain = [
        {"prompt": "a", "seed": 1, "max_tokens": 4},
        {"id": 7, **CHAT},
        {"id": "two", **CHAT, "n": 2},
        {"id": "scored", "prompt": "a", "logprobs": 1, "max_tokens": 2},
        {"id": "refused", "prompt": "a", "temperature": "hot"},
    ]
    one, two, several, scored, refused = batch(write(tmp_path / "in", plain), tmp_path / "out")
    assert one.keys() == {"line", "digest", "id", "text", "finish_reason", "usage"}
    assert (one["line"], one["id"], one["finish_reason"]) == (1, None, "length")
    assert len(one["text"].split()) == 4 and one["usage"]["completion_tokens"] == 4
    assert two["id"] == 7 and two["text"]
    texts = [choice["message"]["content"] for choice in several["choices"]]
    assert len(texts) == 2 and several["text"] == texts[0] != texts[1]
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 2
    assert refused.keys() == {"line", "digest", "id", "error"}
    assert refused["error"]["param"] == "temperature"


def test_invalid_line_becomes_an_error_line(tmp_path):
    url, body = "/v1/completions", {"prompt": "a", "max_tokens": 2}
    wrong = [
        (b"not JSON", "invalid_json_line"),
        (b'{"custom_id": "cut', "invalid_json_line"),
        (b"[1, 2]", "invalid_json_line"),
        (b'{"custom_id": "\xff"}', "invalid_custom_id"),
        (b'{"custom_id": "deep", "body": ' + b"[" * 60_000, "invalid_json_line"),
        (b'{"custom_id": "' + b"x" * 200_000 + b'"}', "line_too_long"),
        ({"method": "POST", "url": url, "body": body}, "missing_required_parameter"),
        (posted("x" * 513, url, body), "invalid_custom_id"),
        ({**posted("", url, body), "custom_id": 5}, "invalid_custom_id"),
        (posted("url", "/v1/images", body), "invalid_url"),
        ({**posted("method", url, body), "method": "GET"}, "invalid_method"),
        ({"custom_id": "bodiless", "method": "POST", "url": url}, "missing_required_parameter"),
    ]
    refused = [
        (posted("null", url, None), 400),
        (posted("stream", url, {**body, "stream": True}), 400),
        (posted("large", url, {"prompt": "a" * 2000}), 413),
    ]
    good = [posted(f"good-{i}", url, body) for i in range(2)]
    lines = [good[0], *(line for line, _ in wrong), *(line for line, _ in refused), good[1]]
    first, *found, last = batch(
        write(tmp_path / "in", lines), tmp_path / "out", "--max-body-bytes", "1024"
    )
    assert first["response"]["status_code"] == last["response"]["status_code"] == 200
    for answer, (line, code) in zip(found, wrong, strict=False):
        assert answer["response"] is None and answer["error"]["code"] == code, line
        assert answer["error"]["message"]
    for answer, (line, status) in zip(found[len(wrong) :], refused, strict=True):
        assert answer["error"] is None and answer["response"]["status_code"] == status, line
        assert answer["response"]["body"]["error"]["message"]
    ids = [answer["custom_id"] for answer in found]
    assert ids[-6:] == ["url", "method", "bodiless", "null", "stream", "large"]


def test_invalid_plain_line_becomes_an_error_line(tmp_path):
    lines = [{"prompt": "a"}, b"{", {"id": 1, "text": "a"}, {"id": 2, "prompt": "a", **CHAT},
             {"id": [], "prompt": "a"}]  # fmt: skip
    good, *wrong = batch(write(tmp_path / "in", lines), tmp_path / "out")
    assert good["text"]
    codes = [answer["error"]["code"] for answer in wrong]
    missing = "missing_required_parameter"
    assert codes == ["invalid_json_line", missing, missing, "invalid_id"]
    assert [answer["id"] for answer in wrong] == [None, 1, 2, None]


def test_empty_lines_are_skipped_and_the_last_newline_is_optional(tmp_path):
    source = tmp_path / "in"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert [answer["line"] for answer in batch(source, tmp_path / "out")] == [1, 4]
    source.write_bytes(b"")
    assert batch(source, tmp_path / "none") == []


@pytest.mark.parametrize("name", ["custom_id", "id"])
def test_duplicate_id_is_rejected_by_line_before_anything_runs(tmp_path, capsys, name):
    line = posted("a", "/v1/completions", {}) if name == "custom_id" else {"prompt": "a"}
    source = write(tmp_path / "in", [{**line, name: each} for each in ("a", "b", "a")])
    assert cli.main(["batch", str(source), str(tmp_path / "out"), *FAKE]) == 1
    error = capsys.readouterr().err
    assert f"line 3: duplicate {name} 'a', first used in line 1" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@contextlib.contextmanager
def in_the_middle(source: Path, target: Path, count: int):
    """Start a process that has written this many answers and has more to write."""
    command = [*FORGE, "batch", source, target, "--fake", "--fake-step-time-ms", "15",
               "--in-flight", "4", "--no-prefix-cache"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not target.exists() or target.read_bytes().count(b"\n") < count:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.quick_cases(1)
def test_interrupted_run_resumes_into_the_same_file(tmp_path, number):
    source = write(tmp_path / "in", [*prompts(30, max_tokens=8), b"not JSON"])
    batch(source, tmp_path / "whole", "--no-prefix-cache")
    target = tmp_path / "out"
    with in_the_middle(source, target, 6) as process:
        process.send_signal(number)
        code = process.wait(timeout=30)
        assert process.stderr is not None
        said = process.stderr.read()
    before = target.read_bytes()
    assert 6 <= before.count(b"\n") < 31
    if number == signal.SIGKILL:
        assert code == -number
        target.write_bytes(before + b'{"line":29,"dig')  # a partial line
    else:
        assert code == 128 + number
        assert "interrupted: run the same command again" in said and "Traceback" not in said
    batch(source, target, "--no-prefix-cache")
    done = target.read_bytes()
    assert done.startswith(before)
    assert sorted(done.splitlines()) == sorted((tmp_path / "whole").read_bytes().splitlines())
    batch(source, target)
    assert target.read_bytes() == done


def test_openai_format_run_resumes(tmp_path):
    lines = [posted(f"c{i}", "/v1/completions", {"prompt": f"{i}", "seed": i}) for i in range(12)]
    source = write(tmp_path / "in", [*lines, b"not JSON", posted("x", "/nowhere", {})])
    whole = batch(source, tmp_path / "whole", "--no-prefix-cache")
    kept = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    for cut in (kept[5][:25], kept[5][:3], b""):
        target = tmp_path / "out"
        target.write_bytes(b"".join(kept[:5]) + cut)
        again = batch(source, target, "--no-prefix-cache")
        for one, other in zip(again, whole, strict=True):
            assert one.keys() == other.keys()
            for body in (one, other):
                if body["response"]:
                    del body["response"]["body"]["created"]
            assert one == other
        whole = answers(tmp_path / "whole")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"my notes\n", "line 1: not a response to a line of"),
        (b"my notes", "line 1: not a response to a line of"),
        (
            b'{"line":1,"digest":"00000000000000aa","id":null}\n',
            "line 1: this response belongs to a line 1",
        ),
        (
            b'{"line":9,"digest":"00000000000000aa","id":null}\n',
            "line 1: this response belongs to a line 9",
        ),
    ],
)
def test_file_with_other_contents_is_not_touched(tmp_path, capsys, written, message):
    source, target = write(tmp_path / "in", prompts(2)), tmp_path / "out"
    target.write_bytes(written)
    assert cli.main(["batch", str(source), str(target), *FAKE]) == 1
    assert message in capsys.readouterr().err
    assert target.read_bytes() == written


def test_changed_input_is_rejected(tmp_path, capsys):
    source, target = write(tmp_path / "in", prompts(2)), tmp_path / "out"
    batch(source, target)
    write(source, [{"id": "q0", "prompt": "another"}, *prompts(2)[1:]])
    assert cli.main(["batch", str(source), str(target), *FAKE]) == 1
    assert "this response belongs to a line 1 that" in capsys.readouterr().err


def test_input_that_changes_during_the_run_is_rejected(tmp_path):
    source = write(tmp_path / "in", prompts(3))
    lines = Input(source, 1 << 20)
    write(source, [*prompts(2), {"prompt": "another"}])
    with pytest.raises(BatchFileError, match="changed while it was being read"):
        list(lines.open_lines())


def test_lines_may_be_appended(tmp_path):
    source, target = write(tmp_path / "in", prompts(2)), tmp_path / "out"
    batch(source, target)
    before = target.read_bytes()
    write(source, prompts(3))
    assert [answer["id"] for answer in batch(source, target)] == ["q0", "q1", "q2"]
    assert target.read_bytes().startswith(before)


def test_unusable_files_fail_with_one_line_and_exit_code_1(tmp_path, capsys):
    source, target = write(tmp_path / "in", prompts(1)), tmp_path / "out"
    with target.open("ab") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        for arguments, message in (
            ((tmp_path / "nowhere", target), "cannot read"),
            ((tmp_path, target), "cannot read"),
            ((source, source), "is the input"),
            ((source, tmp_path / "no" / "out"), "cannot write"),
            ((source, "/dev/null"), "is not a regular file"),
            ((source, target), "another process is writing"),
        ):
            assert cli.main(["batch", *map(str, arguments), *FAKE]) == 1
            error = capsys.readouterr().err
            assert (
                error.startswith("forge-jax: error: ")
                and message in error
                and error.count("\n") == 1
            )


def test_input_is_read_incrementally(tmp_path):
    source = write(tmp_path / "in", prompts(4000, suffix="x" * 4000))
    tracemalloc.start()
    try:
        lines = Input(source, 1 << 20)
        for _ in lines.open_lines():
            pass
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lines.num_requests == 4000
    assert most < 1_000_000 < source.stat().st_size / 10


@pytest.mark.parametrize(("flags", "most"), [(["--in-flight", "3"], 3), ([], 64 + 8)])
def test_lines_in_flight_are_bounded(tmp_path, monkeypatch, flags, most):
    read = written = 0
    in_flight = []
    open_lines, write_line = Input.open_lines, Output.write

    def counted(self):
        nonlocal read
        for line in open_lines(self):
            read += 1
            in_flight.append(read - written)
            yield line

    def counted_write(self, line):
        nonlocal written
        written += 1
        write_line(self, line)

    monkeypatch.setattr(Input, "open_lines", counted)
    monkeypatch.setattr(Output, "write", counted_write)
    source = write(tmp_path / "in", prompts(150, max_tokens=2))
    batch(source, tmp_path / "out", "--max-num-seqs", "8", *flags)
    assert read == written == 150
    assert max(in_flight) == most + 1  # one is read and waits


async def test_long_lines_wait_for_room():
    window = running_file._Window(10, 100)
    await window.enter(1000)  # alone it may have any size
    entering = asyncio.ensure_future(window.enter(50))
    await asyncio.sleep(0)
    assert not entering.done()
    window.leave(1000)
    await entering
    await window.enter(50)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(window.enter(1), 0.01)


def test_full_queue_is_awaited(tmp_path):
    source = write(tmp_path / "in", prompts(20, n=4, max_tokens=3))
    found = batch(source, tmp_path / "out", "--max-queued-requests", "4", "--max-num-seqs", "2")
    assert all("text" in answer for answer in found)


def test_engine_failure_ends_the_run_without_error_lines(tmp_path, capsys, monkeypatch):
    def load(*_: object) -> Engine:
        # Slow steps, so that the first answers are written before the engine fails.
        config = EngineConfig.from_options(max_num_seqs=4)
        engine = Engine.fake(config=config, step_time_s=0.01)
        tick, left = core_of(engine).tick, iter(range(20))

        def failing(before_wait):
            if next(left, None) is None:
                raise MemoryError
            return tick(before_wait)

        core_of(engine).tick = failing
        return engine

    monkeypatch.setattr(running_file, "load_engine", load)
    source, target = write(tmp_path / "in", prompts(40, max_tokens=4)), tmp_path / "out"
    assert cli.main(["batch", str(source), str(target), *FAKE]) == 1
    assert "the engine is failed" in capsys.readouterr().err
    before = answers(target)
    assert before and len(before) < 40 and all("text" in answer for answer in before)
    monkeypatch.undo()
    assert len(batch(source, target)) == 40


def test_quiet_suppresses_the_summary(tmp_path, capsys):
    source = write(tmp_path / "in", [*prompts(3, max_tokens=2), b"{"])
    batch(source, tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    assert cli.main(["batch", str(source), str(tmp_path / "out"), "--fake"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1  # no bar without a terminal
    assert "4 of 4 lines done; 1 of them failed; 6 tokens generated in " in err


def test_terminal_shows_a_bar_with_tokens_and_remaining_time(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for quiet in (False, True):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        counts, tokens = Counts(requests=10, found=2, errors=1), iter([0, 50, 80])
        progress = Progress(counts, lambda tokens=tokens: next(tokens), quiet=quiet)
        progress.line()
        progress.refresh()
        progress.close()
        shown = terminal.getvalue()
        assert bool(shown) is not quiet
        assert quiet or re.search(r"3/10 \[.*<.* lines.*tokens/s, 1 errors", shown)
    assert counts.tokens == 80


@pytest.fixture
def configs(monkeypatch) -> list[tuple[EngineConfig, ServerConfig, Any]]:
    calls: list[tuple[EngineConfig, ServerConfig, Any]] = []
    monkeypatch.setattr(running_file, "batch", lambda *args: calls.append(args) or 0)
    return calls


@pytest.mark.parametrize(
    ("model", "named"),
    [([], "forge-tiny"), (["a/b"], "a/b"), (["--model", "a/b"], "a/b")],
)
def test_model_is_given_as_last_argument_or_flag(configs, model, named):
    flags = "--max-num-seqs 7 --in-flight 5 --max-n 3 --served-model-name x".split()
    assert cli.main(["batch", "in", "out", *model, *flags]) == 0
    [(engine, server, config)] = configs
    assert (engine.model.model, engine.batch.max_num_seqs) == (named, 7)
    assert (config.input, config.output, config.in_flight) == (Path("in"), Path("out"), 5)
    assert (server.limits.n, server.served_model_name) == (3, "x")


def test_two_models_are_rejected(configs, capsys):
    assert cli.main(["batch", "in", "out", "a", "--model", "b"]) == 1
    assert configs == []
    assert "MODEL and --model cannot both be set: omit one of them" in capsys.readouterr().err


def test_invalid_number_fails_with_one_line_and_exit_code_1(capsys, configs):
    assert cli.main(["batch", "in", "out", "--in-flight", "0"]) == 1
    assert capsys.readouterr().err == "forge-jax: error: --in-flight must be at least 1, not 0\n"


@pytest.fixture
def evaluation():
    file = Path(__file__).parents[2] / "examples" / "batch_evaluation.py"
    spec = importlib.util.spec_from_file_location("batch_evaluation", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_example_evaluates_the_bundled_model(evaluation, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    small = "--deterministic --kernels xla --max-model-len 128".split()  # little to compile
    accuracy = evaluation.main("forge-tiny", str(out), *small)
    assert 0.9 <= accuracy <= 1.0
    said = capsys.readouterr().out
    assert f"accuracy: {accuracy:.1%}" in said and "capitals: " in said
    wrong = [{**answer, "text": "Paris is 3."} for answer in answers(out)]
    write(out, wrong)  # done lines are not sent again
    assert evaluation.main("forge-tiny", str(out)) < 0.1


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("2 + 2 = 4.", "4", True),
        ("A dog has four legs.", "4", True),
        ("4 + 2 = 6.", "4", False),
        ("The capital is Paris.", "Paris", True),
        ("Parisian", "Paris", False),
    ],
)
def test_example_recognizes_correct_answers(evaluation, text, expected, right):
    assert evaluation.is_right(text, expected) is right
