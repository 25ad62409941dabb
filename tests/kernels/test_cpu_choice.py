"""The CPU kernels' choice of an instruction set, and its single measurement."""

import ctypes
import json
import logging
import typing
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from forge_jax.config import Kernels
from forge_kernels.cpu import BuildError, library
from forge_kernels.cpu.build import ISAS, CompilerTooOld

choice = import_module("forge_kernels.cpu.choice")
BF16 = ISAS["avx512_bf16"]
XEON = {"avx512_bf16": 106.5, "avx512_vnni": 206.5}
EPYC = {"avx512_bf16": 232.0, "avx512_vnni": 115.0}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch):
    """Replace measurements by prepared ones; each is used once."""
    to_come: list[dict[str, float]] = []
    monkeypatch.setattr(choice, "measure", lambda *_: to_come.pop(0))
    return to_come


@pytest.mark.parametrize(
    ("gflops", "isa"),
    [
        (EPYC, "avx512_bf16"),
        (XEON, "avx512_vnni"),
        ({"avx512_bf16": 100.0, "avx512_vnni": 109.0}, "avx512_bf16"),
        ({"avx512_bf16": 100.0, "avx512_vnni": 111.0}, "avx512_vnni"),
    ],
)
def test_faster_dot_product_wins(measured, tmp_path, gflops, isa):
    measured.append(gflops)
    found = choice.choose(BF16, tmp_path)
    assert (found.isa, found.gflops) == (isa, gflops)


def test_measurement_is_made_once(measured, tmp_path):
    measured += [EPYC, XEON]
    first = choice.choose(BF16, tmp_path)
    assert choice.choose(BF16, tmp_path) == first and measured == [XEON]


def test_another_cpu_is_measured_separately(measured, tmp_path, monkeypatch):
    measured += [EPYC, XEON]
    choice.choose(BF16, tmp_path)
    monkeypatch.setattr(choice.build, "cpu_identity", lambda: "another")
    assert choice.choose(BF16, tmp_path).isa == "avx512_vnni"
    monkeypatch.undo()
    assert choice.choose(BF16, tmp_path).isa == "avx512_bf16"


def test_concurrent_callers_share_one_measurement(measured, tmp_path):
    measured += [EPYC, XEON]
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda _: choice.choose(BF16, tmp_path).isa, range(8)))
    assert found == {"avx512_bf16"} and measured == [XEON]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", json.dumps(EPYC | {"avx512_vnni": -1.0}), '{"avx512_bf16": NaN}'],
)
def test_damaged_record_is_measured_again(measured, tmp_path, caplog, text):
    measured += [EPYC, EPYC]
    found = choice.choose(BF16, tmp_path)
    [path] = tmp_path.iterdir()
    path.write_text(text)
    assert choice.choose(BF16, tmp_path) == found and measured == []
    assert "measured again" in caplog.text
    assert json.loads(path.read_text()) == EPYC


def test_record_writable_by_others_is_measured_again(measured, tmp_path, caplog):
    measured += [EPYC, EPYC]
    choice.choose(BF16, tmp_path)
    [path] = tmp_path.iterdir()
    path.write_text(json.dumps(XEON))
    path.chmod(0o666)
    assert choice.choose(BF16, tmp_path).isa == "avx512_bf16"
    assert "others can write" in caplog.text


def test_folder_writable_by_others_is_rejected(measured, tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(BuildError, match="nothing is loaded from"):
        choice.choose(BF16, tmp_path)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "avx512_bf16"])
def test_only_cpus_with_bf16_are_measured(measured, tmp_path, isa):
    assert choice.choose(ISAS[isa], tmp_path) == choice.Choice(isa)
    assert not list(tmp_path.iterdir())


def test_compiler_without_bf16_selects_the_next_instruction_set(tmp_path, monkeypatch):
    def too_old(*_):
        raise CompilerTooOld("g++: unrecognized command-line option '-mavx512bf16'")

    monkeypatch.setattr(choice, "measure", too_old)
    assert choice.choose(BF16, tmp_path).isa == "avx512_vnni"


def test_instruction_set_without_flags_is_followed_by_the_next(tmp_path, monkeypatch, caplog):
    def build(isa: str, folder: Path, new_bar: object) -> Path:
        if isa == "avx2_vnni":
            raise CompilerTooOld("g++: unrecognized command-line option '-mavxvnni'")
        return folder / f"{isa}.so"

    monkeypatch.setattr(library, "cpu_features", lambda: ISAS["avx2_vnni"])
    monkeypatch.setattr(library, "build", build)
    assert library._fastest(tmp_path) == (choice.Choice("avx2"), tmp_path / "avx2.so")
    assert "the CPU kernels do without avx2_vnni" in caplog.text


def test_instruction_set_that_the_cpu_lacks_is_rejected(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "cpu_features", lambda: ISAS["avx512"])
    with pytest.raises(BuildError, match="does not run avx512_bf16: choose one of avx512, avx2"):
        library._asked_for("avx512_bf16", tmp_path)
    with pytest.raises(BuildError, match="sse9 does not exist"):
        library._asked_for("sse9", tmp_path)


def test_process_has_one_instruction_set(cpu_kernels):
    other = next(isa for isa in ISAS if isa != cpu_kernels)
    assert library.available(cpu_kernels)
    with pytest.raises(BuildError, match=f"loaded {cpu_kernels}: use {other} in another process"):
        library.available(other)


def test_option_lists_every_instruction_set():
    assert set(typing.get_args(Kernels)) == {"auto", "xla", "amx", *ISAS}


def test_log_names_the_choice_and_the_measurement(cpu_kernels, caplog, monkeypatch):
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(library.jax.ffi, "register_ffi_target", lambda *_, **__: None)
    with caplog.at_level(logging.INFO, "forge_kernels"):
        library.load()
    assert f"CPU kernels: {cpu_kernels}" in caplog.text
    chosen = library.chosen()
    assert chosen is not None
    for isa, value in chosen.gflops.items():
        assert value > 0 and f"{isa} {value:.0f}" in caplog.text


# ---- tiles --------------------------------------------------------------------------------------

NO_LIBRARY: Any = None  # for cases without measurements


def times(*faster_from: int | None) -> dict[str, dict[str, list[float]]]:
    """Return times of each format that make tiles faster from these row counts on."""
    return {
        form: {
            str(rows): [1e-3, 0.5e-3 if least is not None and rows >= least else 2e-3]
            for rows in choice.TILE_ROWS
        }
        for form, least in zip(choice.TILE_FORMATS, faster_from, strict=True)
    }


@pytest.mark.parametrize("least", [1, 4, 32, None])
def test_tiles_are_used_from_the_row_count_where_they_win(least):
    assert choice.crossover(times(least, 1, 1)["bf16"]) == least


def test_slightly_slower_tiles_are_used():
    seconds = {"1": [1.0, 1.04], "2": [1.0, 1.2], "4": [1.0, 1.04], "8": [1.0, 0.1]}
    assert choice.crossover(seconds) == 4


def test_tiles_are_measured_once(tmp_path, monkeypatch):
    to_come = [times(8, 2, 4), times(1, 1, 1)]
    monkeypatch.setattr(choice, "measure_tiles", lambda _: to_come.pop(0))
    found = choice.choose_tiles(NO_LIBRARY, "avx512_bf16-1", tmp_path)
    assert found == choice.Tiles(8, 2, 4)
    assert found == choice.choose_tiles(NO_LIBRARY, "avx512_bf16-1", tmp_path)
    assert choice.choose_tiles(NO_LIBRARY, "avx512_bf16-2", tmp_path) == choice.Tiles(1, 1, 1)
    said = (
        "bfloat16 from 8 rows on, int8 from 2 rows on, int4 and rounded GGUF blocks from 4 rows on"
    )
    assert str(found) == said


@pytest.mark.parametrize("damage", ["bf16", "1", "seconds"])
def test_damaged_times_are_measured_again(tmp_path, monkeypatch, caplog, damage):
    monkeypatch.setattr(choice, "measure_tiles", lambda _: times(8, 2, 4))
    choice.choose_tiles(NO_LIBRARY, "name", tmp_path)
    [path] = tmp_path.iterdir()
    wrong = times(1, 1, 1)
    if damage == "bf16":
        del wrong["bf16"]
    elif damage == "1":
        del wrong["int8"]["1"]
    else:
        wrong["int8"]["1"][0] = 0.0
    path.write_text(json.dumps(wrong))
    assert choice.choose_tiles(NO_LIBRARY, "name", tmp_path) == choice.Tiles(8, 2, 4)
    assert "measured again" in caplog.text


class Tiled:
    """A library on a CPU with or without AMX."""

    def __init__(self, has_tiles: bool):
        self.forge_request_tiles = lambda: has_tiles
        self.rows: tuple[int, ...] = ()

    def forge_use_tiles(self, *rows: ctypes.c_int64) -> None:
        self.rows = tuple(each.value for each in rows)


def test_measured_row_count_reaches_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "measure_tiles", lambda _: times(8, None, 4))
    loaded: Any = Tiled(True)
    assert library._tiles(loaded, Path("a.so"), None, tmp_path) == choice.Tiles(8, None, 4)
    assert loaded.rows == (8, -1, 4)
    assert library._tiles(loaded, Path("a.so"), "amx", tmp_path) == choice.ALL_TILES
    assert loaded.rows == (1, 1, 1)


def test_tiles_are_absent_without_amx(tmp_path):
    loaded: Any = Tiled(False)
    assert library._tiles(loaded, Path("a.so"), None, tmp_path) is None
    assert not list(tmp_path.iterdir())
    with pytest.raises(BuildError, match="no AMX with bfloat16 and int8, or the system does not"):
        library._tiles(loaded, Path("a.so"), "amx", tmp_path)


@pytest.mark.parametrize("form", choice.TILE_FORMATS)
def test_library_times_rows_without_tiles(cpu_kernels, form):
    time = library.library().forge_time_linear
    time.restype = ctypes.c_double
    number, make = choice.TILE_FORMATS[form]
    weights = make(64 * 64)
    numbers = (ctypes.c_int64(n) for n in (number, 3, 64, 64, 0))
    assert time(ctypes.c_void_p(weights.ctypes.data), *numbers) > 0
