"""Architectures by name: built in, registered, or from the entry points of installed packages."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import EntryPoint
from pathlib import Path

from forge_jax.errors import ModelError, UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.models.families import ALIASES, ARCHITECTURES, Architecture

GROUP = "forge_jax.models"  # entry point group

_registered: dict[str, Architecture] = {}


def register(name: str, architecture: Architecture) -> None:
    """Add a model family to this process.

    A package adds its family to every process with an entry point of the group `forge_jax.models`.
    The commands and engine processes need one, because they import nothing else.

    Args:
      name: as in the field `architectures` of `config.json`.
      architecture: the family.

    Raises:
      ModelError: there is already an architecture with this name.
    """
    taken = _sources(name)
    if taken:
        raise ModelError(
            f"cannot register the architecture {short_repr(name)}: it is already {taken[0]}: "
            "choose another name, also in config.json"
        )
    _registered[name] = architecture


def find_architecture(name: str) -> Architecture:
    """Return the architecture that `config.json` calls `name`.

    Raises:
      UnsupportedModelError: no architecture or several have this name, or the package that
        provides it cannot be imported.
    """
    name = ALIASES.get(name, name)
    sources = _sources(name)
    if not sources:
        raise UnsupportedModelError(
            f"architecture {short_repr(name)} is not supported; supported: "
            f"{', '.join(architecture_names())}"
        )
    if len(sources) > 1:
        raise UnsupportedModelError(
            f"architecture {short_repr(name)} is defined {len(sources)} times: it is "
            f"{' and '.join(sources)}: uninstall a package or rename its architecture"
        )
    found = ARCHITECTURES.get(name) or _registered.get(name)
    return _loaded(_entry_points(name)[0]) if found is None else found


def architecture_names() -> list[str]:
    """Return all names: those built in, then the others in alphabetical order."""
    others = {*_registered, *(point.name for point in _all_entry_points(tuple(sys.path)))}
    return [*ARCHITECTURES, *sorted(others - ARCHITECTURES.keys())]


def code_digest(name: str) -> str | None:
    """Return a hash of an architecture's code; None if all of it is in forge_jax.

    It covers the imported modules of the packages that define the architecture's functions.
    """
    found = find_architecture(name)
    functions = (found.read_spec, found.weights, found.decoder, found.cache)
    wrapped = [each.func if isinstance(each, partial) else each for each in functions]
    packages = {each.__module__.partition(".")[0] for each in wrapped} - {"forge_jax"}
    if not packages:
        return None
    digest = hashlib.sha256()
    for module, code in sorted(sys.modules.items()):
        file = getattr(code, "__file__", None)
        if module.partition(".")[0] in packages and file is not None:
            digest.update(module.encode() + Path(file).read_bytes())
    return digest.hexdigest()[:12]


def _sources(name: str) -> list[str]:
    """Return where an architecture comes from, as the end of "it is ..."."""
    name = ALIASES.get(name, name)
    return [
        *(["built in"] if name in ARCHITECTURES else []),
        *(["registered"] if name in _registered else []),
        *(f"provided by {_package(point)}" for point in _entry_points(name)),
    ]


@cache
def _all_entry_points(path: tuple[str, ...]) -> Sequence[EntryPoint]:
    """Return the entry points of the packages on a `sys.path`, without importing them."""
    return tuple(importlib.metadata.entry_points(group=GROUP))


def _entry_points(name: str) -> list[EntryPoint]:
    return [point for point in _all_entry_points(tuple(sys.path)) if point.name == name]


def _package(point: EntryPoint) -> str:
    return "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


@cache
def _loaded(point: EntryPoint) -> Architecture:
    """Import an entry point.

    Raises:
      UnsupportedModelError: it cannot be imported or is not an `Architecture`.
    """
    where = f"the entry point {point.name} = {point.value} of {_package(point)}"
    try:
        found = point.load()
    except Exception as error:
        raise UnsupportedModelError(
            f"{where} cannot be imported: {type(error).__name__}: {error}: reinstall or uninstall "
            "the package"
        ) from error
    if not isinstance(found, Architecture):
        raise UnsupportedModelError(
            f"{where} must be a forge_jax.models.Architecture, not {short_repr(found)}: "
            "correct or uninstall the package"
        )
    return found
