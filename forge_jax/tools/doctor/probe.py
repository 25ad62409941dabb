"""Checks that need jax, in a separate process: `python -m forge_jax.tools.doctor.probe WHAT`.

Each fact is printed as a line of JSON at once, so that facts before a crash or a hang are kept.

    devices       JAX's devices, and the CUDA version of the driver
    kernels       if the C++ kernels for CPUs can be built and loaded
    model NAME    if the model can be served, and the size of its weights
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from contextlib import suppress
from typing import Any

from forge_jax.errors import ForgeError


def main(what: str, *arguments: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    {"devices": _devices, "kernels": _kernels, "model": _model}[what](*arguments)


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _devices() -> None:
    with suppress(OSError, AttributeError):  # no CUDA
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            _say(driver_cuda=f"{version.value // 1000}.{version.value % 1000 // 10}")
    import jax

    from forge_jax.telemetry.memory import device_bytes

    devices = []
    for device in jax.devices():
        memory = device_bytes(device)
        devices.append(
            {
                "id": device.id,
                "platform": device.platform,
                "kind": device.device_kind,
                "memory_bytes": None if memory is None else memory[0],
                "memory_used_bytes": None if memory is None else memory[1],
            }
        )
    _say(devices=devices)


def _kernels() -> None:
    from forge_kernels.cpu import BuildError, chosen, load
    from forge_kernels.cpu.build import find_compiler

    with suppress(BuildError):  # `load` also raises it, unless it finds an earlier build
        _say(compiler=find_compiler()[0])
    try:
        _say(built=True, instruction_set=load(), chosen=str(chosen()))
    except BuildError as error:
        _say(built=False, fault=str(error))


def _model(name: str) -> None:
    from forge_jax.checkpoint.hub import resolve
    from forge_jax.checkpoint.load import check_weights
    from forge_jax.checkpoint.model_spec import read_spec
    from forge_jax.models.registry import build_model
    from forge_jax.step.kv_cache import state_bytes

    try:
        folder = resolve(name)
        spec = read_spec(folder)
        _say(architecture=spec.architecture)
        model = build_model(spec, "auto")
        check_weights(model, folder)
        _say(weights_bytes=model.param_bytes, dtype=str(model.dtype), state_bytes=state_bytes(spec))
    except ForgeError as error:
        _say(fault=str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
