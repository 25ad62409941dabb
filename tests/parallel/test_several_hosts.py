"""Servers on two hosts: two groups of processes of this machine, which share one model.

The expected bytes are those of one process with two devices.
"""

import asyncio
import signal
import socket
import subprocess
import sys

import aiohttp
import psutil
import pytest

from tests.server_process import running, serving

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = (
    *("forge-tiny", "--backend", "cpu", "--kernels", "xla", "--dtype", "float32"),
    *("--tensor-parallel", "2", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
    *("--num-blocks", "128", "--deterministic", "--speculation", "ngram"),
)
PROMPTS = ("Once upon a time", "The dog", "2 + 2 =", "A girl named Ann and a boy named Tim")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


HEALTH_PORT = free_port()  # of host 1
REGEX = "[A-Za-z ,.]{80,200}"


def bodies():
    """Return requests of all kinds that advance differently: greedy, sampled, constrained."""
    for number, prompt in enumerate(PROMPTS):
        body = {"prompt": prompt, "max_tokens": 60, "seed": number, "logprobs": 1}
        yield body | {"temperature": 0, "ignore_eos": True}
        yield body | {"temperature": 0.9, "n": 2, "ignore_eos": True}
        yield body | {"structured_outputs": {"regex": REGEX}}


async def ask(session, url, body):
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]


async def answers(url, during=None):
    """Return the answers to all requests, sent at once. `during` runs while they are computed."""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        asking = [asyncio.create_task(ask(session, url, body)) for body in bodies()]
        if during is not None:
            await during(session)
        return await asyncio.gather(*asking)


@pytest.fixture(scope="module")
def expected():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
        with serving(sys.executable, *MODEL) as (url, _, _):
            return asyncio.run(answers(url))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Return the URL of host 0, and the processes of `forge-jax serve` on both hosts."""
    flags = (*MODEL, "--num-hosts", "2", "--coordinator", f"127.0.0.1:{free_port()}")
    follower = [sys.executable, "-m", "forge_serve", "serve", *flags, "--host-rank", "1"]
    with (
        (tmp_path_factory.mktemp("hosts") / "log").open("w") as log,
        running([*follower, "--port", str(HEALTH_PORT)], stderr=log) as other,
        serving(sys.executable, *flags) as (url, _, process),
    ):
        yield url, process, other


async def test_two_processes_give_the_bytes_of_one(hosts, expected):
    url, _, _ = hosts
    assert await answers(url) == expected


def engine_process(server):
    """Return the process of a server's engine. Grammars have another one."""
    children = psutil.Process(server.pid).children()
    [found] = [each for each in children if "forge_jax.engine" in " ".join(each.cmdline())]
    return found


@pytest.mark.parametrize("rank", [1, 0])
async def test_streams_survive_the_death_of_either_host(hosts, expected, rank):
    url, *processes = hosts
    worker = engine_process(processes[rank])

    async def kill(session):
        while True:  # some tokens have been sent
            async with session.get(f"{url}/stats") as response:
                if (await response.json())["num_running"]:
                    break
            await asyncio.sleep(0.02)
        worker.send_signal(signal.SIGKILL)

    assert await answers(url, kill) == expected
    assert engine_process(processes[rank]).pid != worker.pid


async def test_embeddings_are_computed_on_both_hosts(hosts):
    url, _, _ = hosts
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/embeddings", json={"input": "The dog"}) as response,
    ):
        body = await response.json()
    assert response.status == 200, body
    assert len(body["data"][0]["embedding"]) > 1


async def test_other_host_is_healthy(hosts):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{HEALTH_PORT}/health") as response,
    ):
        assert (response.status, await response.json()) == (200, {"status": "ready"})


def test_host_with_other_options_ends_with_the_difference(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    flags = (*MODEL, "--num-hosts", "2", "--coordinator", address, "--port", "0")
    command = [sys.executable, "-m", "forge_serve", "serve", *flags]
    other = [*command, "--host-rank", "1", "--max-num-seqs", "8"]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as leader,
        subprocess.Popen(other, stderr=subprocess.PIPE, text=True) as follower,
    ):
        for process in (leader, follower):
            _, log = process.communicate(timeout=200)
            assert process.returncode == 1
            assert "host 1 differs from host 0 in --max-num-seqs: 8 instead of 4" in log
