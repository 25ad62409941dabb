"""`forge-jax chat` in a separate terminal, and `chat` and `generate` in pipes."""

from __future__ import annotations

import codecs
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyte
import pytest

from forge_jax.errors import RequestError
from forge_serve.cli import main as cli
from forge_serve.cli.chat.conversation import Conversation
from forge_serve.cli.chat.markdown import markdown_blocks
from forge_serve.cli.chat.prompt import HISTORY_BYTES, open_history
from forge_serve.cli.commands.sampling import SamplingFlags
from forge_serve.cli.terminal import Answer, harmless, one_line

FORGE = [sys.executable, "-W", "error", "-m", "forge_serve.cli.main"]
SMALL = "--kernels xla --deterministic --max-num-seqs 1 --max-num-batched-tokens 32".split()
SMALL += ["--temperature", "0"]
WAIT_S = 60.0
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
LINES = 200
DIMMED = "\x1b[2m"


class Terminal:
    """A process on a pseudo-terminal, whose screen is emulated.

    The screen is so high that nothing scrolls off it. `raw` is everything that the process wrote.
    """

    def __init__(self, folder: Path, *arguments: str, columns: int = 60):
        self._master, slave = pty.openpty()
        size = struct.pack("4H", LINES, columns, 0, 0)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
        self._screen = pyte.Screen(columns, LINES)
        self._screen.write_process_input = self.type  # answers to questions about the cursor
        self._stream = pyte.Stream(self._screen)
        # pytest-xdist sets COLUMNS, which Rich prefers to the terminal's own width.
        sized = ("COLUMNS", "LINES")
        environment = {name: each for name, each in os.environ.items() if name not in sized}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *FORGE, *arguments],  # so that Ctrl-C becomes a signal
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env={**environment, "TERM": "xterm", "XDG_STATE_HOME": str(folder / "state")},
        )
        os.close(slave)
        self.raw = ""
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    @property
    def shown(self) -> str:
        """The screen, without spaces at the ends of lines and without empty lines at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    @property
    def end_of_file(self) -> str:
        """The character that the terminal turns into an end of file."""
        return termios.tcgetattr(self._master)[tty.CC][termios.VEOF].decode()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def paste(self, text: str) -> None:
        self.type(f"\x1b[200~{text}\x1b[201~")

    def say(self, text: str, answer: str) -> None:
        """Type a line at the prompt and wait for the answer below it."""
        self.prompt()
        above = len(self.shown) - 1
        self.type(text)
        self.expect(text)
        self.type("\r")
        self.expect(answer, below=f"> {text}", above=above)

    def prompt(self) -> None:
        """Wait for an empty prompt at the end."""
        self._wait(lambda: self.shown.endswith("\n>"), "prompt")

    def expect(self, text: str, *, below: str = "", above: int = 0) -> None:
        """Wait until the screen shows a text, after the last occurrence of another text.

        Args:
          above: the number of characters of the screen that are older than both texts. While a
            prompt is drawn again, its text is missing, and an older occurrence is the last.
        """

        def shows() -> bool:
            shown = self.shown[above:]
            _, found, after = shown.rpartition(below) if below else ("", "-", shown)
            return bool(found) and text in after

        self._wait(shows, text)

    def _wait(self, shows: Callable[[], bool], expected: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not shows():
            left_s = deadline - time.monotonic()
            ready = left_s > 0 and select.select([self._master], [], [], left_s)[0]
            assert ready, f"no {expected!r} on this screen:\n{self.shown}"
            assert not self._ended, f"it ended without {expected!r}:\n{self.shown}"
            self._read()

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the process has closed its end
            data = b""
        self._ended = not data
        text = self._decoder.decode(data)
        self.raw += text
        self._stream.feed(text)

    def end(self, text: str) -> int:
        self.prompt()
        self.type(text)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process has ended, and return its status."""
        self._wait(lambda: self._ended, "end")
        return self.process.wait(WAIT_S)


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
                    usage = {"choices": [], "usage": {"completion_tokens": len(deltas)}}
                    self.wfile.write(b"data: " + json.dumps(usage).encode() + b"\n\n")
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
    with Terminal(tmp_path, "chat", *arguments, "--top-k", "3") as chat:
        chat.expect("scripted␛[2J: /help lists the commands, Ctrl-D ends the chat")
        chat.say("What is 2+2?", "Let me think.\n\nFour, ␛[2J.\n(3 tokens, first token after ")
        assert f"{DIMMED}Let me think." in chat.raw

        chat.say("Count.", "One, two, three")
        chat.type(CTRL_C)
        chat.expect("One, two, three\n(stopped)")
        assert server.left.wait(WAIT_S), "the server is told"

        chat.prompt()
        chat.type('"""And\rthen?"""\r')
        chat.expect('> """And\n… then?"""\nGo on.')
        chat.say("/system Be long.", "(system message set)")
        chat.say("More?", "forge-jax: error: HTTP 400: the context is ␛]0;full␇")
        chat.say("/clear", "(conversation cleared)")
        chat.prompt()
        chat.type("A line \\\rand another\r")
        chat.expect("> A line\n… and another\nA new beginning.")
        chat.prompt()
        chat.type("half a line" + CTRL_C)
        chat.expect("half a line\n(Ctrl-D or /exit ends the chat)")
        assert chat.end("/exit\r") == 0
        for driven in ("\x1b[2J", "\x1b]0;", "Traceback"):
            assert driven not in chat.raw
    first, second, third, fourth, fifth = server.bodies
    assert first["top_k"] == 3 and first["stream"] is True and first["model"] == "scripted\x1b[2J"
    assert set(server.keys) == {"Bearer sk-of-the-test"}
    asked = [("system", "Be short."), ("user", "What is 2+2?")]
    assert messages(first) == asked
    asked += [("assistant", "\n\nFour, \x1b[2J."), ("user", "Count.")]
    assert messages(second) == asked
    asked += [("assistant", "One, two, three"), ("user", "And\nthen?")]
    assert messages(third) == asked, "what came before Ctrl-C stays"
    asked += [("assistant", "Go on."), ("user", "More?")]
    assert messages(fourth) == [("system", "Be long."), *asked[1:]]
    assert messages(fifth) == [("system", "Be long."), ("user", "A line \nand another")]


def test_pasted_lines_are_one_message(server, tmp_path):
    server.script = [[{"content": "Three lines."}], [{"content": "Again."}]]
    with Terminal(tmp_path, "chat", "--url", server.url) as chat:
        chat.prompt()
        chat.paste("one\r\n  two\n\nthree")
        chat.expect("> one\n…   two\n…\n… three")
        assert not server.bodies, "a paste is not sent before Enter"
        chat.type("\r")
        chat.expect("Three lines.")
        assert chat.end(CTRL_D) == 0
    history = tmp_path / "state" / "forge-jax" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700
    with Terminal(tmp_path, "chat", "--url", server.url, "--no-history") as chat:
        chat.prompt()
        chat.type(UP)
        chat.say("not kept", "Again.")
        assert chat.end(CTRL_D) == 0
    assert [messages(body) for body in server.bodies] == [
        [("user", "one\n  two\n\nthree")],
        [("user", "not kept")],
    ]
    assert "not kept" not in history.read_text()
    with Terminal(tmp_path, "chat", "--url", server.url) as chat:
        chat.prompt()
        chat.type(UP)
        chat.expect("> one\n…   two\n…\n… three")


MARKDOWN = """\
# Sums

The **quick** brown fox <b>jumps</b> over the &#x202e; lazy [dog](http://d.example).
A second line
with `code`.

| a | b |
|---|---|
| 1 | 2 |

```python
x = 1 * 2
```

1. first
2. second
"""
RENDERED = """\
Sums

The quick brown fox <b>jumps</b> over
the \ufffd lazy dog (http://d.example).
A second line
with code.

 a  b
 ────
 1  2

x = 1 * 2

 1 first
 2 second
(33 tokens, """


def test_markdown_is_rendered_while_it_is_streamed(server, tmp_path):
    pieces = [{"content": MARKDOWN[i : i + 6]} for i in range(0, len(MARKDOWN), 6)]
    half = next(i for i, piece in enumerate(pieces) if "code`." in MARKDOWN[: 6 * (i + 1)])
    server.script = [[*pieces[:half], {**pieces[half], "waits": True}, *pieces[half + 1 :]]]
    with Terminal(tmp_path, "chat", "--url", server.url, columns=38) as chat:
        chat.say("Show me.", RENDERED[: RENDERED.index("code.")])
        assert server.left.is_set() is False and " tokens, " not in chat.shown
        server.may_go_on.set()
        chat.expect("> Show me.\n" + RENDERED)
        chat.expect(" tokens/s, first token", below=RENDERED)
        chat.say("/set markdown off", "(markdown is off)")
        server.script = [[{"content": "**bold** words are not broken at the right edge"}]]
        chat.say("Again.", "**bold** words are not broken at the\nright edge\n(1 token, ")


def test_commands_change_save_and_load_a_conversation(server, tmp_path):
    server.script = [[{"content": text}] for text in ("First.", "Second.", "Third.", "Fourth.")]
    with Terminal(tmp_path, "chat", "--url", server.url, "--seed", "1", columns=100) as chat:
        chat.say("/regen", "there is no message to answer: send one first")
        chat.say("/set temprature 0", "unknown setting 'temprature'; did you mean temperature?")
        chat.say("/set temperature warm", "temperature must be a number or \"auto\", not 'warm'")
        chat.say("/set temperature 0.5", "(temperature is 0.5)")
        chat.say("/set seed auto", "(seed is auto)")
        chat.say("/set", "temperature         0.5")
        chat.say("//etc is a folder", "First.")
        chat.say("/regen", "Second.")
        chat.say("/system Be short.", "(system message set)")
        chat.say("/save a.json", "(saved in a.json)")
        chat.say("/save state", "state exists and is not a saved conversation: choose another name")
        chat.say("/clear", "(conversation cleared)")
        chat.say("/load b.json", "cannot read b.json: No such file or directory")
        chat.say("Hello", "Third.")
        chat.say("/load a.json", "(2 messages loaded from a.json)")
        chat.say(
            "/dance", "unknown command /dance (see: /help; to send it as a message, type //dance)"
        )
        chat.say("More", "Fourth.")
        chat.prompt()
        chat.type("/he\t\r")
        chat.expect("Alt-Enter")
        assert chat.end(CTRL_D) == 0
    question = ("user", "/etc is a folder")
    begun = [("system", "Be short."), question, ("assistant", "Second.")]
    assert [messages(body) for body in server.bodies] == [
        [question],
        [question],
        [("system", "Be short."), ("user", "Hello")],
        [*begun, ("user", "More")],
    ]
    assert all("seed" not in body and body["temperature"] == 0.5 for body in server.bodies)
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved.pop("model") == "scripted\x1b[2J" and messages(saved) == begun
    assert {**saved, "messages": []} == {"messages": [], "temperature": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must have a JSON object, not list"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "messages must be a list of objects"),
        ('{"messages": [], "top_k": "3"}', "top_k must be a whole number"),
        ('{"messages": [], "tools": []}', "unknown setting 'tools'"),
    ],
)
def test_loading_an_invalid_conversation_changes_nothing(text, message, tmp_path):
    file = tmp_path / "chat.json"
    file.write_text(text)
    conversation = Conversation(None, SamplingFlags(top_k=2), "Be short.")  # type: ignore[arg-type]
    conversation.messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match=re.escape(message)):
        conversation.load(file)
    with pytest.raises(RequestError, match="is not a saved conversation"):
        conversation.save(file)
    assert file.read_text() == text
    assert conversation.settings.top_k == 2 and conversation.system == "Be short."
    assert conversation.messages == [{"role": "user", "content": "Hi"}]


def test_streamed_markdown_has_the_blocks_of_the_whole_text():
    text = (
        MARKDOWN
        + "\n> a quote\n> of two lines\n\n- a\n\n  more of a\n- b\n\n---\n\nSetext\n===\nThe end."
    )
    whole, rest = markdown_blocks(text)
    assert len(whole) == 9 and rest == "The end."
    printed, tail = [], ""
    for character in text:
        blocks, tail = markdown_blocks(tail + character)
        printed += blocks
    assert ([block.strip("\n") for block in printed], tail) == (whole, rest)


def test_old_history_is_cut_between_messages(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    open_history()
    file = tmp_path / "forge-jax" / "chat_history"
    entries = "".join(f"\n# 2026-01-01 00:00:00\n+message {i}\n+end\n" for i in range(40_000))
    file.write_text(entries)
    kept = list(open_history().load_history_strings())
    assert file.stat().st_size <= HISTORY_BYTES // 2
    assert len(kept) > 1000
    assert kept == [f"message {39_999 - i}\nend" for i in range(len(kept))]


def test_stopping_a_local_answer_continues_the_chat(tmp_path):
    fake = ["x", "--fake", "--fake-step-time-ms", "20", "--seed", "1"]
    with Terminal(tmp_path, "chat", *fake) as chat:
        for message in ("Tell me a story.", "Another."):
            chat.prompt()
            chat.type(message + "\r")
            chat.expect("the ", below=message)
            chat.type(CTRL_C)
            chat.expect("(stopped)", below=message)
            chat.say("/clear", "(conversation cleared)")
        assert chat.end(CTRL_D) == 0


def test_ctrl_d_during_an_answer_ends_the_chat(tmp_path):
    fake = ["x", "--fake", "--fake-step-time-ms", "20", "--seed", "1", "--max-tokens", "40"]
    with Terminal(tmp_path, "chat", *fake) as chat:
        chat.prompt()
        chat.type("Tell me a story.\r")
        chat.expect("window", below="story.")
        chat.type(CTRL_D)
        chat.expect("(40 tokens", below="story.")
        assert chat.wait() == 0
        assert chat.end_of_file == CTRL_D


@pytest.mark.slow
def test_documented_conversation_with_the_bundled_model_works(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    [transcript] = re.findall(r"```text\n(forge-tiny: .*?)```", page, re.DOTALL)
    greeting, *turns = transcript.split("\n> ")
    assert len(turns) == 5
    with Terminal(tmp_path, "chat", *SMALL, columns=88) as chat:
        chat.expect(greeting)
        for turn in turns:
            message, _, answer = turn.partition("\n")
            chat.say(message, re.sub(r"[\d,]+ tokens/s.*|\d\.\d+ s.*", "", answer).rstrip())
        assert chat.end(CTRL_D) == 0
        assert "Traceback" not in chat.shown


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
