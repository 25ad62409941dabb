"""`forge-jax chat` in a terminal of its own, and `chat` and `generate` in pipes."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from forge_serve.cli import main as cli
from forge_serve.cli.terminal import Answer, harmless, one_line

FORGE = [sys.executable, "-W", "error", "-m", "forge_serve.cli.main"]
SMALL = "--kernels xla --deterministic --max-num-seqs 1 --max-num-batched-tokens 32".split()
SMALL += ["--temperature", "0"]
WAIT_S = 60.0
CTRL_C, CTRL_D = "\x03", "\x04"
DIMMED = "\x1b[2m"


class Terminal:
    """A process on a pseudo-terminal; `typed` goes to it, `shown` is everything it wrote."""

    def __init__(self, *arguments: str):
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *FORGE, *arguments],  # so that Ctrl-C becomes a signal
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "dumb", "INPUTRC": os.devnull},
        )
        os.close(slave)
        self.shown = ""
        self._seen = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def say(self, text: str, answer: str = "", prompt: str = "> ") -> str:
        """Type a line at the prompt and wait for the output after its echo."""
        self.expect(prompt)
        self.type(text + "\n")
        self.expect(text)
        return self.expect(answer)

    def interrupt(self, line: str, answer: str) -> None:
        """Type an unfinished line, then Ctrl-C until it is answered.

        A signal just before Python's readline waits for a key does not end the wait.
        """
        self.type(line)
        self.expect(line)
        for _ in range(10):
            self.type(CTRL_C)
            with contextlib.suppress(AssertionError):
                self.expect(answer, WAIT_S / 10)
                return
        self.expect(answer)

    def expect(self, text: str, wait_s: float = WAIT_S) -> str:
        """Wait for a text after the last expected one; return everything up to it."""
        deadline = time.monotonic() + wait_s
        while (at := self.shown.find(text, self._seen)) < 0:
            left_s = deadline - time.monotonic()
            ready = left_s > 0 and select.select([self._master], [], [], left_s)[0]
            assert ready, f"no {text!r} in {self.shown[self._seen :]!r}"
            self._read(text)
        found = self.shown[self._seen : at + len(text)]
        self._seen = at + len(text)
        return found

    def _read(self, awaited: str) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the process has closed its end
            data = b""
        assert data, f"it ended without {awaited!r}: {self.shown[self._seen :]!r}"
        self.shown = (self.shown + self._decoder.decode(data)).replace("\r\n", "\n")

    def end(self, text: str) -> int:
        self.expect("> ")  # before the prompt, Ctrl-D would not count as a key
        self.type(text)
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                break
            if not data:
                break
            self.shown += self._decoder.decode(data)
        return self.process.wait(WAIT_S)


@pytest.mark.slow
def test_conversation_with_the_bundled_model_works():
    with Terminal("chat", *SMALL) as chat:
        chat.expect("forge-tiny: /help lists the commands, Ctrl-D ends the chat")
        chat.say("What is 2+2?", "2 + 2 = 4.")
        chat.say("/help", "/system TEXT")
        chat.say("/dance", "(unknown command /dance: /help lists the commands)")
        assert chat.end(CTRL_D) == 0
        assert "Traceback" not in chat.shown


class ScriptedServer:
    """A server that answers each chat with the next list of deltas and keeps the requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.script: list[Any] = []
        self.may_go_on = threading.Event()
        self.left = threading.Event()  # set when a client leaves in the middle of an answer
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"data": [{"id": "scripted\\u001b[2J"}]}')

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                server.bodies.append(json.loads(data))
                server.keys.append(self.headers["Authorization"])
                deltas = server.script.pop(0)
                self.send_response(200 if isinstance(deltas, list) else 400)
                self.end_headers()
                if not isinstance(deltas, list):
                    self.wfile.write(json.dumps({"error": {"message": deltas}}).encode())
                    return
                try:
                    for delta in deltas:
                        event = {"choices": [{"index": 0, "delta": delta}]}
                        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                        if delta.get("waits"):
                            while not server.may_go_on.wait(0.02):
                                self.wfile.write(b": still here\n\n")
                    self.wfile.write(b"data: [DONE]\n\n")
                except OSError:
                    server.left.set()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.may_go_on.set()
    scripted.http.shutdown()
    scripted.http.server_close()


def messages(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_conversation_with_a_server_works(server, tmp_path):
    key = tmp_path / "key"
    key.write_text("# mine\nsk-of-the-test\n")
    server.script = [
        [
            {"reasoning_content": "Let me think."},
            {"content": "\n\nFour"},
            {"content": ", \x1b[2J."},
        ],
        [{"content": "One, two, "}, {"content": "three", "waits": True}, {"content": " never"}],
        [{"content": "Go on."}],
        "the context is \x1b]0;full\x07",
        [{"content": "A new beginning."}],
    ]
    arguments = ["--url", server.url, "--api-key-file", str(key), "--system", "Be short."]
    with Terminal("chat", *arguments, "--top-k", "3") as chat:
        greeting = chat.expect("Ctrl-D ends")
        assert "scripted␛[2J: /help" in greeting, "a name is a text of others, too"
        said = chat.say("What is 2+2?", "Four, ␛[2J.")
        assert f"{DIMMED}Let me think." in said

        chat.say("Count.", "three")
        chat.type(CTRL_C)
        chat.expect("(stopped)")
        assert server.left.wait(WAIT_S), "the server is told"

        chat.say('"""')
        chat.say("And", prompt="… ")
        chat.say("then?", prompt="… ")
        chat.say('"""', "Go on.", prompt="… ")
        chat.say("/system Be long.", "(system message set)")
        chat.say("More?", "forge-jax: error: HTTP 400: the context is ␛]0;full␇")
        chat.say("/reset", "(conversation cleared)")
        chat.say("A line \\")
        chat.say("and another", "A new beginning.", prompt="… ")
        chat.expect("> ")
        chat.interrupt("half a line", "(Ctrl-D or /quit ends the chat)")
        assert chat.end("/quit\n") == 0
        for driven in ("\x1b[2J", "\x1b]0;", "Traceback"):
            assert driven not in chat.shown
    first, second, third, fourth, fifth = server.bodies
    assert first["top_k"] == 3 and first["stream"] is True and first["model"] == "scripted\x1b[2J"
    assert set(server.keys) == {"Bearer sk-of-the-test"}
    asked = [("system", "Be short."), ("user", "What is 2+2?")]
    assert messages(first) == asked
    asked += [("assistant", "Four, \x1b[2J."), ("user", "Count.")]
    assert messages(second) == asked
    asked += [("assistant", "One, two, three"), ("user", "And\nthen?")]
    assert messages(third) == asked, "what came before Ctrl-C stays"
    asked += [("assistant", "Go on."), ("user", "More?")]
    assert messages(fourth) == [("system", "Be long."), *asked[1:]]
    assert messages(fifth) == [("system", "Be long."), ("user", "A line \nand another")]


def test_stopping_a_local_answer_continues_the_chat():
    with Terminal("chat", "x", "--fake", "--fake-step-time-ms", "20", "--seed", "1") as chat:
        chat.say("Tell me a story.", " ")
        chat.type(CTRL_C)
        chat.expect("(stopped)")
        chat.say("/reset", "(conversation cleared)")
        chat.say("Another.", " ")
        chat.type(CTRL_C)
        chat.expect("(stopped)")
        assert chat.end(CTRL_D) == 0


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*FORGE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, **options)


def test_piped_stdin_is_the_message_and_stdout_the_answer(server):
    server.script = [[{"reasoning_content": "Hm."}, {"content": "a\x1b[1mb\n"}, {"content": "c"}]]
    done = run("chat", "--url", server.url, input="Line one\nand two\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\x1b[1mb\nc\n", "")
    assert messages(server.bodies[0]) == [("user", "Line one\nand two\n")]
    assert server.keys == [None]
    silent = run("chat", "--url", server.url, input="\n")
    assert (silent.returncode, silent.stdout) == (1, "")
    assert silent.stderr == "forge-jax: error: stdin has no message: pipe text to it\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "no server responds at http://127.0.0.1:9"),
        (["--url", "127.0.0.1:9"], "--url must begin with http:// or https://"),
        (
            ["--url", "http://x", "--dtype", "float32", "--fake"],
            "--dtype, --fake can only be set for an engine in this",
        ),
        (["--api-key-file", "x"], "--api-key-file requires --url"),
        (["--url", "http://x", "--api-key-file", "nowhere"], "cannot read nowhere: No such file"),
    ],
)
def test_impossible_question_fails_with_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert cli.main(["chat", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("forge-jax: error: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_text_is_continued_as_by_the_server():
    same = [*SMALL, "--max-tokens", "12"]
    plain = run("generate", "forge-tiny", "-", *same, input="Once upon a time")
    assert plain.returncode == 0 and plain.stderr == ""
    whole = run("generate", "forge-tiny", "Once upon a time", *same, "--json")
    answer = json.loads(whole.stdout)
    assert answer["choices"][0]["text"] + "\n" == plain.stdout
    assert answer["usage"]["completion_tokens"] == 12 and answer["model"] == "forge-tiny"


def test_samples_are_printed_in_order_and_differ(capsys):
    def written(*more: str) -> str:
        asked = ["generate", "x", "Once", "--fake", "--n", "3", "--max-tokens", "5"]
        assert cli.main([*asked, *more]) == 0
        return capsys.readouterr().out

    samples = re.split(r"--- \d of 3 ---\n", written())
    assert samples[0] == "" and len(set(samples)) == 4
    assert written() != written(), "without a seed there is another text each time"
    assert written("--seed", "3") == written("--seed", "3")


SLOW = ["generate", "x", "Once", "--fake", "--fake-step-time-ms", "20", "--max-tokens", "3000"]


def test_text_is_printed_as_it_comes_and_ctrl_c_ends_it():
    with subprocess.Popen(
        [*FORGE, *SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(8)
        assert process.poll() is None, "there is more to come"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        assert process.stderr.read() == b"forge-jax: interrupted\n"


def test_closed_output_is_no_error():
    with subprocess.Popen(
        [*FORGE, *SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(8)
        process.stdout.close()
        assert process.wait(WAIT_S) == 141
        assert process.stderr.read() == b""


def test_control_sequences_in_a_text_are_escaped():
    everything = "".join(map(chr, [*range(0x0, 0x3000), *range(0xFE00, 0x10100)]))
    left = harmless(everything)
    control = {c for c in left if (ord(c) < 32 or 0x7F <= ord(c) < 0xA0)} - {"\n", "\t"}
    assert not control
    assert not set(left) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    assert harmless("a\tb\r\nc é 日本 🙂") == "a\tb\nc é 日本 🙂"
    assert one_line("two\nlines \x1b[31m") == "two lines ␛[31m"
    assert len(one_line("x" * 10_000)) < 2_000


class _Screen:
    """A terminal that keeps the written text."""

    def __init__(self, on_terminal: bool):
        self.written = ""
        self._on_terminal = on_terminal

    def isatty(self) -> bool:
        return self._on_terminal

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        pass


def test_only_terminals_are_protected():
    for on_terminal, expected in ((True, f"{DIMMED}␛[0m\x1b[0m"), (False, "\x1b[0m")):
        screen = _Screen(on_terminal)
        Answer(screen).write("\x1b[0m", dim=True)  # type: ignore[arg-type]
        assert screen.written == expected
