"""The files in deploy/, and checks of the pods that run the server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from forge_serve.cli.flags import MODEL_ARGUMENT, take_model
from forge_serve.cli.main import make_parser
from forge_serve.config import ServerConfig
from forge_serve.http.auth import HEALTH_PATHS
from forge_serve.server.app import make_app
from forge_serve.server.service import Service

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")


def options(command: list[str]) -> dict[str, Any]:
    """Return the values of a command line's flags; forge-jax must accept it."""
    assert Path(command[0]).name == "forge-jax"
    found = vars(make_parser().parse_args(command[1:]))
    if MODEL_ARGUMENT in found:
        take_model(found, None)
    return found


def routes() -> set[str]:
    app = make_app(Service(ServerConfig()))
    return {r.resource.canonical for r in app.router.routes() if r.resource is not None}


def dockerfile(word: str) -> list[str]:
    return re.findall(rf"^{word} +(.*)$", DOCKERFILE, re.MULTILINE)


def entrypoint() -> list[str]:
    (command,) = dockerfile("ENTRYPOINT")
    return json.loads(command)


def check_pod(pod: dict[str, Any], hosts: int = 1) -> None:
    """Check a pod's command, probes, mounts and time to stop on the first and the last host."""
    (container,) = pod["containers"]
    (port,) = container["ports"]
    for rank in {0, hosts - 1}:
        found = options([*entrypoint(), *(on_host(arg, rank, hosts) for arg in container["args"])])
        assert (found["command"], found["host"]) == ("serve", "0.0.0.0")
        assert found["port"] == port["containerPort"] == ServerConfig.port
        assert (found["num_hosts"], found["host_rank"]) == (hosts, rank)
        assert found["engine_process"] or hosts > 1
        left_s = pod["terminationGracePeriodSeconds"] - stop_sleep_s(pod, rank)
        assert left_s > (found["drain_timeout_s"] if rank == 0 else 0)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in HEALTH_PATHS & routes()
        assert asked["port"] == port["name"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def on_host(text: str, rank: int, hosts: int) -> str:
    """Replace the variables that LeaderWorkerSet sets."""
    for name, value in lws_environment(rank, hosts).items():
        text = text.replace(f"$({name})", value)
    assert "$(" not in text
    return text


def lws_environment(rank: int, hosts: int) -> dict[str, str]:
    return {
        "LWS_LEADER_ADDRESS": "forge-jax-0.forge-jax.default",
        "LWS_GROUP_SIZE": str(hosts),
        "LWS_WORKER_INDEX": str(rank),
    }


def stop_sleep_s(pod: dict[str, Any], rank: int = 0) -> float:
    """Return the seconds that the container sleeps before SIGTERM."""
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    with tempfile.TemporaryDirectory() as folder:
        sleep = Path(folder) / "sleep"
        sleep.write_text("#!/bin/sh\necho $1\n")
        sleep.chmod(0o755)
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        env = lws_environment(rank, 2) | {"PATH": path}
        return float(subprocess.check_output(command, env=env, text=True))
