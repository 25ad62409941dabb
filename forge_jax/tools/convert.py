"""`forge-jax convert MODEL OUT`: a model folder whose weights need nothing done to them any more.

Fused, cast, quantised and packed as `forge-jax serve MODEL` with the same options would have them
on this machine. The folder appears complete or not at all: it is written beside its place, under a
hidden name, and renamed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from contextlib import suppress
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
from forge_jax.host.files import read_text
from forge_jax.models import ModelSpec, build_model
from forge_jax.models.decoder import Model
from forge_jax.telemetry.units import bytes_text
from forge_jax.text.gguf import gguf_templates
from forge_jax.text.load import load_text
from forge_jax.text.tokenizer import Tokenizer
from forge_jax.weights.ggml_types import KEY as TYPES_KEY
from forge_jax.weights.partition import check_shards

COPIED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
)
TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What `convert` has written."""

    folder: Path
    weight_bytes: int
    dtype: str
    quantization: str
    packed: bool  # for the CPU kernels
    shards: int = 1  # the weights are those of one


def convert(config: EngineConfig, out: str | Path, *, progress: bool = True) -> Converted:
    """Writes the model that `config.model` names to the folder `out`.

    The host holds the weights twice while they are written.

    Args:
      config: `model`, `revision`, `dtype`, `quantization`, `gguf_weights`, `kernels`, `backend`,
        `device` and `tensor_parallel` count, the last the devices that are to share it, which need
        not be here.
      out: does not exist, or is empty.
      progress: show a progress bar on a terminal.

    Raises:
      ModelError: the model cannot be served.
      ConfigError: `out` has something in it or cannot be written, the model has been converted
        already, or the machine cannot do what is asked for.
    """
    target = Path(out).expanduser().resolve()
    _check_target(target)
    source = resolve(config.model.model, config.model.revision)
    if read_record(source) is not None:
        raise ConfigError(f"{config.model.model} is converted already: give the original model")
    spec = read_model_spec(config, source)
    shards = config.parallel.tensor_parallel
    check_shards(spec, shards)
    kernels = choose_kernels(config, spec, choose_device(config))
    model = build_model(spec, config.model.dtype, kernels.formats, shards)
    check_weights(model, source)
    load_text(source, None, spec.vocab_size)  # what cannot be served is not written
    arrays = _arrays(model, source, progress)
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    record = Record(
        folder=partial,
        dtype=model.dtype.name,
        quantization=config.model.quantization,
        formats=kernels.formats.packed if any(kernels.formats.packed.values()) else {},
        leaves=dict(zip(model.names, model.leaves, strict=True)),
        shards=shards,
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        orbax.write_arrays(partial / WEIGHTS, arrays)
        if is_gguf(source):
            _write_gguf_text(source, partial, spec)
        else:
            _copy_text(source, partial)
        write_record(record)
        check_weights(model, partial)
        _flush(partial)
        partial.rename(target)  # takes the place of an empty folder, and of no other
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
    """What is written: the leaves, or the shards of each below each other."""
    cpu = jax.devices("cpu")[0]
    if model.shards == 1:
        leaves = load_weights(model, source, device=cpu, progress=progress)
        return dict(zip(model.names, leaves, strict=True))
    shards = read_shards(model, source, progress=progress)
    return {name: jax.device_put(each, cpu, may_alias=True) for name, each in shards.items()}


def _check_target(target: Path) -> None:
    try:
        if any(target.iterdir()):
            raise ConfigError(f"{target} is not empty: give a folder that is not there yet")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error


def _copy_text(source: Path, target: Path) -> None:
    """The configuration, the tokenizer and the chat templates, byte by byte."""
    for name in COPIED:
        with suppress(FileNotFoundError):
            read_text(source / name)  # no more than is read of such a file
            shutil.copyfile(source / name, target / name)
    for file in sorted((source / TEMPLATES).glob("*.jinja")):
        read_text(file, "chat_template.jinja", root=source)
        (target / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(file, target / TEMPLATES / file.name)


def _write_gguf_text(source: Path, target: Path, spec: ModelSpec) -> None:
    """The same of a GGUF file, in Hugging Face's form."""
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
    """Has everything on the disk before the name is: a machine that stops leaves no half folder."""
    for path in [*folder.rglob("*"), folder]:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def summary(converted: Converted) -> str:
    """One line for the person who asked for it."""
    kind = converted.dtype if converted.quantization == "none" else converted.quantization
    form = "packed for the CPU kernels" if converted.packed else "plain matrices"
    size = f"{bytes_text(converted.weight_bytes)} of weights"
    of_each = "" if converted.shards == 1 else f" for each of {converted.shards} devices"
    return f"{converted.folder}: {size}{of_each}, {kind}, {form}"
