"""The navigation of the site and its API reference are complete."""

import re

from documents import ROOT, pages

import forge_jax

CONF = (ROOT / "docs" / "site" / "conf.py").read_text()


def test_the_api_reference_lists_exactly_the_public_names():
    entries = re.findall(r"^\.\. auto\w+:: (\w+)$", (ROOT / "docs/site/api.rst").read_text(), re.M)
    assert sorted(entries) == sorted(set(forge_jax.__all__) - {"__version__"})


def test_every_page_is_in_the_navigation():
    contents = CONF[CONF.index("CONTENTS = {") : CONF.index("project = ")]
    listed = re.findall(r'"(/?[\w/-]+)"(?!:)', contents)
    sources = [name[1:] if name.startswith("/") else f"docs/{name}" for name in listed]
    outside = {"README.md", "deploy/README.md", "examples/README.md"}
    assert {f"{source}.md" for source in sources if source != "docs/site/api"} == (
        set(pages()) - outside
    )
