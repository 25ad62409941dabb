"""Deployment on Modal with one GPU, which is released when there are no requests.

    pip install modal
    modal deploy deploy/modal/forge_jax_modal.py

Modal prints the URL. Store the API keys in the variable API_KEYS of the secret `forge-jax`, one key
per line. The volume `forge-jax` keeps models and compiled steps.
"""

import subprocess
from pathlib import Path

import modal

ROOT = Path(__file__).resolve().parents[2]
MODEL = "forge-tiny"
GPU = "H200"
PORT = 8000
STATE = "/var/lib/forge-jax"
KEYS = "/tmp/api-keys"
COMMAND = [
    *("forge-jax", "serve", MODEL, "--host", "0.0.0.0", "--port", str(PORT)),
    *("--api-key-file", KEYS, "--engine-process", "--log-format", "json"),
]

app = modal.App("forge-jax")
image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("g++")
    .add_local_dir(
        ROOT,
        "/src",
        copy=True,
        ignore=["**/.venv*", "**/.git", "tests", "benchmarks", "docs"],
    )
    .run_commands("pip install -c /src/constraints.txt '/src[cuda13,otel,pdf]'")
    .env({"HF_HOME": f"{STATE}/huggingface", "XDG_CACHE_HOME": f"{STATE}/cache"})
)


@app.function(
    image=image,
    gpu=GPU,
    volumes={STATE: modal.Volume.from_name("forge-jax", create_if_missing=True)},
    secrets=[modal.Secret.from_name("forge-jax", required_keys=["API_KEYS"])],
    scaledown_window=300,
    timeout=3600,
)
@modal.concurrent(max_inputs=256)
@modal.web_server(port=PORT, startup_timeout=1800)
def serve() -> None:
    import os

    Path(KEYS).write_text(os.environ["API_KEYS"])
    subprocess.Popen(COMMAND)
