"""A Ray Serve application, and batch inference with Ray Data. Requires `ray[serve]` or `ray[data]`.

The application has two deployments:

- `ForgeServer`: autoscaling replicas. Each runs `forge-jax serve` in a separate process, or in one
  process per host.
- `ForgeRouter`: passes requests and responses on. It runs on the head node, because the death of
  another node would end its connections.

If a replica is lost before the first byte of its answer, the router sends the request to another
one. A response that is not a stream counts as unanswered until it is complete.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from forge_jax.errors import ConfigError

try:
    import ray.util as ray_util  # pyright: ignore[reportMissingImports]
    from ray import remote as ray_remote  # pyright: ignore[reportMissingImports]
    from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]
    from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    raise ImportError(
        "forge_serve.integrations.ray requires Ray: run pip install --upgrade 'ray[serve,data]'"
    ) from error

from forge_serve.cli.main import make_parser

if TYPE_CHECKING:
    from forge_jax import SamplingParams

ATTEMPTS = 5  # replicas that a request is sent to
MAX_ONGOING_REQUESTS = 256  # per replica; the server queues them
CPUS = 1.0  # a host's, for Ray's scheduler
STOP_MARGIN_S = 15.0  # time for a replica's shutdown, beyond --drain-timeout
FATAL_STATES = ("failed", "stalled")  # a server recovers from all others by itself
SERVER = ("-m", "forge_serve.integrations.child_server")
PREFIX_ROUTER = "forge_serve.integrations.ray_routing:PrefixRouter"
# Headers of a connection instead of a message (RFC 9110, section 7.6.1), and two that clients set.
HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-connection te trailer transfer-encoding upgrade host "
    "content-length".split()
)

type Headers = list[tuple[str, str]]


class ReplicaLostError(RuntimeError):
    """A replica's server ended, or closed the connection, before the answer was complete."""


class ForgeServer:
    """A replica: a `forge-jax serve` process, and one on each other host of the model.

    Args:
      flags: flags of the server.
      hosts: number of hosts. With more than one, the replica runs in the first of as many bundles
        of a placement group.
      num_gpus: GPUs of each host.
    """

    async def __init__(  # Ray awaits it
        self, flags: Sequence[str], hosts: int = 1, num_gpus: float = 0
    ):
        if hosts > 1:
            address = f"{ray_util.get_node_ip_address()}:{_free_port()}"
            flags = [*flags, "--num-hosts", str(hosts), "--coordinator", address]
        self._others = [_start_host(flags, rank, num_gpus) for rank in range(1, hosts)]
        self._process = await asyncio.create_subprocess_exec(
            *_command(flags),
            stdin=asyncio.subprocess.PIPE,  # the server stops when this process closes it, or dies
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        found = re.search(r" at (http://\S+);", line)
        if found is None:
            status = await self._process.wait()
            raise RuntimeError(f"forge-jax serve ended with status {status}: see its log")
        self._session = aiohttp.ClientSession(
            found[1],
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
        )

    async def answer(
        self, method: str, target: str, headers: Headers, body: bytes
    ) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """Yield the status and headers of the server's response, and then its body in parts.

        Raises:
          ReplicaLostError: the connection to the server was lost.
        """
        try:
            async with self._session.request(
                method, target, headers=headers, data=body, allow_redirects=False
            ) as response:
                yield response.status, end_to_end(response.headers.items())
                async for part in response.content.iter_any():
                    yield part
        except aiohttp.ClientError as error:
            raise ReplicaLostError(f"the server of a replica was lost: {error}") from error

    async def check_health(self) -> None:
        """Raise if the server has ended or cannot recover. Ray then replaces the replica."""
        async with self._session.get("/health") as response:
            state = (await response.json())["status"]
        if state in FATAL_STATES:
            raise RuntimeError(f"forge-jax serve is {state}")

    async def __del__(self) -> None:  # Ray awaits it, after the running requests
        session, process = getattr(self, "_session", None), getattr(self, "_process", None)
        if session is not None:
            await session.close()
        if process is not None and process.stdin is not None:
            process.stdin.close()
            await process.wait()


class ForgeHost:
    """`forge-jax serve` on another host than the replica. Ray ends it with the replica."""

    def __init__(self, flags: Sequence[str]):
        self._process = subprocess.Popen(_command(flags), stdin=subprocess.PIPE)


def _start_host(flags: Sequence[str], rank: int, num_gpus: float) -> Any:
    """Start a host in its bundle of the replica's placement group. Ray restarts it if it dies."""
    bundle = PlacementGroupSchedulingStrategy(
        ray_util.get_current_placement_group(), placement_group_bundle_index=rank
    )
    actor = ray_remote(ForgeHost).options(
        num_cpus=CPUS, num_gpus=num_gpus, max_restarts=-1, scheduling_strategy=bundle
    )
    return actor.remote([*flags, "--host-rank", str(rank)])


def _command(flags: Sequence[str]) -> list[str]:
    return [sys.executable, *SERVER, *flags, "--host", "127.0.0.1", "--port", "0"]


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


class ForgeRouter:
    """Sends each request to a replica, and to another one if it is lost unanswered.

    Args:
      servers: handle of the deployment of `ForgeServer`.
    """

    def __init__(self, servers: Any):
        self._answer = servers.options(stream=True).answer

    async def __call__(self, http: Any) -> Any:  # starlette's Request and Response
        from starlette.responses import (  # pyright: ignore[reportMissingImports]
            Response,
            StreamingResponse,
        )

        target = http.url.path + (f"?{http.url.query}" if http.url.query else "")
        request = (http.method, target, end_to_end(http.headers.items()), await http.body())
        for attempt in range(1, ATTEMPTS + 1):
            parts = self._answer.remote(*request)
            try:
                status, headers = await anext(parts)
                is_stream = dict(headers).get("content-type", "").startswith("text/event-stream")
                if is_stream:
                    first = await anext(parts, b"")
                    return _with_headers(StreamingResponse(_chain(first, parts), status), headers)
                body = b"".join([part async for part in parts])
                return _with_headers(Response(body, status), headers)
            except (RayActorError, ReplicaLostError) as error:
                if attempt == ATTEMPTS:
                    return Response(_unavailable(error), 503, {"retry-after": "5"})
        raise AssertionError("unreachable")


def end_to_end(headers: Any) -> Headers:
    """Return the headers of a message that a proxy passes on, with names in lower case."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in HOP_BY_HOP]


async def _chain(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in parts:
        yield part


def _with_headers(response: Any, headers: Headers) -> Any:
    length = [pair for pair in response.raw_headers if pair[0] == b"content-length"]
    response.raw_headers = length + [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers
    ]
    return response


def _unavailable(error: Exception) -> bytes:
    message = f"{ATTEMPTS} replicas were lost during this request: {type(error).__name__}"
    return json.dumps({"error": {"message": message, "type": "server_error"}}).encode()


def build_app(
    model: str = "forge-tiny",
    *,
    hosts: int = 1,
    deployment: Mapping[str, Any] | None = None,
    prefix_routing: bool = False,
    **options: Any,
) -> Any:
    """Return a Ray Serve application with the routes of `forge-jax serve`, except WebSockets.

    Args:
      model: a model folder or Hugging Face ID that every node can read.
      hosts: hosts of each replica, at least 1. It must divide the number of devices, which is
        `tensor_parallel` times `pipeline_parallel`. Each host needs a separate node.
      deployment: options of the deployment of the replicas, as for `ray.serve.deployment`. The
        default is one to four replicas by load, each with as many GPUs as the model uses.
      prefix_routing: choose replicas by cached prefix and load, with the rule of
        `--data-parallel`. The default is Ray's router, which chooses by load.
      options: flags of `forge-jax serve` with underscores, such as `max_num_seqs=64`. A switch is
        True.

    Raises:
      ConfigError: an option is not a flag, or has a value of the wrong type, or does not work in
        Ray.
    """
    from ray import serve  # pyright: ignore[reportMissingImports]
    from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]

    flags = _flags(model, options)
    parsed = _parsed(flags)
    devices = parsed.tensor_parallel * parsed.pipeline_parallel
    if hosts < 1 or devices % hosts:
        raise ConfigError(
            "hosts must be at least 1 and divide the number of devices, which is tensor_parallel "
            f"times pipeline_parallel ({devices}), not {hosts}"
        )
    devices = 0 if parsed.backend == "cpu" else devices * parsed.data_parallel
    num_gpus = devices // hosts
    settings = {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 32},
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "ray_actor_options": {"num_cpus": CPUS, "num_gpus": num_gpus},
        "graceful_shutdown_timeout_s": parsed.drain_timeout_s + STOP_MARGIN_S,
    }
    if hosts > 1:
        settings["placement_group_bundles"] = [{"CPU": CPUS, "GPU": num_gpus}] * hosts
        settings["placement_group_strategy"] = "STRICT_SPREAD"
    if prefix_routing:
        settings["request_router_config"] = RequestRouterConfig(request_router_class=PREFIX_ROUTER)
    settings |= deployment or {}
    if "num_replicas" in settings and "autoscaling_config" not in (deployment or {}):
        del settings["autoscaling_config"]
    servers = serve.deployment(**settings)(ForgeServer).bind(flags, hosts, num_gpus)
    router = serve.deployment(
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=settings["graceful_shutdown_timeout_s"],
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
    )(ForgeRouter)
    return router.bind(servers)


def app(args: dict[str, Any]) -> Any:
    """Return `build_app(**args)`, for `import_path` and `args` of a Serve config file."""
    return build_app(**args)


def _parsed(flags: Sequence[str]) -> argparse.Namespace:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return make_parser().parse_args(["serve", *flags])
    except SystemExit as error:
        raise ConfigError(said.getvalue().strip()) from error


def _flags(model: str, options: Mapping[str, Any]) -> list[str]:
    taken = sorted({"host", "port", "num_hosts", "host_rank", "coordinator"} & options.keys())
    if taken:
        raise ConfigError(f"{taken[0]} cannot be set in Ray: omit it")
    flags = [model, "--engine-process"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags


def generate(
    dataset: Any,
    model: str = "forge-tiny",
    sampling_params: SamplingParams | None = None,
    *,
    num_actors: int = 1,
    num_gpus: float | None = None,
    batch_size: int = 256,
    **options: Any,
) -> Any:
    """Return a Ray data set with two more columns: `output` and `finish_reason`.

    Ray computes it when it is read, on actors with an engine each.

    Args:
      dataset: a `ray.data.Dataset` with the column `prompt`.
      model: a model folder or Hugging Face ID that every node can read.
      sampling_params: parameters of all prompts. Default: `SamplingParams()`.
      num_actors: number of engines.
      num_gpus: GPUs per engine. Default: the number that the model uses, or 0 if the cluster has
        none.
      batch_size: rows per call. The engine computes as many of them at once as fit.
      options: options of `forge_jax.LLM`.
    """
    import ray  # pyright: ignore[reportMissingImports]

    if num_gpus is None:
        has_gpus = ray.cluster_resources().get("GPU") and options.get("backend") != "cpu"
        devices = options.get("tensor_parallel", 1) * options.get("pipeline_parallel", 1)
        num_gpus = devices if has_gpus else 0
    return dataset.map_batches(
        _Generate,
        fn_constructor_args=(model, sampling_params, options),
        batch_size=batch_size,
        num_gpus=num_gpus,
        compute=ray.data.ActorPoolStrategy(size=num_actors),
    )


class _Generate:
    def __init__(self, model: str, params: SamplingParams | None, options: Mapping[str, Any]):
        from forge_jax import LLM

        self._llm = LLM(model, **options)
        self._params = params

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        prompts = [str(prompt) for prompt in batch["prompt"]]
        outputs = self._llm.generate(prompts, self._params, progress=False)
        batch["output"] = np.array([output.text for output in outputs], dtype=object)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        batch["finish_reason"] = np.array(reasons, dtype=object)
        return batch
