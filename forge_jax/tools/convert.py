"""`forge-jax convert MODEL OUT`: writes a model folder whose weights load without conversion.

The weights are fused, cast, quantized and packed as `forge-jax serve MODEL` would load them with
the same options on this machine. The folder is written next to its destination under a hidden name
and then renamed, so it is never incomplete.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from forge_jax.checkpoint import orbax
from forge_jax.checkpoint.converted import WEIGHTS, Record, read_record, write_record
from forge_jax.checkpoint.gguf import config_of, is_gguf, read_gguf
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.load import check_weights, load_weights, read_shards
from forge_jax.config import EngineConfig
from forge_jax.engine.builder import choose_device, choose_kernels, read_model_spec
from forge_jax.errors import ConfigError
from forge_jax.host import supervise
from forge_jax.host.files import read_text
from forge_jax.host.progress import progress_bar
from forge_jax.models import ModelSpec, build_model
from forge_jax.models.decoder import Model
from forge_jax.telemetry.units import bytes_text
from forge_jax.text.gguf import gguf_templates
from forge_jax.text.load import load_text
from forge_jax.text.tokenizer import Tokenizer
from forge_jax.weights.ggml_types import KEY as TYPES_KEY
from forge_jax.weights.partition import check_shards, with_whole_experts

COPIED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
)
TEMPLATES = "additional_chat_templates"
REFRESH_S = 0.2  # interval between two looks at the size of the written files


@dataclass(frozen=True, kw_only=True)
class Converted:
    folder: Path
    weight_bytes: int
    dtype: str
    quantization: str
    packed: bool  # True if packed for the CPU kernels
    shards: int = 1  # number of shards; `weight_bytes` is the size of one


def convert(config: EngineConfig, out: str | Path, *, progress: bool = True) -> Converted:
    """Convert the model of `config.model`, and write it to the folder `out`.

    Host memory holds the weights twice while they are written.

    Args:
      config: the options `model`, `revision`, `dtype`, `quantization`, `gguf_weights`, `kernels`,
        `backend`, `device`, `tensor_parallel` and `expert_parallel` are used. The devices that
        `tensor_parallel` counts need not exist on this machine.
      out: the folder, which must be empty or not exist.
      progress: shows a progress bar on a terminal.

    Raises:
      ModelError: the model cannot be served.
      ConfigError: `out` is not empty or not writable, the model is already converted, or the
        machine does not support the options.
    """
    target = Path(out).expanduser().resolve()
    _check_target(target)
    source = resolve(config.model.model, config.model.revision)
    if read_record(source) is not None:
        raise ConfigError(f"{config.model.model} is already converted: use the original model")
    spec = read_model_spec(config, source)
    shards = config.parallel.tensor_parallel
    if config.parallel.expert_parallel:
        spec = with_whole_experts(spec)
    check_shards(spec, shards)
    kernels = choose_kernels(config, spec, choose_device(config))
    model = build_model(spec, config.model.dtype, kernels.formats, shards)
    check_weights(model, source)
    load_text(source, None, spec.vocab_size)  # raises if the tokenizer cannot be served
    arrays = _arrays(model, source, progress)
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    record = Record(
        folder=partial,
        dtype=model.dtype.name,
        quantization=config.model.quantization,
        formats=kernels.formats.packed if any(kernels.formats.packed.values()) else {},
        leaves=dict(zip(model.names, model.leaves, strict=True)),
        shards=shards,
        expert_parallel=config.parallel.expert_parallel,
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        with _bar_of_writing(partial, arrays, progress):
            orbax.write_arrays(partial / WEIGHTS, arrays)
        if is_gguf(source):
            _write_gguf_text(source, partial, spec)
        else:
            _copy_text(source, partial)
        write_record(record)
        check_weights(model, partial)
        _flush(partial)
        partial.rename(target)  # replaces only an empty folder
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Converted(
        folder=target,
        weight_bytes=model.param_bytes,
        dtype=record.dtype,
        quantization=record.quantization,
        packed=record.packed,
        shards=shards,
    )


def _arrays(model: Model, source: Path, progress: bool) -> dict[str, jax.Array]:
    """Return the arrays to write: the leaves, or each leaf's shards, stacked."""
    cpu = jax.devices("cpu")[0]
    if model.shards == 1:
        leaves = load_weights(model, source, device=cpu, progress=progress)
        return dict(zip(model.names, leaves, strict=True))
    shards = read_shards(model, source, progress=progress)
    return {name: jax.device_put(each, cpu, may_alias=True) for name, each in shards.items()}


@contextmanager
def _bar_of_writing(folder: Path, arrays: dict[str, jax.Array], progress: bool) -> Iterator[None]:
    """Show a bar of the bytes in the files of a folder, because Orbax does not report progress."""
    total = sum(each.nbytes for each in arrays.values())
    written = threading.Event()

    def follow() -> None:
        while not written.wait(REFRESH_S):
            bar.update(min(_size(folder), total) - bar.n)

    with progress_bar(total=total, desc="writing weights", unit="B", show=progress) as bar:
        thread = supervise.start_thread(follow, "following the written weights", _ignore)
        try:
            yield
        finally:
            written.set()
            thread.join()
        bar.update(total - bar.n)


def _ignore(error: BaseException) -> None:
    """Do nothing: the bar has stopped, and the error is in the log."""


def _size(folder: Path) -> int:
    """Return the bytes in all files of a folder, some of which may be renamed meanwhile."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(place, name)).st_size
    return size


def _check_target(target: Path) -> None:
    try:
        if any(target.iterdir()):
            raise ConfigError(f"{target} is not empty: choose a new or empty folder")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error


def _copy_text(source: Path, target: Path) -> None:
    """Copy the configuration, the tokenizer and the chat templates unchanged."""
    for name in COPIED:
        with suppress(FileNotFoundError):
            read_text(source / name)  # checks the size
            shutil.copyfile(source / name, target / name)
    for file in sorted((source / TEMPLATES).glob("*.jinja")):
        read_text(file, "chat_template.jinja", root=source)
        (target / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(file, target / TEMPLATES / file.name)


def _write_gguf_text(source: Path, target: Path, spec: ModelSpec) -> None:
    """Write the same files for a GGUF file, in Hugging Face's format."""
    config, generation = config_of(read_gguf(source))
    if spec.ggml_types is None:  # decoded
        del config[TYPES_KEY]
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", generation)
    tokenizer = Tokenizer.from_folder(source)
    if tokenizer is None:
        return
    (target / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    templates = [{"name": n, "template": t} for n, t in gguf_templates(source).items()]
    named = {**tokenizer.special_tokens, **({"chat_template": templates} if templates else {})}
    _write_json(target / "tokenizer_config.json", named)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _flush(folder: Path) -> None:
    """Flush all files to disk before the rename, so that a crash leaves no incomplete folder."""
    for path in [*folder.rglob("*"), folder]:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def summary(converted: Converted) -> str:
    kind = converted.dtype if converted.quantization == "none" else converted.quantization
    form = "packed for the CPU kernels" if converted.packed else "plain matrices"
    size = f"{bytes_text(converted.weight_bytes)} of weights"
    of_each = "" if converted.shards == 1 else f" for each of {converted.shards} devices"
    return f"{converted.folder}: {size}{of_each}, {kind}, {form}"
