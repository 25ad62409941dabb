"""Bundles: starts load compiled executables, and compile them if anything differs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from forge_jax import LLM, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine import builder
from forge_jax.engine.bundle import with_blocks
from forge_jax.errors import ConfigError
from forge_jax.step import bundle as bundles
from forge_jax.step.bundle import MANIFEST, Bundle, BundleError, tree_of
from forge_jax.step.executables import Executables
from forge_jax.step.slots import slots_shape
from forge_jax.telemetry.startup import StartupTimes
from forge_jax.tools.compile import compile_bundle
from forge_kernels.attention import QuantizedKV
from forge_serve.cli import main as cli
from tests.server_process import virtual_devices

pytestmark = pytest.mark.quick_compile

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "bfloat16",
    "num_blocks": 64,
}
GREEDY = SamplingParams(max_tokens=24, temperature=0)
SAMPLED = SamplingParams(max_tokens=24, seed=3, presence_penalty=0.5, logit_bias={17: 2.0}, n=2)
PROMPTS = [[1, 403, 407], list(range(1, 90)), [5] * 17]

EXIT = """
import sys
from forge_jax import LLM
LLM(sys.argv[1], compile_cache_dir=sys.argv[2], max_num_seqs=4, max_num_batched_tokens=64,
    dtype="bfloat16", num_blocks=64)
"""


def config(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(model=str(model), **OPTIONS | options)


def tokens(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, GREEDY, progress=False)
    outputs += llm.generate(PROMPTS, SAMPLED, progress=False)
    return [[tuple(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(short_stories):
    """Return the tokens and embeddings of an engine that compiles, with JAX's cache."""
    llm = LLM(str(short_stories), **OPTIONS)
    return tokens(llm), llm.embed(PROMPTS, progress=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bundle") / "written"


@pytest.fixture(scope="module", autouse=True)
def reported(short_stories, expected, written) -> str:
    """Write the bundle, while JAX's cache has the same executables. Return the command's output."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        arguments = ["compile", str(short_stories), "--output", str(written), *flags]
        assert cli.main([*arguments, "--compile-cache", str(written)]) == 0
    return output.getvalue()


@pytest.fixture
def copy(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


@pytest.fixture
def compiled(monkeypatch):
    """Return a list that receives the name of each function that is traced."""
    names: list[str] = []
    lower = Executables._lower

    def record(self, jitted, args):
        names.append(jitted.__name__)
        return lower(self, jitted, args)

    monkeypatch.setattr(Executables, "_lower", record)
    return names


@pytest.fixture
def warnings(caplog):
    """Return a function that returns the bundles' warnings."""
    caplog.set_level(logging.WARNING)

    def bundle_warnings() -> list[str]:
        return [each.getMessage() for each in caplog.records if "bundle" in each.getMessage()]

    return bundle_warnings


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of the identity, or fields of the manifest."""
    file = folder / MANIFEST
    manifest = json.loads(file.read_text())
    for name, value in changes.items():
        place = manifest if name in manifest else manifest["identity"]
        assert name in place
        place[name] = value
    file.write_text(json.dumps(manifest))


def chosen(model: Path, folder: Path | None, **options: Any) -> builder.Design:
    """Return the design of a start, which has a bundle if it will be loaded."""
    cache = None if folder is None else str(folder)
    wanted = config(model, compile_cache_dir=cache, **options)
    return builder._with_bundle(builder.make_design(wanted, StartupTimes()))


def test_tokens_and_embeddings_are_the_same_with_a_bundle(
    short_stories, expected, written, compiled, warnings
):
    llm = LLM(str(short_stories), compile_cache_dir=str(written), **OPTIONS)
    assert tokens(llm) == expected[0]
    np.testing.assert_array_equal(llm.embed(PROMPTS, progress=False), expected[1])
    assert compiled == [] and warnings() == []


def test_loaded_executables_have_memory_figures_and_programs(short_stories, written):
    llm = LLM(str(short_stories), compile_cache_dir=str(written), **OPTIONS)
    steps = llm._parts.steps
    assert steps is not None
    for name, step in steps.compiled().items():
        memory = step.memory_analysis()
        assert memory is not None and memory.argument_size_in_bytes > 0
        assert f"HloModule jit_{name.replace('[', '_').replace(']', '')}" in (step.as_text() or "")


def test_bundle_does_not_become_a_compilation_cache(short_stories, written):
    before = jax.config.jax_compilation_cache_dir
    files = sorted(written.iterdir())
    chosen(short_stories, written)
    assert jax.config.jax_compilation_cache_dir == before
    assert sorted(written.iterdir()) == files


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"max_num_seqs": 3}, "--max-num-seqs is 3, but 4 in the bundle (also different: shapes"),
        ({"max_num_batched_tokens": 128}, "--max-num-batched-tokens is 128, but 64 in the bundle"),
        ({"max_model_len": 256}, "--max-model-len is 256, but 512 in the bundle"),
        ({"num_blocks": 32}, "--num-blocks is 32, but 64 in the bundle"),
        ({"num_blocks": None}, "--num-blocks is the default, "),
        ({"block_size": 8}, "--block-size is 8, but 16 in the bundle"),
        ({"dtype": "float32"}, "--dtype is float32, but bfloat16 in the bundle"),
        ({"kv_dtype": "int8"}, "--kv-dtype is int8, but uint16 in the bundle"),
        ({"kernels": "xla"}, "--kernels is ["),
        ({"quantization": "int8"}, "model is "),
        ({"deterministic": True}, "--deterministic is True, but False in the bundle"),
        ({"command_buffers": False}, "--no-command-buffers is True, but False in the bundle"),
        ({"max_loras": 1}, "--max-loras is 1, but not set in the bundle"),
        ({"speculation": "ngram"}, "shapes of steps is "),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_other_options_are_named_and_nothing_is_loaded(
    short_stories, written, warnings, options, warning
):
    assert chosen(short_stories, written).bundle is not None
    assert chosen(short_stories, written, **options).bundle is None
    [found] = warnings()
    assert f"bundle {written}: not used, so this start compiles: " in found
    assert warning in found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forge-jax", "0.0.9"),
        ("forge-jax's source code", "0123456789ab"),
        ("jax", "0.11.1"),
        ("jaxlib", "0.11.1"),
        ("XLA's CUDA plugin", "0.11.1"),
        ("device", "gpu, compute capability 9.0, 132 multiprocessors"),
        ("XLA_FLAGS", "--xla_other=1"),
        ("jax_enable_x64", True),
        ("jax_default_matmul_precision", "highest"),
        ("compiler options", {"xla_other": True}),
    ],
)
def test_other_environments_are_named_and_nothing_is_loaded(
    short_stories, copy, warnings, name, value
):
    edit(copy, **{name: value})
    assert chosen(short_stories, copy).bundle is None
    [warning] = warnings()
    assert f"{name} is " in warning and str(value) in warning


def test_other_model_is_not_loaded(stories, written, warnings):
    assert chosen(stories, written).bundle is None
    assert "model is" in warnings()[0]


def test_bundle_of_a_family_whose_code_changed_is_not_loaded(
    short_stories, written, warnings, monkeypatch
):
    monkeypatch.setattr("forge_jax.engine.bundle.code_digest", lambda name: "0123456789ab")
    assert chosen(short_stories, written).bundle is None
    assert "model is" in warnings()[0]


def test_several_devices_do_not_load_a_bundle(short_stories, written):
    design = chosen(short_stories, written)
    assert design.bundle is not None
    here = builder.identity(design, builder.runner_options(design)) | {"--tensor-parallel": 2}
    difference = design.bundle.difference(here)
    assert difference == "--tensor-parallel is 2, but 1 in the bundle"


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("", "bundle.json is damaged"),
        ("{", "bundle.json is damaged"),
        ("[]", "bundle.json has format not set, not 1"),
        ('{"format": 2}', "bundle.json has format 2, not 1"),
        ('{"format": 1, "identity": {}}', "bundle.json is damaged: Object missing"),
    ],
)
def test_damaged_manifest_is_named_in_a_warning(short_stories, copy, warnings, text, warning):
    (copy / MANIFEST).write_text(text)
    assert chosen(short_stories, copy).bundle is None
    assert warning in warnings()[0]


def test_default_kv_cache_shrinks_to_the_bundles(short_stories, copy, warnings):
    default = chosen(short_stories, None, num_blocks=None).sizes
    smaller = default.kv.num_blocks // 2
    changes = {"num_blocks": smaller, "--num-blocks": f"the default, {smaller}"}
    edit(copy, **changes, **{"--max-model-len": default.max_model_len})
    design = chosen(short_stories, copy, num_blocks=None)
    assert design.bundle is not None and warnings() == []
    assert design.sizes.kv.num_blocks == smaller
    with_bundle = config(short_stories, compile_cache_dir=str(copy), num_blocks=None)
    assert with_blocks(with_bundle, 7) == with_bundle
    without, asked = (config(short_stories, num_blocks=n) for n in (None, 5))
    assert with_blocks(without, 7).cache.num_blocks == 7
    assert with_blocks(asked, 7) == asked
    larger = 2 * default.kv.num_blocks
    edit(copy, **{"num_blocks": larger, "--num-blocks": f"the default, {larger}"})
    assert chosen(short_stories, copy, num_blocks=None).sizes == default
    assert f"--num-blocks is the default, {default.kv.num_blocks}, but" in warnings()[0]


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_damaged_executables_are_compiled_after_one_warning(
    short_stories, expected, copy, compiled, warnings
):
    damage(copy / "mixed-64.xla")
    (copy / "decode-4.xla").unlink()
    llm = LLM(str(short_stories), compile_cache_dir=str(copy), **OPTIONS)
    assert tokens(llm) == expected[0]
    assert sorted(compiled) == ["decode_4", "mixed_64"]
    [warning] = warnings()
    assert "mixed-64.xla" in warning and "its checksum differs" in warning


def test_executable_that_xla_rejects_is_compiled(
    short_stories, expected, copy, compiled, warnings, monkeypatch
):
    """The checksum is right, but XLA's format is another."""
    file = copy / "mixed-64.xla"
    file.write_bytes(b"not an executable")
    entries = json.loads((copy / MANIFEST).read_text())["executables"]
    entries["mixed[64]"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    edit(copy, executables=entries)
    llm = LLM(str(short_stories), compile_cache_dir=str(copy), **OPTIONS)
    assert tokens(llm) == expected[0]
    assert compiled == ["mixed_64"]
    assert "mixed-64.xla is compiled again, because it cannot be loaded" in warnings()[0]


def test_executable_of_another_user_is_not_loaded(short_stories, copy, compiled, warnings):
    (copy / "admit.xla").chmod(0o666)
    LLM(str(short_stories), compile_cache_dir=str(copy), **OPTIONS)
    assert compiled == ["admit"]
    assert "others can write to it" in warnings()[0]


def test_bundle_that_others_can_write_is_rejected(short_stories, copy, monkeypatch):
    copy.chmod(0o777)
    with pytest.raises(ConfigError, match=r"--compile-cache .*others can write to it: chmod 700"):
        chosen(short_stories, copy)
    copy.chmod(0o755)
    (copy / MANIFEST).chmod(0o666)
    with pytest.raises(ConfigError, match=r"--compile-cache .*others can write to it"):
        chosen(short_stories, copy)
    (copy / MANIFEST).chmod(0o644)
    assert chosen(short_stories, copy).bundle is not None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_bundle_of_another_user_is_rejected(short_stories, copy):
    os.chown(copy, 12345, -1)
    with pytest.raises(ConfigError, match=r"--compile-cache .*belongs to another user"):
        chosen(short_stories, copy)
    os.chown(copy, 0, -1)
    os.chown(copy / MANIFEST, 12345, -1)
    with pytest.raises(ConfigError, match=r"--compile-cache .*belongs to another user"):
        chosen(short_stories, copy)


def test_other_argument_shapes_are_not_loaded(short_stories, written, warnings):
    [device, *_] = jax.devices()
    bundle = Bundle(written, device)
    design = chosen(short_stories, written)
    steps = builder.Runner(design.model, builder.runner_options(design))._builder
    [shape, *_] = design.bundle and builder.runner_options(design).shapes
    args = tuple(steps._step_inputs(shape))
    assert bundle.find(shape.name, args) is not None and warnings() == []
    wider = jax.ShapeDtypeStruct((shape.width + 1,), np.int32)
    assert bundle.find(shape.name, (*args[:3], wider, *args[4:])) is None
    assert bundle.find("unknown", args) is None
    [warning] = warnings()
    assert f"{shape.name} is compiled, because its arguments have other shapes here" in warning


def test_descriptions_of_arguments_keep_types_and_order():
    def leaf(dtype: str, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

    cache = QuantizedKV(leaf("float8_e4m3fn", 2, 3), leaf("float32", 2))
    state = {"b": leaf("int32", 4), "a": leaf("float32", 4, 0)}
    tree = ((cache, (), state), slots_shape(2, 3, 5), None, leaf("bfloat16"), leaf("int4", 4))
    assert bundles._built(tree_of(tree)) == tree
    assert type(bundles._built(tree_of(tree))[1]).__name__ == "Slots"
    with pytest.raises(BundleError, match="cannot describe list"):
        tree_of([leaf("int8")])


def test_output_folder_must_be_empty(short_stories, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output .* is not empty: choose another folder"):
        compile_bundle(config(short_stories), tmp_path)
    with pytest.raises(ConfigError, match=r"--output .*Not a directory"):
        compile_bundle(config(short_stories), tmp_path / "file")


def test_several_devices_are_rejected(short_stories, tmp_path):
    with pytest.raises(ConfigError, match=r"--tensor-parallel 2: a bundle holds .* one device"):
        compile_bundle(config(short_stories, tensor_parallel=2), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_missing_gpu_compiler_is_named_in_the_error(short_stories, tmp_path, monkeypatch):
    from forge_jax.step.targets import topology

    monkeypatch.setattr(topology, "_installed", lambda name: name != "nvidia-nvvm")
    with pytest.raises(ConfigError, match=r"--target h200: .* needs nvidia-nvvm: .*aot"):
        compile_bundle(config(short_stories), tmp_path / "out", "h200")
    with pytest.raises(ConfigError, match=r"--target must be one of h200, .*cpu, not v100"):
        compile_bundle(config(short_stories), tmp_path / "out", "v100")


def test_failed_write_leaves_nothing(short_stories, tmp_path, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundles, "write_private", full)
    executables = Executables()
    executables.add("double", lambda x: 2 * x, jax.ShapeDtypeStruct((2,), np.float32))
    with pytest.raises(OSError, match="No space left"):
        bundles.write_bundle(tmp_path / "out", {}, 1, {"double": executables["double"]})
    executables.close()
    assert not list(tmp_path.iterdir())


def test_functions_with_constants_are_not_stored():
    constant = jax.numpy.arange(3.0)

    def called_back(x):
        return jax.pure_callback(lambda y: y, x, x)

    executables = Executables()
    shape = jax.ShapeDtypeStruct((3,), np.float32)
    executables.add("called back", called_back, shape)
    with pytest.raises(BundleError, match="called back cannot be stored, because it depends on"):
        bundles.serialize("called back", executables["called back"])
    executables.add("constant", lambda x: x + constant, shape)
    executables.close()
    data, entry = bundles.serialize("constant", executables["constant"])
    assert data and entry.arguments == {"tuple": ["float32[3]"]}


def test_compile_command_reports_its_output(short_stories, written, reported, capsys):
    assert re.search(
        rf"{written}: 6 executables for cpu, \d[\d.]* MB, with a KV .* 64 bl", reported
    )
    assert not any(file.stat().st_mode & 0o022 for file in (written, *written.iterdir()))
    arguments = ["compile", str(short_stories), "--output", str(written), "--target", "cpu"]
    assert cli.main(arguments) == 1
    assert f"--output {written} is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--target", "v100"])
    assert "--target: unknown value 'v100'" in capsys.readouterr().err


@pytest.mark.slow
def test_draft_model_and_adapters_are_loaded(short_stories, tmp_path, compiled, warnings):
    options = {"speculation": "draft", "draft_model": "self", "draft_layers": 1, "max_loras": 1}
    options |= {"draft_verification": "rejection", "max_lora_rank": 4}
    compile_bundle(config(short_stories, **options), tmp_path / "out")
    without = tokens(LLM(str(short_stories), **OPTIONS | options))
    compiled.clear()
    llm = LLM(str(short_stories), compile_cache_dir=str(tmp_path / "out"), **OPTIONS | options)
    assert tokens(llm) == without
    assert compiled == [] and warnings() == []


@pytest.mark.slow
def test_processes_with_a_bundle_exit_cleanly(short_stories, written):
    """A thread that loads during finalization would abort the process."""
    command = [sys.executable, "-c", EXIT, str(short_stories), str(written)]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(8)]
    for child in children:
        _, errors = child.communicate(timeout=180)
        assert child.returncode == 0, errors.decode()


@pytest.mark.slow
def test_another_device_of_the_same_kind_loads_a_bundle(short_stories, tmp_path):
    code = """
import sys
from forge_jax import LLM, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.step.executables import Executables
from forge_jax.tools.compile import compile_bundle
options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 64}
compile_bundle(EngineConfig.from_options(model=sys.argv[1], **options), sys.argv[2])
Executables._lower = None
llm = LLM(sys.argv[1], compile_cache_dir=sys.argv[2], device=1, **options)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), progress=False)
print(llm._core.device.state.slots.last_token.devices())
"""
    environment = os.environ | {"XLA_FLAGS": virtual_devices(2)}
    command = [sys.executable, "-c", code, str(short_stories), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "{CpuDevice(id=1)}", done.stderr
