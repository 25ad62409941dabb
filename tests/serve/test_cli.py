"""The command line: flags from the configuration, the start and its errors, and the end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from server_process import running

from forge_jax.config import EngineConfig
from forge_jax.errors import ConfigError
from forge_serve.cli import main as cli
from forge_serve.cli import reference as config_docs
from forge_serve.config import ServerConfig

FORGE = [sys.executable, "-W", "error", "-m", "forge_serve.cli.main"]
COMMANDS = (
    "serve",
    "chat",
    "generate",
    "batch",
    "bench",
    "compare",
    "profile",
    "convert",
    "compile",
    "doctor",
)
REQUIRED = (
    "--host --port --dtype --max-model-len --max-num-seqs --max-num-batched-tokens --block-size "
    "--num-blocks --memory-fraction --kv-cache --prefill-chunk-size --scheduling-policy --eviction "
    "--no-prefix-cache --backend --device --seed --served-model-name --revision --chat-template "
    "--fake --drain-timeout --no-request-log"
).split()


@pytest.fixture
def configs(monkeypatch) -> list[tuple[EngineConfig, ServerConfig]]:
    calls: list[tuple[EngineConfig, ServerConfig]] = []

    def serve(engine: EngineConfig, server: ServerConfig, startup: object) -> int:
        calls.append((engine, server))
        return 0

    monkeypatch.setattr("forge_serve.server.process.serve", serve)
    return calls


def test_no_flags_give_the_dataclass_defaults(configs):
    assert cli.main(["serve"]) == 0
    assert configs == [(EngineConfig.from_options(saved_executables=True), ServerConfig())]


def test_flags_become_fields(configs):
    text = (
        "serve org/model --dtype float16 --max-model-len 2048 --block-size 32 --num-blocks auto "
        "--memory-fraction 0.5 --no-prefix-cache --eviction fifo --kv-cache contiguous "
        "--kv-dtype fp8 --scheduling-policy prefix --seed 7 --revision main --port 0 --host ::1 "
        "--served-model-name auto --no-request-log --fake --fake-step-time-ms 2.5"
    )
    assert cli.main(text.split()) == 0
    [(engine, server)] = configs
    assert engine == EngineConfig.from_options(
        model="org/model",
        dtype="float16",
        max_model_len=2048,
        block_size=32,
        memory_fraction=0.5,
        prefix_cache=False,
        eviction="fifo",
        kv_cache="contiguous",
        kv_dtype="fp8",
        scheduling_policy="prefix",
        seed=7,
        revision="main",
        saved_executables=True,
    )
    assert server == ServerConfig(
        port=0,
        host="::1",
        served_model_name="auto",  # only numbers can be automatic
        request_log=False,
        fake=True,
        fake_step_time_ms=2.5,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "many"],
        ["serve", "--dtype", "int8"],
        ["serve", "--block-size", "1.5"],
        ["serve", "--unknown"],
        ["serve", "a", "b"],
        ["dance"],
        [],
    ],
)
def test_unparsable_flags_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("forge-jax: error: ") and error.count("\n") == 1
    assert re.search(r"\(see: forge-jax (serve )?--help(-all)?\)$", error)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--block-size", "9"], "--block-size"),
        (["--memory-fraction", "2"], "--memory-fraction"),
        (["--port", "70000"], "--port"),
        (["--served-model-name", ""], "--served-model-name"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
        (["--fake-step-time-ms", "nan"], "--fake-step-time-ms"),
        (["--tls-cert", "cert.pem"], "--tls-key"),
        (["--cors-origin", "example.org"], "--cors-origin"),
        (["--api-key", "two words"], "--api-key"),
        (["--max-n", "129"], "--max-n"),
    ],
)
def test_invalid_values_fail_with_one_line_and_exit_code_1(arguments, named, capsys, configs):
    assert cli.main(["serve", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("forge-jax: error: ") and named in error
    assert error.count("\n") == 1
    assert configs == []


def test_help_lists_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help-all"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag in REQUIRED:
        assert f" {flag} " in text
    assert "(default: 256)" in text and "(default: 8000)" in text


@pytest.mark.parametrize(
    ("raised", "line", "status"),
    [
        (ConfigError("two\nlines \x1b[2J"), "error: two lines ␛[2J", 1),
        (FileNotFoundError(2, "No such file", "x.json"), "error: x.json: No such file", 1),
        (MemoryError(), "error: out of memory: use a smaller model, --quantization int8", 1),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 GiB"), "error: the device is out of memory: lower", 1),
        (TypeError("no len()"), "error: TypeError: no len() (unexpected: run with --debug", 1),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_errors_are_one_line_and_debug_shows_the_traceback(
    raised, line, status, capsys, monkeypatch
):
    def serve(*_: object) -> int:
        raise raised

    monkeypatch.setattr("forge_serve.server.process.serve", serve)
    assert cli.main(["serve"]) == status
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"forge-jax: {line}") and error.count("\n") == 1
    assert cli.main(["serve", "--debug"]) == status
    error = capsys.readouterr().err
    assert error.startswith("Traceback") and "in serve" in error
    assert error.splitlines()[-1].startswith(f"forge-jax: {line}")


@pytest.mark.parametrize(("flags", "target_ms"), [((), 0), (("--itl-target-ms", "50"), 50)])
def test_batch_has_no_latency_target_by_default(flags, target_ms, monkeypatch):
    configs: list[EngineConfig] = []

    def batch(engine: EngineConfig, *_: object) -> int:
        configs.append(engine)
        return 0

    monkeypatch.setattr("forge_serve.batch.run.batch", batch)
    assert cli.main(["batch", "in.jsonl", "out.jsonl", *flags]) == 0
    assert configs[0].batch.itl_target_ms == target_ms
    assert configs[0].parallel.saved_executables


@pytest.mark.parametrize("name", [*COMMANDS, "profile diff"])
def test_every_command_has_debug_and_a_description(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*name.split(), "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    usage, description, *_ = text.split("\n\n")
    assert usage.startswith(f"usage: forge-jax {name} ") and len(usage) < 120
    assert description.endswith(".") or name == "batch"
    assert "  --debug " in text


@pytest.mark.parametrize("name", config_docs.PAGES)
def test_generated_flag_and_command_pages_are_current(name):
    file = Path(__file__).parents[2] / name
    text = file.read_text(encoding="utf-8")
    assert text == config_docs.PAGES[name](), "run python -m forge_serve.cli.reference"
    for flag in REQUIRED:
        assert flag in text


def test_help_and_version_import_nothing_heavy():
    script = (
        "import sys\n"
        "from forge_serve.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'aiohttp', 'forge_jax.engine.thread'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    helps = (["--help"], *([name, "--help"] for name in COMMANDS))
    for arguments in (*helps, ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "forge-jax" in done.stdout


def test_server_imports_no_jax_itself():
    script = "import sys, forge_serve.server.process; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_taken_port_fails_with_one_line_and_exit_code_1():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*FORGE, "serve", "--port", str(port)], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == f"forge-jax: error: port {port} is already in use: set --port\n"


def test_missing_model_fails_with_one_line_and_exit_code_1(tmp_path):
    done = subprocess.run(
        [*FORGE, "serve", str(tmp_path / "nowhere"), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("forge-jax: error: no model ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key-file", "nowhere"], "--api-key-file: cannot read nowhere: No such file"),
        (["--tls-cert", "nowhere", "--tls-key", "no"], "--tls-cert: cannot read nowhere: No such"),
    ],
)
def test_missing_file_fails_with_one_line_and_exit_code_1(flags, message):
    done = subprocess.run(
        [*FORGE, "serve", "--fake", "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"forge-jax: error: {message}")


def test_server_starts_serves_and_drains():
    command = [*FORGE, "serve", "a/model", "--fake", "--port", "0", "--fake-step-time-ms", "20"]
    with running(command, subprocess.PIPE, subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        match = re.search(r"(http://127\.0\.0\.1:\d+); try: curl ", line)
        assert match, line
        body = {"prompt": "Hello", "max_tokens": 30, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            match[1] + "/v1/completions", data=json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            first = response.readline()
            process.send_signal(signal.SIGTERM)
            rest = response.read()
        assert first.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
        assert process.wait(timeout=10) == 0
        log = process.stderr.read()
        assert "Traceback" not in log
        assert "WARNING --fake loads no model and ignores MODEL" in log


def test_malformed_http_is_one_line_in_the_log():
    command = [*FORGE, "serve", "--fake", "--port", "0"]
    with running(command, subprocess.PIPE, subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        match = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert match
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        malformed = (
            head + b"Transfer-Encoding: chunked\r\n\nzz\r\n",
            head + b"Content-Length: many\r\n\r\n",
            head + b"Authorization: Bearer sk-secret\x01\r\n\r\n",
            head + b"Authorization: Bearer sk-secret" + b"x" * 9000 + b"\r\n\r\n",
            head + b"Authorization : Bearer sk-secret\r\n\r\n",
        )
        for data in malformed:
            with socket.create_connection(("127.0.0.1", int(match[1])), timeout=10) as client:
                client.sendall(data)
                assert b" 400 " in client.recv(4096)
                while client.recv(4096):
                    pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        log = process.stderr.read()
        assert "Traceback" not in log
        assert "secret" not in log, "a key that is sent in a broken request is still a key"
        lines = [line for line in log.splitlines() if "400, message" in line]
        assert len(lines) == len(malformed), log
        assert all(" WARNING " in line for line in lines)


def test_smoke_benchmark_reports_a_missing_server_in_one_line():
    with socket.socket() as taken:  # bound but not listening, so connections are refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.smoke", "--url", url],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=Path(__file__).parents[2],
        )
    assert done.returncode == 1
    assert done.stderr.startswith(f"no server is ready at {url}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_during_a_shutdown_do_not_change_its_status(number):
    command = [*FORGE, "serve", "--fake", "--port", "0"]
    with running(command, subprocess.PIPE, subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "forge-jax serves" in process.stdout.readline()
        while process.poll() is None:
            process.send_signal(number)
            time.sleep(0.002)
        assert process.returncode == 0
        assert "Traceback" not in process.stderr.read()


def test_second_signal_ends_at_once():
    command = [*FORGE, "serve", "--fake", "--port", "0", "--fake-step-time-ms", "100"]
    with running(command, subprocess.PIPE, subprocess.DEVNULL) as process:
        assert process.stdout is not None
        url = re.search(r"http://\S+\d", process.stdout.readline())[0]  # type: ignore[index]
        body = {"prompt": "Hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            url + "/v1/completions", data=json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            response.readline()
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert process.poll() is None, "it drains"
            process.send_signal(signal.SIGINT)
            assert b'"engine_unavailable"' in response.read()
            assert process.wait(timeout=5) == 0
