"""The documents: their commands run as shown, and their links resolve."""

import contextlib
import io
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from documents import (
    ROOT,
    RUN,
    Block,
    blocks,
    blocks_of,
    commands,
    hidden_commands,
    pages,
)

pytestmark = [pytest.mark.long, pytest.mark.quick_compile]

ADDRESS = "127.0.0.1:8000"  # address in the documents
NAMES = {"SMALLER_MODEL": "forge-tiny", "MODEL": "forge-tiny"}
PATHS = [ROOT, *(ROOT / part for part in ("kernels", "serve", "tests", "tests/docs"))]
SMALL_ENGINES = ROOT / "tests/docs/small_engines"
DEFAULT_SIZES = ("README.md",)  # pages whose engines have the sizes that users get

# Only these tests use this cache. A cache holds the saved executables of 16 engines, so engines of
# other tests would evict these. An executable that JAX's own cache returns is not saved.
CACHE = ROOT / ".cache/tests/docs"


class Reader:
    """A reader who follows a page in a new folder.

    Args:
      folder: where commands run.
      shared: runs the servers of `server` notes for all pages; None: this reader runs them.
    """

    def __init__(self, folder: Path, shared: "SharedServers | None" = None):
        self.folder = folder
        self.shared = shared
        self.server: subprocess.Popen[bytes] | None = None
        self.serves = ""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.own_port = self.port = probe.getsockname()[1]
        self.env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, [SMALL_ENGINES, *PATHS])),
            "JAX_COMPILATION_CACHE_DIR": str(CACHE),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def use_default_sizes(self) -> None:
        self.env["PYTHONPATH"] = os.pathsep.join(map(str, PATHS))
        self.shared = None

    def read(self, block: Block) -> None:
        for command in commands(block.notes.get("before", "")):
            self.run(command)
        if serve := block.notes.get("server"):
            self.use_server(serve)
        if block.language == "python":
            script = self.folder / f"line-{block.line}.py"
            script.write_text(self._here(block.text))
            self.run(f"python -W error {script.name}", says=True)
            return
        for command in commands(block.text):
            if " serve" in command and _program(command) == "forge-jax":
                self.serve(command)
            else:
                self.run(command)

    def run(self, command: str, *, says: bool = False) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._here(command)],
            cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip() or not says, f"{command} printed nothing"
        if "curl" in command:
            assert '"error":{' not in done.stdout, f"{command}\n{done.stdout}"

    def use_server(self, command: str) -> None:
        """Send the next requests to a server of `command`, started before if possible."""
        if self.shared is None or command == self.serves:
            self.serve(command)
        else:
            self.stop()
            self.port = self.shared.port_of(command)

    def serve(self, command: str) -> None:
        if command == self.serves:
            return
        self.stop()
        self.serves = command
        words = shlex.split(self._here(command), comments=True)
        while "=" in words[0]:  # XLA_FLAGS=... before the command
            name, _, value = words.pop(0).partition("=")
            words = ["env", f"{name}={value}", *words]
        log = self.folder / "server.log"
        with log.open("wb") as out:
            self.server = subprocess.Popen(
                [*words, "--port", str(self.port)],
                cwd=self.folder, env=self.env, stdout=out, stderr=out,
            )  # fmt: skip
        deadline = time.monotonic() + 200
        while not self._answers():
            assert self.server.poll() is None, f"{command}\n{log.read_text()}"
            assert time.monotonic() < deadline, f"{command} does not serve\n{log.read_text()}"
            time.sleep(0.05)

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            self.server.send_signal(signal.SIGTERM)  # at once, because nothing is running
            assert self.server.wait(60) == 0, (self.folder / "server.log").read_text()
        self.server, self.serves, self.port = None, "", self.own_port

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False

    def _here(self, text: str) -> str:
        for name, value in NAMES.items():
            text = re.sub(rf"\b{name}\b", value, text)
        return text.replace(ADDRESS, f"127.0.0.1:{self.port}").replace(".venv/bin/", "")


class SharedServers:
    """Servers that the pages' `server` notes share, each with its own reader."""

    def __init__(self, factory: pytest.TempPathFactory):
        self._factory = factory
        self._readers: dict[str, Reader] = {}

    def port_of(self, command: str) -> int:
        """Return the port of a running server, starting it at the first call."""
        if command not in self._readers:
            self._readers[command] = Reader(self._factory.mktemp("server"))
            self._readers[command].serve(command)
        reader = self._readers[command]
        assert reader.server is not None
        log = reader.folder / "server.log"
        assert reader.server.poll() is None, f"{command} has ended\n{log.read_text()}"
        return reader.port

    def stop(self) -> None:
        for reader in self._readers.values():
            reader.stop()


@pytest.fixture(scope="module")
def shared_servers(tmp_path_factory):
    servers = SharedServers(tmp_path_factory)
    yield servers
    servers.stop()


@pytest.fixture
def reader(tmp_path, shared_servers):
    CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
    reader = Reader(tmp_path, shared_servers)
    yield reader
    reader.stop()


def _program(command: str) -> str:
    words = [word for word in command.split() if "=" not in word or word.startswith("-")]
    return Path(words[0]).name if words else ""


def _runs(block: Block) -> bool:
    return block.language in RUN and not {"not run", "from"} & block.notes.keys()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages() if any(map(_runs, blocks(page)))])
def test_commands_on_a_page_run(page, reader):
    if page in DEFAULT_SIZES:
        reader.use_default_sizes()
    for block in filter(_runs, blocks(page)):
        reader.read(block)


@pytest.mark.parametrize("page", pages())
def test_every_command_on_a_page_is_covered(page):
    assert hidden_commands((ROOT / page).read_text()) == [], "put it into a block of bash"
    for block in blocks(page):
        assert block.language, f"line {block.line}: say the block's language, or text"
        assert block.notes.get("not run", "a reason"), "say why it is not run"
        if source := block.notes.get("from"):
            assert block.text.strip() in (ROOT / source).read_text(), f"{source} has it otherwise"


def printed_by(module: str, *arguments: str) -> str:
    """Return the output of `python -m module`, which must end the process with status 0.

    It runs here, because a process per program would spend its time on imports.
    """
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", [module, *arguments]),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(action="ignore", category=RuntimeWarning),  # imported by a test
        pytest.raises(SystemExit) as end,
    ):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert end.value.code in (0, None), f"{module} {arguments}: status {end.value.code}"
    return printed.getvalue()


@pytest.fixture(scope="module")
def helps():
    known: dict[str, str] = {}

    def help_of(program: str) -> str:
        if program not in known:
            every = "--help=all" if program.startswith("forge_serve") else "--help"
            known[program] = printed_by(*program.split(), every)
        return known[program]

    return help_of


@pytest.mark.parametrize("page", pages())
@pytest.mark.slow
def test_flags_in_unexecuted_commands_exist(page, helps):
    for block in blocks(page):
        if block.language != "bash" or "not run" not in block.notes:
            continue
        for command in commands(block.text):
            if found := re.search(r"forge-jax ([a-z]+)", command):
                program = f"forge_serve {found[1]}"
            elif found := re.search(r"python -m ((?:benchmarks|training)[\w.]*)", command):
                program = found[1]
            else:
                continue
            for flag in re.findall(r"(?<=\s)--[a-z][a-z-]*", command.split("#")[0]):
                assert flag in helps(program), f"{program} has no {flag}"


def test_links_resolve():
    for page in pages():
        for target in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
            if target.startswith("http"):
                continue
            file, _, anchor = target.partition("#")
            linked = (ROOT / page).parent / file if file else ROOT / page
            assert linked.exists(), f"{page} links to {target}"
            if anchor and linked.suffix == ".md":
                assert anchor in anchors(linked.read_text()), f"{page} links to {target}"


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.*)$", without_code, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", shown).strip().replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def test_anchors_follow_headings():
    text = "# A `b`: [c](d.md)\n## Same\n```\n# no\n```\n### Same\n"
    assert anchors(text) == {"a-b-c", "same", "same-1"}


# Planted errors.


def test_unknown_flag_is_an_error(helps):
    assert "--max-num-seqs" in helps("forge_serve serve")
    with pytest.raises(AssertionError, match="status 2"):
        printed_by("forge_serve", "serve", "--no-such-flag")


def test_processes_have_small_engines(reader):
    command = "python -c 'from forge_jax import EngineConfig; print(EngineConfig().batch)'"
    reader.run(f"{command} | grep max_num_seqs=4,", says=True)
    reader.use_default_sizes()
    reader.run(f"{command} | grep max_num_seqs=256,", says=True)


def test_failing_command_fails_the_page(reader):
    with pytest.raises(AssertionError, match="no-such-thing"):
        reader.read(Block("bash", "ls no-such-thing", 1))


def test_refused_request_fails_the_page(reader):
    serve = {"server": "forge-jax serve --fake"}
    body = '{"prompt": "a", "max_tokens": "many"}'
    with pytest.raises(AssertionError, match="max_tokens"):
        reader.read(Block("bash", f"curl -s http://{ADDRESS}/v1/completions -d '{body}'", 1, serve))


def test_commands_include_their_continuation_lines():
    found = ["one \\\n  --two", "cat > f <<'END'\na\nEND", "curl -d '{\n}'", "three"]
    assert commands("\n\n".join(found)) == found


def test_indented_command_is_found():
    assert hidden_commands("text\n\n    forge-jax serve\n") == ["forge-jax serve"]
    assert hidden_commands("text\n\n    some: example\n\n```bash\n\n    make it\n```\n") == []


def test_comment_without_a_block_is_an_error():
    with pytest.raises(ValueError, match="no block follows"):
        list(blocks_of("<!-- not run: why -->\ntext\n"))
