"""Engines that die at any moment in real servers, without changing a byte of the answers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.serve.chaos import chaos
from tests.server_process import ROOT, running

SERVE = "import sys; from forge_serve.cli.main import main; sys.exit(main())"
FAKE = ("--fake", "--fake-step-time-ms", "2")
# Timeouts of frozen engines, long enough for imports on a busy machine.
PATIENCE = ("--engine-timeout", "8", "--stall-timeout", "1")
MORE_PATIENCE = ("--engine-timeout", "15", "--stall-timeout", "1")
# A batch-invariant bundled model, with one executable for every step.
MODEL = (
    *("forge-tiny", "--deterministic", "--max-model-len", "512"),
    *("--num-blocks", "1024", "--max-num-seqs", "64"),
    *("--chat-template", str(ROOT / "tests" / "clients" / "tools.jinja")),
)


@contextmanager
def serving(*flags: str, code: str = SERVE) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server with an engine process; yield its URL and the process."""
    command = [sys.executable, "-c", code, "serve", *flags]
    command += ["--engine-process", "--port", "0", "--no-request-log"]
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = re.search(r" at (http://\S+);", process.stdout.readline())
        assert found, "the server did not start"
        yield found[1], process


async def test_streams_survive_a_few_deaths(chaos_seed):
    plan = ["decode", "prefill", "birth"]
    with serving(*FAKE) as (url, process):
        report = await chaos(url, process, seed=chaos_seed, plan=plan, max_tokens=30)
    assert not report.faults, report
    assert report.deaths.total() >= len(plan) and report.polls["recovering"], report


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_streams_survive_many_deaths(chaos_seed):
    plan = ["decode"] * 8 + ["prefill"] * 4 + ["birth"] * 6 + ["loading"] * 2
    plan += ["frozen", "frozen birth"]
    with serving(*FAKE, *PATIENCE) as (url, process):
        report = await chaos(url, process, seed=chaos_seed, plan=plan)
    assert not report.faults, report
    assert report.deaths.total() >= len(plan) and report.polls["stalled"], report


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_model_streams_survive_deaths(chaos_seed, tmp_path: Path):
    """Includes processes that die while they load, or while they compile for an empty cache."""
    plan = ["decode"] * 4 + ["prefill", "birth", "loading", "compiling", "compiling", "frozen"]
    cache = tmp_path / "compiled"
    cache.mkdir(mode=0o700)
    with serving(*MODEL, *MORE_PATIENCE, "--compile-cache", str(cache)) as (url, process):
        report = await chaos(
            url,
            process,
            seed=chaos_seed,
            plan=plan,
            max_tokens=40,
            cache=cache,
            loading_s=2.5,
            tools=True,
        )
    assert not report.faults, report
    assert report.deaths.total() >= len(plan) and report.deaths["compiling"] == 2, report
    assert report.polls["stalled"], report


LOSES_A_TOKEN = f"""
from forge_jax.engine.process.journal import Entry

take = Entry.take

def take_and_lose(self, deltas):
    take(self, deltas)
    for tokens in self.outputs.values():
        if len(tokens) == 11:
            tokens.pop()

Entry.take = take_and_lose
{SERVE}
"""
SAYS_IT_IS_WELL = f"""
import dataclasses
from forge_jax.engine.process import client

stats = client.EngineProcess.stats
client.EngineProcess.stats = lambda self: dataclasses.replace(stats(self), state="ready")
{SERVE}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "found"),
    [(LOSES_A_TOKEN, "differs"), (SAYS_IT_IS_WELL, "never: recovering")],
    ids=["journal", "health"],
)
async def test_chaos_check_detects_planted_faults(code, found, chaos_seed, monkeypatch):
    monkeypatch.setattr("tests.serve.chaos.WAIT_S", 10.0)
    with serving(*FAKE, code=code) as (url, process):
        try:
            report = await chaos(url, process, seed=chaos_seed, plan=["decode"] * 3, max_tokens=60)
            faults = str(report.faults)
        except* AssertionError as group:
            faults = str(group.exceptions)
    assert found in faults
