"""Pages that show the output of an example show what it prints."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
from documents import ROOT, blocks

PAGES = ("docs/paged-kv.md", "docs/continuous-batching.md", "docs/tokenizers.md")


@pytest.mark.parametrize("page", PAGES)
def test_example_prints_the_output_shown_after_it(page):
    ((code, output),) = [
        (first.text, second.text)
        for first, second in pairwise(blocks(page))
        if (first.language, second.language) == ("python", "text")
    ]
    paths = [str(ROOT), *(str(ROOT / part) for part in ("kernels", "serve"))]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines()] == output.splitlines()
