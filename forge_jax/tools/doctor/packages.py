"""The installed packages, and checks of their versions."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement

from forge_jax.tools.doctor.issue import Issue

OURS = "forge-jax"
INSTALL = "pip install -c constraints.txt -e ."
INSTALL_CUDA = "pip install -c constraints.txt -e '.[cuda13]'"
CUDA_PLUGIN = re.compile(r"jax-cuda(\d+)-plugin")
# Packages in addition to forge-jax's requirements.
OTHERS = (
    *(f"jax-cuda{n}-{part}" for n in (12, 13) for part in ("plugin", "pjrt")),
    *("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)


def installed() -> dict[str, str]:
    """Return the installed versions of forge-jax, its requirements and GPU packages, by name."""
    names = [OURS, *(requirement.name for requirement in _requirements()), *OTHERS]
    found = {name: _version(name) for name in names}
    return {name: version for name, version in found.items() if version is not None}


def faults(versions: Mapping[str, str]) -> Iterator[Issue]:
    """Yield missing packages and version conflicts."""
    if OURS not in versions:
        yield Issue("note", "forge-jax is not installed, only on the path", INSTALL)
    for requirement in _requirements():
        have = versions.get(requirement.name)
        if have is None:
            yield Issue("problem", f"{requirement.name} is not installed", INSTALL)
        elif not requirement.specifier.contains(have, prereleases=True):
            yield Issue(
                "problem",
                f"{requirement.name} is {have}, but forge-jax needs {requirement.specifier}",
                INSTALL,
            )
    jax, jaxlib = versions.get("jax"), versions.get("jaxlib")
    if jax and jaxlib and jax != jaxlib:
        yield Issue("problem", f"jax is {jax} and jaxlib {jaxlib}: versions must match", INSTALL)
    plugins = cuda_plugins(versions)
    if len(plugins) > 1:
        yield Issue(
            "problem",
            f"JAX's plugins for CUDA {' and '.join(map(str, sorted(plugins)))} are both installed",
            f"pip uninstall jax-cuda{min(plugins)}-plugin jax-cuda{min(plugins)}-pjrt",
        )
    for major, version in plugins.items():
        if jaxlib and version != jaxlib:
            yield Issue(
                "problem",
                f"jax-cuda{major}-plugin is {version} and jaxlib {jaxlib}: versions must match",
                INSTALL_CUDA,
            )
        pjrt = versions.get(f"jax-cuda{major}-pjrt")
        if pjrt != version:
            yield Issue(
                "problem",
                f"jax-cuda{major}-plugin is {version} and jax-cuda{major}-pjrt "
                f"{pjrt or 'not installed'}: versions must match",
                INSTALL_CUDA,
            )


def cuda_plugins(versions: Mapping[str, str]) -> dict[int, str]:
    """Return the version of each JAX plugin by CUDA's major version."""
    return {
        int(match[1]): version
        for name, version in versions.items()
        if (match := CUDA_PLUGIN.fullmatch(name))
    }


def _requirements() -> list[Requirement]:
    """Return forge-jax's requirements without extras; empty if it is only on the path."""
    try:
        lines = importlib.metadata.requires(OURS) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    parsed = map(Requirement, lines)
    return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
