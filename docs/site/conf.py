"""Builds the documents into a site: `make site`. They are written to be read on GitHub as well.

Source is the repository's root, so that links between README, docs and benchmarks are what they are
there. The front page is README; the order of the others stands here, for nothing of it is in them.
"""

from pathlib import Path

from sphinx.application import Sphinx

CONTENTS = {
    "Start": ["quickstart", "recipes", "cli", "faq", "troubleshooting"],
    "Serve": [
        "configuration",
        "http",
        "page",
        "operations",
        "tuning",
        "reliability",
        "security",
        "threat-model",
    ],
    "Use": [
        "python",
        "batch",
        "evaluation",
        "speculation",
        "lora",
        "kv-cache",
        "parallel",
        "profiling",
    ],
    "Models": ["models", "model-files", "adding-a-model"],
    "Understand": ["architecture", "decisions", "testing", "benchmarks", "comparisons"],
    "Project": ["roadmap", "stability", "dependencies", "log"],
}
BESIDE = [
    "benchmarks/README",
    "training/forge_tiny/README",
    "CONTRIBUTING",
    "SECURITY",
    "CHANGELOG",
]

project = "forge-jax"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "docs/*.md", *(f"{page}.md" for page in BESIDE)]
html_theme = "furo"
html_title = "forge-jax"
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "misc.highlighting_failure"]


def _contents(captions: dict[str, list[str]]) -> str:
    parts = []
    for caption, pages in captions.items():
        lines = "\n".join(f"/{page}" for page in pages)
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n")
    return "\n" + "\n".join(parts)


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        folders = {caption: [f"docs/{page}" for page in CONTENTS[caption]] for caption in CONTENTS}
        folders["Project"] += BESIDE
        source[0] += _contents(folders)


def _front_page(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        out = Path(app.outdir)
        (out / "index.html").write_text((out / "README.html").read_text())


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _front_page)
