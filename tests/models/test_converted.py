"""Converted folders: the bits of their model, written atomically, and validated on load."""

import json
import os
import pty
import random
import re
import shutil
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest
import test_quantized as quantized
from gguf_writer import Q, write_gguf
from lora_files import weights_of

import forge_jax
from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint import load as loading
from forge_jax.checkpoint import mapped, orbax
from forge_jax.checkpoint.converted import FILE, WEIGHTS, Record, write_record
from forge_jax.checkpoint.load import check_weights, load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.readers import ConvertedReader
from forge_jax.config import EngineConfig
from forge_jax.engine.builder import choose_device, choose_kernels, may_map, read_converted
from forge_jax.engine.fingerprint import system_fingerprint
from forge_jax.errors import CheckpointError, ConfigError, ForgeError, ModelError
from forge_jax.models import build_model
from forge_jax.text.load import load_text
from forge_jax.tools import convert
from forge_jax.weights.quantized import QuantizedFormat
from forge_kernels import cpu
from forge_kernels.cpu import BuildError, library
from forge_kernels.cpu.build import find_compiler
from forge_kernels.linear.packed import LAYOUT

FAKE_COMPILER = """#!/bin/sh
case "$*" in *probe.cc*) exec {real} "$@";; --version) exit;; esac
for last; do :; done
echo > "$last"
"""
Q0 = "model.layers.0.self_attn.q_proj.weight"
OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256}


def converted(model, out, **options) -> Path:
    config = EngineConfig.from_options(model=str(model), **options)
    return convert.convert(config, out, progress=False).folder


def engine_leaves(folder, **options):
    """Return (model, leaves) as an engine has them."""
    config = EngineConfig.from_options(model=str(folder), **options)
    spec = read_spec(folder)
    kernels = choose_kernels(config, spec, choose_device(config), read_converted(config, folder))
    model = build_model(spec, config.model.dtype, kernels.formats)
    return model, load_weights(model, folder, progress=False)


def assert_same_bits(got, expected):
    assert got[0].names == expected[0].names and got[0].packings == expected[0].packings
    for name, ours, theirs in zip(got[0].names, got[1], expected[1], strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
        np.testing.assert_array_equal(
            np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8), name
        )


@pytest.fixture(scope="module")
def llama2(goldens, tmp_path_factory):
    """Return a converted folder, for tests that change a copy of it."""
    return converted(goldens / "llama2", tmp_path_factory.mktemp("llama2") / "out")


@pytest.fixture
def folder(llama2, tmp_path):
    return shutil.copytree(llama2, tmp_path / "copy")


def load(folder, **options):
    return forge_jax.load(str(folder), progress=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "fp8", "dtype": "bfloat16"},
        {"quantization": "fp8", "dtype": "float32"},
        {"quantization": "int4", "kernels": "xla"},
    ],
)
def test_rounded_values_match_the_model(options, goldens, tmp_path):
    source = goldens / "llama2"
    out = converted(source, tmp_path / "out", **options)
    plain = {key: value for key, value in options.items() if key == "kernels"}
    assert_same_bits(engine_leaves(out, **plain), engine_leaves(source, **options))
    quantized = engine_leaves(out, **plain)[0].in_format(QuantizedFormat)
    assert {format.rounded for format in quantized.values()} == {True}
    if not plain:
        again = load(out)
        assert again.model.names == engine_leaves(source, **options)[0].names


@pytest.mark.parametrize("name", ["fp8_blocks", "int8_rows", "gptq_ordered", "gptq_zeros", "w4a16"])
def test_quantized_values_match_the_checkpoint(name, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    quantized.write(quantized.CASES[name], source)
    out = converted(source, tmp_path / "out")
    assert read_spec(out).quantization is not None
    assert_same_bits(engine_leaves(out), engine_leaves(source))
    size = sum(file.stat().st_size for file in (out / WEIGHTS).rglob("*") if file.is_file())
    assert size < 2 * sum(leaf.nbytes for leaf in engine_leaves(source)[1])


@pytest.mark.parametrize("name", ["llama2", "llama32_tied", "qwen3", "gemma3", "phi3", "mixtral"])
def test_converted_bits_match_the_model(name, goldens, tmp_path):
    source = goldens / name
    out = converted(source, tmp_path / "out")
    assert read_spec(out) == read_spec(source)
    assert_same_bits(engine_leaves(out), engine_leaves(source))


@pytest.mark.parametrize("options", [{}, {"kernels": "xla"}, {"quantization": "int8"},
                                     {"quantization": "int4"}])  # fmt: skip
@pytest.mark.parametrize("name", ["llama2", "qwen3_moe"])
def test_cast_quantized_and_packed_bits_match_the_model(name, options, goldens, tmp_path):
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    options = {"dtype": "bfloat16", **options}
    out = converted(goldens / name, tmp_path / "out", **options)
    assert read_spec(out).dtype == "bfloat16"
    got = engine_leaves(out)
    assert bool(got[0].packings) == ("kernels" not in options)
    assert_same_bits(got, engine_leaves(goldens / name, **options))
    assert_same_bits(
        got, engine_leaves(out, **options)
    )  # repeating the options is no contradiction


def test_orbax_reads_the_arrays(llama2):
    import orbax.checkpoint as ocp

    model, leaves = engine_leaves(llama2)
    wanted = dict.fromkeys(model.names, ocp.RestoreArgs(restore_type=np.ndarray))
    with ocp.PyTreeCheckpointer() as reader:
        arrays = reader.restore(llama2 / WEIGHTS, restore_args=wanted)
    assert arrays.keys() == set(model.names)
    for name, leaf in zip(model.names, leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(arrays[name]), leaf, name)


def test_leaves_follow_the_sharding(llama2):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model, expected = engine_leaves(llama2)
    leaves = load_weights(model, llama2, device=everywhere, progress=False)
    assert {leaf.sharding for leaf in leaves} == {everywhere}
    assert_same_bits((model, leaves), (model, expected))


@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0], ids=lambda kind: kind.name)
def test_gguf_file_converts_to_a_folder(kind, goldens, tmp_path):
    file = write_gguf(goldens / "gemma2", tmp_path / "model.gguf", kind)
    out = converted(file, tmp_path / "out")
    assert read_spec(out) == read_spec(file)
    assert_same_bits(engine_leaves(out), engine_leaves(file))


def test_gguf_tokenizer_and_templates_are_converted(stories, tmp_path):
    file = stories.parent / "stories260k-gguf" / "tinyllamas-stories-260k-f32.gguf"
    out = converted(file, tmp_path / "out")
    theirs, _ = load_text(file, None, 512)
    ours, _ = load_text(out, None, 512)
    assert ours.special_tokens == theirs.special_tokens
    for text in ("Once upon a time", "  é \n\n<s>x", ""):
        assert ours.encode(text) == theirs.encode(text)


def test_every_file_that_is_read_is_copied_from_the_bundled_model(tmp_path):
    bundled = Path(forge_jax.__file__).parent / "checkpoint" / "bundled" / "forge-tiny"
    source = shutil.copytree(bundled, tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}\r\n")
    (source / "notes.txt").write_text("not read")
    out = converted(source, tmp_path / "deep" / "out")
    assert_same_bits(engine_leaves(out), engine_leaves(source))
    names = {str(file.relative_to(out)) for file in out.rglob("*") if WEIGHTS not in file.parts}
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", FILE,
        "additional_chat_templates", "additional_chat_templates/rag.jinja",
    }  # fmt: skip
    for name in names - {FILE, "additional_chat_templates"}:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert [file.name for file in out.parent.iterdir()] == ["out"]


@pytest.mark.slow
def test_engine_serves_a_converted_model_and_draft_model(stories, tmp_path, monkeypatch):
    maps = []
    monkeypatch.setattr(loading, "map_arrays", lambda stored: maps.append(len(stored)) or {})
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    out = converted(stories, tmp_path / "out")

    def texts(model, **options):
        with LLM(str(model), deterministic=True, **OPTIONS, **options) as llm:
            outputs = llm.generate(["Once upon a time", "Lily"], greedy, progress=False)
            return [output.outputs[0].token_ids for output in outputs], llm.system_fingerprint

    drafted = {"speculation": "draft", "draft_model": str(out), "max_draft_tokens": 3, "mmap": True}
    original, fingerprint = texts(stories)
    got, other = texts(out, **drafted)
    assert got == original
    assert other != fingerprint
    assert len(maps) == 1  # only the model's, not the draft model's


@pytest.mark.parametrize(("options", "expected"), [({}, False), ({"mmap": True}, True)])
def test_weights_are_mapped_on_a_cpu_on_request(options, expected):
    config = EngineConfig.from_options(**options)
    assert may_map(config, jax.devices("cpu")[0]) is expected


def test_fingerprint_changes_with_the_weights(folder):
    device = jax.devices()[0]
    before = system_fingerprint(folder, device, {})
    for name in ("head.weight/0.0", "norm.weight/0"):
        file = folder / WEIGHTS / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert system_fingerprint(folder, device, {}) != before
        file.write_bytes(content)
    assert system_fingerprint(folder, device, {}) == before


# ---- rejections ---------------------------------------------------------------------------------


def test_non_empty_folder_is_not_touched(goldens, llama2, tmp_path):
    (tmp_path / "empty").mkdir()
    out = converted(goldens / "llama2", tmp_path / "empty")  # an empty folder may be replaced
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(ConfigError, match="is not empty"):
        converted(goldens / "llama2", out)
    assert before == {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        converted(goldens / "llama2", tmp_path / "file")
    with pytest.raises(ConfigError, match="is already converted"):
        converted(llama2, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_conversion_does_not_replace_a_new_folder(goldens, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def flush(_):
        out.mkdir()
        (out / "mine").write_text("")

    monkeypatch.setattr(convert, "_flush", flush)
    with pytest.raises(ConfigError, match="not empty"):
        converted(goldens / "llama2", out)
    assert [file.name for file in out.iterdir()] == ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("step", ["write_arrays", "_copy_text", "write_record", "_flush"])
def test_interrupted_conversion_leaves_nothing(step, goldens, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(orbax if step == "write_arrays" else convert, step, stop)
    with pytest.raises(KeyboardInterrupt):
        converted(goldens / "llama2", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_killed_conversion_leaves_nothing_at_the_destination(goldens, tmp_path):
    code = (
        "import os, sys; from forge_jax.tools import convert\n"
        "from forge_jax.config import EngineConfig\n"
        "convert.write_record = lambda *_: os.kill(os.getpid(), 9)\n"
        "convert.convert(EngineConfig.from_options(model=sys.argv[1]), sys.argv[2])"
    )
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", code, str(goldens / "llama2"), str(out)])
    assert done.returncode == -9 and not out.exists()
    [left] = tmp_path.iterdir()
    with pytest.raises(ModelError, match="has no weights"):
        load(left)
    assert engine_leaves(converted(goldens / "llama2", out))


@pytest.mark.slow
def test_build_and_conversion_show_their_progress_on_a_terminal(goldens, tmp_path):
    """The compiler makes an invalid library, so the weights are converted for plain XLA."""
    compiler = tmp_path / "fake-c++"
    compiler.write_text(FAKE_COMPILER.format(real=" ".join(find_compiler())))
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    command = [sys.executable, "-m", "forge_serve", "convert", str(goldens / "llama2")]
    command += [str(tmp_path / "out"), "--dtype", "bfloat16"]
    with subprocess.Popen(command, env=environment, stdout=slave, stderr=slave) as process:
        os.close(slave)
        shown = b""
        with suppress(OSError):  # the process has ended
            while part := os.read(master, 1 << 16):
                shown += part
    os.close(master)
    assert process.returncode == 0, shown.decode()
    for name in ("building the CPU kernels", "loading weights", "writing weights"):
        last = re.findall(rf"{name}: +(\d+)%", shown.decode())[-1]
        assert last == "100", shown.decode()


def test_options_that_contradict_the_weights_are_rejected(llama2, stories, tmp_path):
    with pytest.raises(CheckpointError, match=r"--dtype bfloat16: .* was converted to float32"):
        engine_leaves(llama2, dtype="bfloat16")
    with pytest.raises(CheckpointError, match="convert the original model again"):
        load(llama2, dtype="float16")
    with pytest.raises(CheckpointError, match=r"--quantization int8: .* without any"):
        engine_leaves(llama2, quantization="int8")
    drafted = {"speculation": "draft", "draft_model": str(converted(stories, tmp_path / "out"))}
    with pytest.raises(CheckpointError, match=r'dtype="bfloat16": .*out was converted to float32'):
        LLM(stories, dtype="bfloat16", **drafted)


def test_packed_weights_without_kernels_name_the_remedy(goldens, tmp_path, monkeypatch):
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    out = converted(goldens / "llama2", tmp_path / "out", dtype="bfloat16")
    assert load(out).model.packings
    with pytest.raises(ConfigError, match=r"--kernels xla is set. Convert the original model here"):
        engine_leaves(out, kernels="xla")

    def no_compiler(**_):
        raise BuildError("no C++ compiler: install g++")

    monkeypatch.setattr(library, "load", no_compiler)
    monkeypatch.setattr(library, "_why_not", library.functools.cache(library._why_not.__wrapped__))
    with pytest.raises(ConfigError, match=r"could not be built .*--kernels xla for all machines"):
        engine_leaves(out)
    with pytest.raises(ModelError, match='with kernels="xla"'):
        load(out)


RECORDS = {
    "format": (lambda r: r.update(format="other"), "format must be forge-jax-weights"),
    "version": (lambda r: r.update(version=2), "version must be 1, got 2: convert"),
    "version of another type": (lambda r: r.update(version=True), "version must be 1, got True"),
    "dtype": (lambda r: r.update(dtype="int8"), "dtype must be"),
    "another dtype": (lambda r: r.update(dtype="bfloat16"), "is float32.*, not bfloat16"),
    "dtype of a list": (lambda r: r.update(dtype=["float32"]), "dtype must be"),
    "quantization": (lambda r: r.update(quantization=4), "quantization must be"),
    "layout": (
        lambda r: r.update(packing={"layout": "panels-of-32", "layers": "bf16"}),
        f"packing.layout must be {LAYOUT} .*got 'panels-of-32': convert the original",
    ),
    "packing": (lambda r: r.update(packing=[]), "packing must be"),
    "form": (
        lambda r: r.update(packing={"layout": LAYOUT, "layers": "int2"}),
        "packing.layers must be",
    ),
    "no devices": (lambda r: r.update(shards=0), "shards must be from 1 to 1024, got 0: convert"),
    "devices of another type": (lambda r: r.update(shards=True), "shards must be"),
    "no leaves": (lambda r: r.update(leaves={}), "leaves must be"),
    "shape": (lambda r: r["leaves"]["norm.weight"].update(shape=[-1]), "norm.weight"),
    "shape of floats": (lambda r: r["leaves"]["norm.weight"].update(shape=[64.0]), "norm.weight"),
    "another shape": (
        lambda r: r["leaves"]["norm.weight"].update(shape=[65]),
        r"leaf 'norm.weight' is float32\[65\], not float32\[64\]",
    ),
    "type": (lambda r: r["leaves"]["norm.weight"].update(dtype="object"), "norm.weight"),
    "a leaf that is missing": (lambda r: r["leaves"].pop("norm.weight"), "is missing, not"),
    "one leaf more": (
        lambda r: r["leaves"].update(more={"shape": [1], "dtype": "float32"}),
        r"leaf 'more' is float32\[1\], not missing",
    ),
}


@pytest.mark.parametrize("case", RECORDS)
def test_invalid_record_is_named_in_the_error(case, folder):
    change, message = RECORDS[case]
    record = json.loads((folder / FILE).read_text())
    change(record)
    (folder / FILE).write_text(json.dumps(record))
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert FILE in str(caught.value)


NORM = "norm.weight"


def describe(folder, **changes):
    file = folder / WEIGHTS / NORM / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewritten(folder, **changes) -> None:
    """Rewrite the weights with other orbax settings."""
    import orbax.checkpoint as ocp

    model, leaves = engine_leaves(folder)
    shutil.rmtree(folder / WEIGHTS)
    tree = dict(zip(model.names, leaves, strict=True))
    options = {"use_ocdbt": False, "use_zarr3": False, "use_compression": False} | changes
    with ocp.PyTreeCheckpointer(**options) as writer:
        writer.save(folder / WEIGHTS, tree)


def a_pipe(folder):
    (folder / WEIGHTS / NORM / "0").unlink()
    os.mkfifo(folder / WEIGHTS / NORM / "0")


def a_link(folder):
    file = folder / WEIGHTS / NORM / "0"
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")


def describe_by_a_pipe(folder):
    file = folder / WEIGHTS / NORM / ".zarray"
    file.unlink()
    os.mkfifo(file)


BROKEN = {
    "no weights": (lambda f: shutil.rmtree(f / WEIGHTS), r"is missing \(and \d+ more\)"),
    "no such array": (lambda f: shutil.rmtree(f / WEIGHTS / NORM), f"array {NORM} is missing$"),
    "no description": (lambda f: (f / WEIGHTS / NORM / ".zarray").unlink(), f"{NORM} is missing"),
    "no data": (lambda f: (f / WEIGHTS / NORM / "0").unlink(), f"array {NORM} has no file 0"),
    "half the data": (
        lambda f: os.truncate(f / WEIGHTS / NORM / "0", 128),
        f"array {NORM} has 128 bytes, not 256",
    ),
    "too much": (lambda f: os.truncate(f / WEIGHTS / NORM / "0", 2**40), f"has {2**40} bytes"),
    "a pipe": (a_pipe, "not an ordinary file"),
    "a link": (a_link, "not an ordinary file"),
    "a description that is a pipe": (
        describe_by_a_pipe,
        "cannot be opened: .*ordinary file",
    ),
    "no JSON": (
        lambda f: (f / WEIGHTS / NORM / ".zarray").write_text("{"),
        f"array {NORM} cannot be opened: .* not valid JSON",
    ),
    "a huge description": (
        lambda f: (f / WEIGHTS / NORM / ".zarray").write_text(" " * 2**20),
        "cannot be opened: .* at most 65536",
    ),
    "another shape": (lambda f: describe(f, shape=[63]), r"has shape \[63\], not \[64\]"),
    "another type": (lambda f: describe(f, dtype="bfloat16"), "has dtype 'bfloat16', not <f4"),
    "big-endian": (lambda f: describe(f, dtype=">f4"), "has dtype '>f4', not <f4"),
    "two faults": (
        lambda f: (describe(f, order="F"), shutil.rmtree(f / WEIGHTS / "head.weight")),
        f"array head.weight is missing.*array {NORM} has order 'F', not C|"
        f"array {NORM} has order 'F', not C; array head.weight is missing",
    ),
    "pieces": (lambda f: describe(f, chunks=[32]), r"has chunks \[32\], not \[64\]"),
    "compressed": (lambda f: rewritten(f, use_compression=True), "has compressor .*, not None"),
    "zarr 3": (lambda f: rewritten(f, use_zarr3=True), "is missing"),
    "a store": (lambda f: rewritten(f, use_ocdbt=True), "is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_weights_are_named_in_the_error(case, folder):
    change, message = BROKEN[case]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert len(str(caught.value)) < 3000


def test_changed_metadata_byte_is_an_error_or_harmless(folder):
    """The arrays themselves have no checksums."""
    model = build_model(read_spec(folder))
    before = check_weights(model, folder).stored
    rng = random.Random(0)
    file = folder / WEIGHTS / "layers.0.mlp.down.weight" / ".zarray"
    content = file.read_bytes()
    refused = 0
    for _ in range(200):
        broken = bytearray(content)
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        file.write_bytes(broken)
        try:
            assert check_weights(model, folder).stored == before
        except ForgeError:
            refused += 1
    assert refused > 150


def test_file_that_shrinks_during_a_read_is_an_error(folder):
    spec = read_spec(folder)
    checked = check_weights(build_model(spec), folder)
    file = folder / WEIGHTS / "head.weight" / "0.0"
    os.truncate(file, file.stat().st_size - 1)
    source = checked.stored["head.weight"]
    with pytest.raises(CheckpointError, match="shorter than when it was checked"):
        source.read_rows(np.empty(source.shape, source.dtype), 0)


@pytest.fixture
def huge_pages(monkeypatch):
    """Simulate a system that has all file pages in huge pages of one ordinary page each."""
    monkeypatch.setattr(mapped, "HUGE_PAGE", 4096)
    monkeypatch.setattr(mapped, "huge_bytes", lambda views: sum(view.nbytes for view in views))


def is_in_a_file(array):
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    at = array.unsafe_buffer_pointer()
    [line] = [line for line, (begin, end) in zip(maps, ranges, strict=True) if begin <= at < end]
    return WEIGHTS in line


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_large_leaves_may_stay_in_their_files(folder, huge_pages):
    model = build_model(read_spec(folder))
    expected = load_weights(model, folder, progress=False)
    found = load_weights(model, folder, mapped=True, progress=False)
    assert not any(map(is_in_a_file, expected))
    for name, mine, theirs in zip(model.names, found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs, name)
        assert is_in_a_file(mine) == (mine.nbytes >= 4096), name


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_leaves_in_small_pages_are_read(folder, huge_pages, monkeypatch):
    monkeypatch.setattr(mapped, "huge_bytes", lambda views: 0.8 * sum(v.nbytes for v in views))
    model = build_model(read_spec(folder))
    assert not any(map(is_in_a_file, load_weights(model, folder, mapped=True, progress=False)))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_pages_of_an_anonymous_array_do_not_count_as_file_huge_pages():
    assert mapped.huge_bytes([np.zeros(4096, np.uint8)]) == 0


def test_mapped_file_that_shrank_is_an_error(folder, huge_pages):
    checked = check_weights(build_model(read_spec(folder)), folder)
    assert isinstance(checked, ConvertedReader)
    os.truncate(folder / WEIGHTS / "head.weight" / "0.0", 100)
    with pytest.raises(CheckpointError, match="shorter than when it was checked"):
        mapped.map_arrays(checked.stored)


PEAK = """
import sys, pathlib
import jax.numpy as jnp
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models import build_model
from forge_jax.checkpoint.load import check_weights, load_weights

def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

folder = pathlib.Path(sys.argv[1])
model = build_model(read_spec(folder))
check_weights(model, folder)
jnp.zeros(8).block_until_ready()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
before = status("VmRSS")
leaves = load_weights(model, folder, progress=False)
print((status("VmHWM") - before) / model.param_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
def test_reading_takes_little_more_memory_than_the_weights(goldens, tmp_path):
    """The largest leaf, a sixteenth of the weights, exists twice: as read, and in place."""
    config = json.loads((goldens / "llama2" / "config.json").read_text())
    config |= {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 8, "torch_dtype": "float32",
    }  # fmt: skip
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    model = build_model(read_spec(source))
    leaves = {
        name: jax.numpy.ones(leaf.shape, leaf.dtype)
        for name, leaf in zip(model.names, model.leaves, strict=True)
    }
    orbax.write_arrays(source / WEIGHTS, leaves)
    named = dict(zip(model.names, model.leaves, strict=True))
    record = Record(folder=source, dtype="float32", quantization="none", formats={}, leaves=named)
    write_record(record)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(source)], check=True, capture_output=True, text=True
    )
    assert 0.9 < float(done.stdout) < 1.3


def test_convert_command_reports_its_output(goldens, tmp_path, capsys):
    from forge_serve.cli import main as cli

    out = tmp_path / "out"
    arguments = ["convert", str(goldens / "llama2"), str(out), "--dtype", "float16"]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert re.search(rf"{out}: \d[\d.]* kB of weights, float16, plain matrices", said)
    assert load(out).spec.dtype == "float16"
    assert cli.main(arguments) == 1
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--port", "1"])


def test_sharded_folder_is_written_without_the_devices_and_needs_them(goldens, tmp_path, capsys):
    from forge_serve.cli import main as cli

    out, model = tmp_path / "out", goldens / "llama2"
    assert cli.main(["convert", str(model), str(out), "--tensor-parallel", "2"]) == 0
    assert "B of weights for each of 2 devices, float32" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="converted for 2 devices: use tensor_parallel"):
        load(out)
    for device, q in enumerate(np.split(weights_of(model)[Q0], 2)):
        stored = np.fromfile(out / WEIGHTS / "layers.0.attention.qkv.weight" / "0.0.0", np.float32)
        assert np.array_equal(np.split(stored, 2)[device][: q.size], q.ravel())
    with pytest.raises(ConfigError, match=r"draft_model .* converted for 2 devices, but a"):
        LLM(str(model), speculation="draft", draft_model=str(out))
    other = tmp_path / "other"
    assert cli.main(["convert", str(model), str(other), "--tensor-parallel", "3"]) == 1
    assert "--tensor-parallel 3 does not divide" in capsys.readouterr().err
    assert not other.exists()
