"""Sphinx configuration of the documentation site: `make site`.

The source is the repository's root, so that links between README, docs and benchmarks work on
GitHub and in the site. The front page is README. `CONTENTS` groups the pages by role, because the
pages themselves have no order.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

# Pages of docs/, or from the repository's root with a leading slash.
CONTENTS = {
    "Start": ["quickstart", "recipes", "features", "faq", "troubleshooting"],
    "Operate": [
        "cli",
        "configuration",
        "http",
        "responses",
        "messages",
        "page",
        "monitoring",
        "operations",
        "scaling",
        "tuning",
        "gpu",
        "reliability",
        "security",
        "threat-model",
    ],
    "Research": [
        "python",
        "interpretability",
        "rollouts",
        "site/api",
        "engine",
        "continuous-batching",
        "paged-kv",
        "tokenizers",
        "kv-cache",
        "speculation",
        "lora",
        "parallel",
    ],
    "Profile": ["profiling", "benchmarks", "/benchmarks/README", "comparisons"],
    "Evaluate": ["evaluation", "batch", "models", "model-files"],
    "Extend": [
        "architecture",
        "adding-a-model",
        "decisions",
        "testing",
        "/training/forge_tiny/README",
        "/CONTRIBUTING",
    ],
    "Project": ["roadmap", "stability", "dependencies", "log", "/SECURITY", "/CHANGELOG"],
}

# README shows these with HTML, so Sphinx does not copy them.
PICTURES = ("docs/page-light.png", "docs/page-dark.png")

project = "forge-jax"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
html_theme = "furo"
html_title = "forge-jax"
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

# The API reference, docs/site/api.rst. Docstrings have single backticks around code.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # members list the attributes of data classes too
# Annotations name types of jax, numpy and private modules, which have no page here.
nitpick_ignore_regex = [("py:.*", ".*")]


def _source(page: str) -> str:
    return page[1:] if page.startswith("/") else f"docs/{page}"


SOURCES = {caption: [_source(page) for page in pages] for caption, pages in CONTENTS.items()}
include_patterns = ["README.md", "docs/*.md", "docs/site/api.rst"]
include_patterns += [
    f"{page}.md" for pages in SOURCES.values() for page in pages if not page.startswith("docs/")
]


def _contents() -> str:
    parts = []
    for caption, pages in SOURCES.items():
        lines = "\n".join(f"/{page}" for page in pages)
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n")
    return "\n" + "\n".join(parts)


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += _contents()


def _front_page(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        out = Path(app.outdir)
        (out / "index.html").write_text((out / "README.html").read_text())
        for picture in PICTURES:
            shutil.copy(Path(app.srcdir) / picture, out / picture)


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _front_page)
