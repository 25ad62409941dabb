"""The Ray Serve application on a local cluster of a head and two workers, under load."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import aiohttp
import psutil
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from forge_jax.errors import ConfigError
from forge_serve.integrations.ray import app, build_app
from forge_serve.integrations.ray_routing import as_request

REQUESTS = 16
TOKENS = 100
STEP_MS = 20  # so that an answer takes two seconds
WORKER = {"num_cpus": 2, "resources": {"worker": 1}}
ONE_ON_A_WORKER = {"num_cpus": 1, "num_gpus": 0, "resources": {"worker": 1}}


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    for _ in range(2):
        cluster.add_node(**WORKER)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="error")
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def url(cluster):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    options = {"fake": True, "fake_step_time_ms": STEP_MS, "backend": "cpu"}
    deployment = {"num_replicas": 2, "ray_actor_options": ONE_ON_A_WORKER}
    serve.run(app({"deployment": deployment, **options}), route_prefix="/")
    return f"http://127.0.0.1:{port}"


def body(number, **fields):
    return {
        "prompt": f"story {number}",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": number,
        **fields,
    }


async def ask(session, number):
    async with session.post("/v1/completions", json=body(number)) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["choices"][0]["text"]


async def stream(session, number):
    """Return True if a stream is complete. A broken one must be an error for the client."""
    try:
        async with session.post("/v1/completions", json=body(number, stream=True)) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            events = await response.text()
    except aiohttp.ClientPayloadError:
        return False
    assert events.endswith("data: [DONE]\n\n")
    return True


def servers():
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "forge_serve.integrations.child_server" in (process.info["cmdline"] or ())
    ]


def until(condition):
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.2)


async def test_requests_survive_the_death_of_a_node(cluster, url):
    async with aiohttp.ClientSession(url) as session:
        numbers = range(REQUESTS)
        expected = await asyncio.gather(*(ask(session, number) for number in numbers))
        assert len(set(expected)) == REQUESTS
        asking = [asyncio.create_task(ask(session, number)) for number in numbers]
        streams = [asyncio.create_task(stream(session, number)) for number in numbers]
        await asyncio.sleep(TOKENS * STEP_MS / 1e3 / 3)
        before = servers()
        assert len(before) == 2
        victim = next(node for node in cluster.worker_nodes if runs_a_server(node))
        cluster.remove_node(victim, allow_graceful=False)
        later = [asyncio.create_task(ask(session, number)) for number in numbers]
        assert await asyncio.gather(*asking) == expected
        assert await asyncio.gather(*later) == expected
        complete = await asyncio.gather(*streams)
        assert 0 < sum(complete) < REQUESTS, "those on the other node are complete"
        until(lambda: len(servers()) == 1)
        cluster.add_node(**WORKER)  # gets a new replica
        until(lambda: len(servers()) == 2)


def runs_a_server(node):
    """Return True if a node's raylet is an ancestor of a server."""
    raylet = node.all_processes["raylet"][0].process.pid
    return any(
        raylet in [parent.pid for parent in psutil.Process(pid).parents()] for pid in servers()
    )


async def test_deleted_application_finishes_its_requests(url):
    async with aiohttp.ClientSession(url) as session:
        asking = asyncio.create_task(ask(session, 3))
        streaming = asyncio.create_task(stream(session, 4))
        await asyncio.sleep(TOKENS * STEP_MS / 1e3 / 3)
        await asyncio.to_thread(serve.delete, "default")
        assert await asking and await streaming
    assert servers() == []


async def cached_tokens(session, prompt):
    async with session.post(
        "/v1/completions", json={"prompt": prompt, "max_tokens": 4}
    ) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


async def served_requests(pid):
    """Return how many completions the server of one replica has answered."""
    [port] = [
        connection.laddr.port
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    url = f"http://127.0.0.1:{port}/stats"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return (await response.json())["completed_requests"]


async def test_requests_with_a_common_prefix_share_a_replica(url):
    deployment = {"num_replicas": 2, "ray_actor_options": ONE_ON_A_WORKER}
    options = {"fake": True, "backend": "cpu", "deployment": deployment}
    await asyncio.to_thread(serve.run, build_app(prefix_routing=True, **options))
    stories = [f"{number} " + "a long story " * 270 for number in range(8)]
    async with aiohttp.ClientSession(url) as session:
        for turn in range(3):
            prompts = [story + "more " * 10 * turn for story in stories]
            cached = await asyncio.gather(*(cached_tokens(session, each) for each in prompts))
            assert [each > 3400 for each in cached] == [turn > 0] * len(stories), cached
    served = [await served_requests(pid) for pid in servers()]
    assert sum(served) == 24 and min(served) >= 9, served
    await asyncio.to_thread(serve.delete, "default")
    until(lambda: servers() == [])


async def test_replica_may_have_several_hosts(url):
    options = {"backend": "cpu", "kernels": "xla", "dtype": "float32", "num_blocks": 64,
               "max_num_seqs": 2, "max_num_batched_tokens": 64, "tensor_parallel": 2}  # fmt: skip
    await asyncio.to_thread(
        serve.run, build_app(hosts=2, deployment={"num_replicas": 1}, **options)
    )
    assert len(servers()) == 2
    async with aiohttp.ClientSession(url) as session:
        assert await ask(session, 1)
    await asyncio.to_thread(serve.delete, "default")
    until(lambda: servers() == [])


def routed(body, key="a"):
    return as_request("POST", "/v1/chat/completions", [("authorization", key)], body)


def test_continued_chat_has_the_prefix_of_its_beginning():
    messages = [{"role": "user", "content": "How are you? " * 9}]
    more = [*messages, {"role": "assistant", "content": "Well."}]
    first, second = (
        routed(json.dumps({"model": "m", "n": 2, "messages": each}).encode())
        for each in (messages, more)
    )
    words = first.prompt_token_ids[:-1]  # the last one has the end of the list
    assert len(words) > 30 and second.prompt_token_ids[: len(words)] == words
    assert second.params.n == 2 and first.cache_salt == second.cache_salt
    assert routed(b"{}", key="b").cache_salt != routed(b"{}").cache_salt


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"\xff", b'{"n": "x", "prompt": [1, 2]}', b'{"n": -1}']
)
def test_invalid_requests_can_be_routed(body):
    assert routed(body).params.n == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_sequences": 1}, "--max-num-sequences"),
        ({"port": 1}, "port cannot be set in Ray"),
        ({"num_hosts": 2}, "num_hosts cannot be set in Ray"),
        ({"hosts": 2}, r"divide the number of devices, .* \(1\), not 2"),
        ({"hosts": 4, "pipeline_parallel": 2}, r"\(2\), not 4"),
    ],
)
def test_invalid_options_are_rejected_when_the_application_is_built(options, message):
    with pytest.raises(ConfigError, match=message):
        build_app(**options)
