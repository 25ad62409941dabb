"""Copy the page's JavaScript libraries from npm into the package: `make page-libraries`.

`package.json` pins the versions, and `files.json` has the version and the SHA-256 of each copied
file. If a pinned version yields different content, the script stops and changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
VENDOR = HERE.parent / "forge_serve" / "server" / "static" / "vendor"
PINS = HERE / "package.json"
FILES = HERE / "files.json"

# Copied path: package, and path in the package.
SOURCES = {
    "marked/marked.js": ("marked", "lib/marked.esm.js"),
    "marked/LICENSE": ("marked", "LICENSE"),
    "highlight/highlight.js": ("@highlightjs/cdn-assets", "es/highlight.min.js"),
    "highlight/LICENSE": ("@highlightjs/cdn-assets", "LICENSE"),
    "katex/katex.js": ("katex", "dist/katex.min.js"),
    "katex/katex.css": ("katex", "dist/katex.min.css"),
    "katex/LICENSE": ("katex", "LICENSE"),
}
FONTS = ("katex", "dist/fonts", "*.woff2")
OTHER_FONT_FORMATS = rb',url\([^)]*\) format\("(?:woff|truetype)"\)'
SOURCE_MAP = rb"\n//# sourceMappingURL=\S+"


def main() -> int:
    pins = json.loads(PINS.read_text())["dependencies"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "package.json").write_text(PINS.read_text())
        command = "npm install --silent --no-package-lock --no-audit --no-fund --ignore-scripts"
        subprocess.run(command.split(), cwd=folder, check=True)
        contents = read(Path(folder) / "node_modules")
    found = {
        name: {"version": pins[package], "sha256": hashlib.sha256(content).hexdigest()}
        for name, (package, content) in sorted(contents.items())
    }
    known = json.loads(FILES.read_text()) if FILES.exists() else {}
    changed = [
        name
        for name, entry in found.items()
        if name in known and entry["version"] == known[name]["version"] and entry != known[name]
    ]
    if changed:
        print(
            f"ERROR: npm returned other content for a pinned version: {', '.join(changed)}. "
            f"Compare it with the committed files. If the change is intended, delete {FILES}.",
            file=sys.stderr,
        )
        return 1
    for old in known.keys() - found.keys():
        (VENDOR / old).unlink(missing_ok=True)
    for name, (_, content) in contents.items():
        file = VENDOR / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    FILES.write_text(json.dumps(found, indent=2) + "\n")
    print(f"{VENDOR}: {len(found)} files")
    return 0


def read(modules: Path) -> dict[str, tuple[str, bytes]]:
    """Return the package and the content of each file. The CSS keeps only the WOFF2 fonts."""
    sources = dict(SOURCES)
    package, fonts, pattern = FONTS
    for file in (modules / package / fonts).glob(pattern):
        sources[f"katex/fonts/{file.name}"] = (package, f"{fonts}/{file.name}")
    contents = {}
    for name, (package, path) in sources.items():
        content = (modules / package / path).read_bytes()
        if name.endswith(".css"):
            content = re.sub(OTHER_FONT_FORMATS, b"", content)
        if name.endswith(".js"):
            content = re.sub(SOURCE_MAP, b"", content)
        contents[name] = (package, content)
    return contents


if __name__ == "__main__":
    sys.exit(main())
