"""The static files of the web page, by URL path. They contain no data of the server."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache, cached_property
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "server" / "static"
TYPES = {  # other files, such as licenses of libraries, are not served
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


def _paths() -> dict[str, Path]:
    files = sorted(file for file in FOLDER.rglob("*") if file.suffix in TYPES)
    paths = {f"/static/{file.relative_to(FOLDER).as_posix()}": file for file in files}
    return {"/": paths.pop("/static/index.html"), **paths}


FILES = _paths()
PAGE_PATHS = frozenset(FILES)


class PageFile:
    """Content of one file, read once per process."""

    def __init__(self, file: Path):
        self.content = file.read_bytes()
        self.content_type = TYPES[file.suffix]
        self.is_text = file.suffix != ".woff2"
        self.etag = hashlib.sha256(self.content).hexdigest()[:32]

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, mtime=0)


@cache
def page_file(path: str) -> PageFile:
    """Return the file at a path of `PAGE_PATHS`."""
    return PageFile(FILES[path])
