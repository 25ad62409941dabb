"""TypeScript clients: Anthropic's, OpenAI's and the Vercel AI SDK, in the files of `node/`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "node"


@pytest.mark.parametrize("client", ["anthropic", "openai", "ai_sdk"])
def test_typescript_client_tests_pass(server, client):
    ran = subprocess.run(
        ["node", "--test", "--test-reporter=tap", f"{client}.test.mjs"],
        cwd=FOLDER,
        env={**os.environ, "FORGE_URL": server.url, "FORGE_MODEL": server.model},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "# fail 0" in ran.stdout and "# pass 0" not in ran.stdout


def test_every_typescript_test_file_runs():
    files = {path.name.removesuffix(".test.mjs") for path in FOLDER.glob("*.test.mjs")}
    assert files == {"anthropic", "openai", "ai_sdk"}
