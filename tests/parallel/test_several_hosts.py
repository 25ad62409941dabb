"""Servers on several hosts: groups of processes of this machine, which share one model.

The expected bytes are those of one process with two devices.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from functools import partial

import aiohttp
import psutil
import pytest
from child import short_stories

from tests.server_process import running, serving, virtual_devices

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = (
    *("--backend", "cpu", "--kernels", "xla", "--dtype", "float32"),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
    *("--num-blocks", "128", "--deterministic", "--speculation", "ngram"),
)
PROMPTS = ("Once upon a time", "The dog", "2 + 2 =", "A girl named Ann and a boy named Tim")

LONG_PROMPT = "Once upon a time there was a girl who liked to play with her red ball in the park"
SUMS = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from forge_kernels.collectives import ordered_sum

port, rank = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 4, int(rank))
mesh = jax.sharding.Mesh(jax.devices(), "x")
for dtype, size in ((np.float32, 256), (jax.numpy.bfloat16, 256), (np.float32, 255)):
    parts = np.random.default_rng(0).standard_normal((4, size)).astype(dtype)
    whole = jax.make_array_from_callback(
        parts.shape, NamedSharding(mesh, P("x")), lambda index: parts[index]
    )
    add = jax.shard_map(
        lambda part: ordered_sum(part, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    found = np.asarray(jax.jit(add)(whole).addressable_shards[0].data)[0]
    expected = np.zeros(size, np.float32)
    for part in parts:
        expected += part.astype(np.float32)
    assert (found == expected.astype(dtype)).all(), found - expected
print("equal")
"""
TIMEOUT = aiohttp.ClientTimeout(total=300)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


HEALTH_PORT = free_port()  # host 1's
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
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        asking = [asyncio.create_task(ask(session, url, body)) for body in bodies()]
        if during is not None:
            await during(session)
        return await asyncio.gather(*asking)


@contextlib.contextmanager
def group_of(health_ports, model, folder, parallel="--tensor-parallel"):
    """Run host 0, and another host for each port. Yield its URL, and the processes in order."""
    count = 1 + len(health_ports)
    flags = (*model, parallel, str(count), "--num-hosts", str(count))
    flags += ("--coordinator", f"127.0.0.1:{free_port()}")
    command = [sys.executable, "-m", "forge_serve", "serve", *flags]
    with contextlib.ExitStack() as stack:
        others = []
        for rank, port in enumerate(health_ports, start=1):
            log = stack.enter_context((folder / f"log{rank}").open("w"))
            host = [*command, "--host-rank", str(rank), "--port", str(port)]
            others.append(stack.enter_context(running(host, stderr=log)))
        url, _, process = stack.enter_context(serving(sys.executable, *flags))
        yield url, process, *others


@pytest.fixture(scope="module")
def model():
    """Return the model and the options of every server. One of two stages has two layers."""
    return str(short_stories()), *OPTIONS


@pytest.fixture(scope="module")
def expected(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", virtual_devices(2))
        with serving(sys.executable, *model, "--tensor-parallel", "2") as (url, _, _):
            return asyncio.run(answers(url))


@pytest.fixture(scope="module")
def hosts(model, tmp_path_factory):
    """Return the URL of host 0, and the processes of `forge-jax serve` on both hosts."""
    with group_of([HEALTH_PORT], model, tmp_path_factory.mktemp("hosts")) as group:
        yield group


async def test_two_processes_give_the_bytes_of_one(hosts, expected):
    url, _, _ = hosts
    assert await answers(url) == expected


async def test_four_processes_give_the_same_bytes_in_any_batch(model, tmp_path):
    """Gloo's ring sums each quarter of a step's rows in another order, so prompts fill several."""
    prompts = [f"{i} {LONG_PROMPT}" for i in range(4)]
    with group_of([0, 0, 0], model, tmp_path) as (url, *_):
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            asks = [{"prompt": p, "max_tokens": 8, "logprobs": 1, "seed": 1} for p in prompts]
            together = await asyncio.gather(*(ask(session, url, each) for each in asks))
            assert [await ask(session, url, each) for each in asks] == together


def test_sums_over_processes_have_a_fixed_order():
    """Each element is added in the order of the processes, as on the devices of one process."""
    command = [sys.executable, "-c", SUMS, str(free_port())]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(running([*command, str(rank)], stdout=subprocess.PIPE))
            for rank in range(4)
        ]
        for process in ranks:
            out, _ = process.communicate(timeout=200)
            assert out.split()[-1] == "equal", out


async def test_stages_on_two_hosts_survive_the_death_of_either(model, tmp_path):
    """The stages of one model on one device have the bits of the whole model."""
    with serving(sys.executable, *model) as (url, _, _):
        expected = await answers(url)
    with group_of([0], model, tmp_path, "--pipeline-parallel") as (url, *processes):
        assert await answers(url) == expected
        for process in processes:
            worker = engine_process(process)
            assert await answers(url, partial(kill_while_running, url, worker)) == expected
            assert engine_process(process).pid != worker.pid


def engine_process(server):
    """Return the process of a server's engine. Grammars have another one."""
    children = psutil.Process(server.pid).children()
    [found] = [each for each in children if "forge_jax.engine" in " ".join(each.cmdline())]
    return found


async def kill_while_running(url, worker, session):
    """Kill a process once some tokens have been sent."""
    while True:
        async with session.get(f"{url}/stats") as response:
            if (await response.json())["num_running"]:
                break
        await asyncio.sleep(0.02)
    worker.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("rank", [1, 0])
async def test_streams_survive_the_death_of_either_host(hosts, expected, rank):
    url, *processes = hosts
    worker = engine_process(processes[rank])
    assert await answers(url, partial(kill_while_running, url, worker)) == expected
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


def test_host_with_other_options_ends_with_the_difference(model):
    address = f"127.0.0.1:{free_port()}"
    flags = (*model, "--tensor-parallel", "2", "--num-hosts", "2", "--coordinator", address)
    flags += ("--port", "0")
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
