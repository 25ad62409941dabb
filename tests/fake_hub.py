"""A local server with the part of the Hugging Face Hub's API that downloads use."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


@dataclass
class Repository:
    """The files of a model. `gated` refuses them; `cut` ends a file's transfer in the middle."""

    files: dict[str, bytes]
    gated: bool = False
    cut: set[str] = field(default_factory=set)


class FakeHub:
    """The repositories by id, and the server's URL."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.url = ""


@contextmanager
def serving() -> Iterator[FakeHub]:
    """Serve an empty hub on a free port of the loopback interface."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/.+", path):
                return self.listing(found[1], found[2])
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                return self.file(found[1], found[2])
            return self.refuse(404, "RepoNotFound")

        def listing(self, id: str, kind: str) -> None:
            repository = hub.repositories.get(id)
            if repository is None:
                return self.refuse(404, "RepoNotFound")
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": COMMIT}
                for name, data in repository.files.items()
            ]
            siblings = [{"rfilename": name} for name in repository.files]
            info = {"id": id, "sha": COMMIT, "siblings": siblings}
            return self.answer(json.dumps(tree if kind == "tree" else info).encode())

        def file(self, id: str, name: str) -> None:
            repository = hub.repositories.get(id)
            if repository is None:
                return self.refuse(404, "RepoNotFound")
            if repository.gated:
                return self.refuse(401, "GatedRepo")
            if name not in repository.files:
                return self.refuse(404, "EntryNotFound")
            return self.answer(repository.files[name], cut=name in repository.cut)

        def answer(self, data: bytes, *, cut: bool = False) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data[: len(data) // 2] if cut else data)
                self.close_connection = cut

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
