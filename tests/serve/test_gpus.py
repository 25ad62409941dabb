"""Figures of GPUs in `/engine_state` and `/metrics`, from an NVML library made for the test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge_kernels.cpu.build import find_compiler
from forge_serve.telemetry.gpus import Gpus

HERE = Path(__file__).parent
FIRST = {
    "index": 0,
    "name": "NVIDIA Test 0",
    "memory_used_bytes": 20 << 30,
    "memory_total_bytes": 80 << 30,
    "utilization": 0.97,
    "temperature_celsius": 64,
    "power_watts": 412.5,
}
SECOND = FIRST | {
    "index": 1,
    "name": "NVIDIA Test 1",
    "temperature_celsius": None,
    "power_watts": None,
}

CHILD = """
import asyncio, json
import aiohttp
from aiohttp import web
from forge_jax.engine.thread import Engine
from forge_serve.config import ServerConfig
from forge_serve.server.process import bind, make_runner
from forge_serve.server.service import Service
from forge_serve.telemetry.gpus import Gpus

async def main():
    service = Service(ServerConfig(request_log=False), gpus=Gpus())
    service.engine = Engine.fake()
    service.engine.start()
    runner, sock = make_runner(service, last_bytes_s=0.1), bind("127.0.0.1", 0)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with aiohttp.ClientSession() as http:
        async with http.get(url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        async with http.get(url + "/engine_state") as response:
            state = await response.json()
    await runner.cleanup()
    await service.engine.stop()
    metrics = [line for line in lines if line.startswith("forge:gpu_")]
    print(json.dumps({"gpus": state["gpus"], "metrics": metrics}))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    command = [*find_compiler(), "-x", "c", "-shared", "-fPIC", str(HERE / "nvml.c")]
    subprocess.run([*command, "-o", str(folder / "libnvidia-ml.so.1")], check=True)
    return folder


def served(library: Path, visible: str | None) -> dict:
    environment = os.environ | {"LD_LIBRARY_PATH": str(library)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_states_are_served_except_those_of_a_lost_gpu(library):
    found = served(library, None)
    assert found["gpus"] == [FIRST, SECOND]
    assert found["metrics"] == [
        'forge:gpu_memory_used_bytes{gpu="0",name="NVIDIA Test 0"} 2.147483648e+10',
        'forge:gpu_memory_used_bytes{gpu="1",name="NVIDIA Test 1"} 2.147483648e+10',
        'forge:gpu_memory_total_bytes{gpu="0",name="NVIDIA Test 0"} 8.589934592e+10',
        'forge:gpu_memory_total_bytes{gpu="1",name="NVIDIA Test 1"} 8.589934592e+10',
        'forge:gpu_utilization_ratio{gpu="0",name="NVIDIA Test 0"} 0.97',
        'forge:gpu_utilization_ratio{gpu="1",name="NVIDIA Test 1"} 0.97',
        'forge:gpu_temperature_celsius{gpu="0",name="NVIDIA Test 0"} 64.0',
        'forge:gpu_power_watts{gpu="0",name="NVIDIA Test 0"} 412.5',
    ]


@pytest.mark.parametrize(
    ("visible", "gpus"), [("1,0", [SECOND, FIRST]), ("GPU-b0,7,0", [SECOND]), ("", [])]
)
def test_only_gpus_visible_to_cuda_are_shown(library, visible, gpus):
    assert served(library, visible)["gpus"] == gpus


def test_no_gpus_without_a_driver():
    assert Gpus().read() == []
