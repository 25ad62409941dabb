"""Building and loading the C++ kernels, and checks that need a separate process or library."""

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import jax
import pytest

from forge_kernels import cpu
from forge_kernels.cpu import library
from forge_kernels.cpu.build import (
    ISAS,
    UNITS,
    BuildError,
    CompilerTooOld,
    build,
    cpu_features,
    default_folder,
    find_compiler,
    flags_of,
    runnable_isas,
)

pytestmark = [pytest.mark.long, pytest.mark.slow]

module = import_module("forge_kernels.cpu.build")
HERE = Path(__file__).parent


def compiler(folder: Path, body: str) -> str:
    """Write a compiler that counts its calls; `body` is its sh code."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "fake-cxx"
    script.write_text(f'#!/bin/sh\necho "$*" >> {folder}/calls\n{body}\n')
    script.chmod(0o755)
    return str(script)


WORKS = """for last; do :; done
case "$1" in --version) echo fake 1.0;; *) echo a library > "$last";; esac"""


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CXX", compiler(tmp_path, WORKS))
    return tmp_path


def test_built_library_is_found_again(fake):
    first = build("avx2", fake / "cache")
    assert first.read_text() == "a library\n"
    before = len(calls(fake))
    assert build("avx2", fake / "cache") == first
    # Only its version is read, which is part of the key.
    assert calls(fake)[before:] == ["--version"]
    assert [path.name for path in (fake / "cache").iterdir()] == [first.name]


def test_changed_sources_flags_or_compiler_trigger_a_rebuild(fake, monkeypatch):
    folder = fake / "cache"
    paths = [build("avx2", folder), build("avx512", folder)]
    copy = fake / "src"
    shutil.copytree(module.SOURCES, copy)
    monkeypatch.setattr(module, "SOURCES", copy)
    assert build("avx2", folder) == paths[0], "the same sources elsewhere"
    with (copy / "simd.h").open("a") as file:
        file.write("// changed\n")
    paths.append(build("avx2", folder))
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-g"))
    paths.append(build("avx2", folder))
    compiler(fake, WORKS.replace("1.0", "1.1"))
    paths.append(build("avx2", folder))
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "9.9")
    paths.append(build("avx2", folder))
    assert len(set(paths)) == len(paths) == len(list(folder.iterdir()))


def test_missing_compiler_error_names_the_package_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler .*: install g\+\+"):
        build("avx2", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler --flag")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        find_compiler()


def test_first_available_compiler_is_used(monkeypatch, tmp_path):
    for name in ("clang++", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() == ["g++"]
    monkeypatch.setenv("CXX", "clang++ -stdlib=libc++")
    assert find_compiler() == ["clang++", "-stdlib=libc++"]


def test_failing_compiler_is_quoted_and_leaves_nothing(monkeypatch, tmp_path):
    fails = 'case "$1" in --version) ;; *) echo "error: no such flag" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", compiler(tmp_path, fails))
    with pytest.raises(BuildError, match="could not build the CPU kernels: error: no such flag"):
        build("avx2", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_unrunnable_compiler_is_a_build_error(monkeypatch, tmp_path):
    script = tmp_path / "broken"
    script.write_bytes(b"\x7fELF nonsense")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match="could not be built"):
        build("avx2", tmp_path / "cache")


def test_unwritable_folder_is_a_build_error(fake):
    (fake / "file").write_text("")
    with pytest.raises(BuildError, match="could not be built"):
        build("avx2", fake / "file" / "cache")


def test_cache_is_readable_only_by_the_user(fake):
    folder = fake / "home" / "kernels"
    build("avx2", folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folder_writable_by_others_gives_no_kernels(fake):
    folder = fake / "cache"
    planted = build("avx2", folder)
    folder.chmod(0o777)
    with pytest.raises(BuildError, match=r"nothing is loaded from .*others can write to it"):
        build("avx2", folder)
    folder.chmod(0o700)
    fake.chmod(0o777)  # if the folder can be replaced
    with pytest.raises(BuildError, match=r"others can write to .*, which contains it"):
        build("avx2", folder)
    fake.chmod(0o700)
    assert build("avx2", folder) == planted


@pytest.mark.parametrize("kind", ["writable", "link"])
def test_library_writable_by_others_is_rebuilt(fake, caplog, kind):
    path = build("avx2", fake / "cache")
    path.write_text("planted")
    if kind == "writable":
        path.chmod(0o666)
    else:
        path.rename(fake / "planted")
        path.symlink_to(fake / "planted")
    assert build("avx2", fake / "cache") == path
    assert path.read_text() == "a library\n" and not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert "the CPU kernels are built again" in caplog.text


def test_cache_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "forge-jax" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "forge-jax" / "kernels"


CPUS = {  # the relevant part of /proc/cpuinfo: the instruction sets that they run
    "Zen 4, Sapphire Rapids": (
        ISAS["avx512_bf16"] | {"sse2"},
        ["avx512_bf16", "avx512_vnni", "avx512", "avx2"],
    ),
    "Cascade Lake": (ISAS["avx512_vnni"], ["avx512_vnni", "avx512", "avx2"]),
    "Skylake": (ISAS["avx512"], ["avx512", "avx2"]),
    "Xeon Phi": (ISAS["avx2"] | {"avx512f"}, ["avx2"]),
    "Alder Lake": (ISAS["avx2_vnni"], ["avx2_vnni", "avx2"]),
    "Haswell": (ISAS["avx2"], ["avx2"]),
}


@pytest.mark.parametrize("cpu_name", CPUS)
def test_instruction_sets_follow_from_the_cpu_features(cpu_name):
    features, isas = CPUS[cpu_name]
    assert runnable_isas(features) == isas


def test_cpu_without_avx2_and_fma_has_no_kernels():
    avx2 = ISAS["avx2"]
    for features in (avx2 - {"fma"}, avx2 - {"f16c"}, {"asimd", "bf16"}, ()):
        with pytest.raises(BuildError, match="need a CPU with AVX2, FMA and F16C"):
            runnable_isas(features)


def test_flags_match_gcc_and_clang():
    assert {"-mavx512bf16", "-mavx512vnni", "-mavx512vl", "-mfma"} <= set(flags_of("avx512_bf16"))
    assert set(flags_of("avx2_vnni")) - set(flags_of("avx2")) == {"-mavxvnni"}


def test_compiler_without_the_flag_is_reported_as_too_old(monkeypatch, tmp_path):
    says = "g++: error: unrecognized command-line option '-mavx512bf16'"
    fails = f'case "$1" in --version) ;; *) echo "{says}" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", compiler(tmp_path, fails))
    with pytest.raises(CompilerTooOld, match="-mavx512bf16"):
        build("avx512_bf16", tmp_path / "cache")


def test_features_are_those_of_the_first_cpu(monkeypatch):
    text = "processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    monkeypatch.setattr(module.Path, "read_text", lambda self: text)
    assert cpu_features() == {"fpu", "avx2", "fma"}

    def missing(self):
        raise FileNotFoundError(self)

    monkeypatch.setattr(module.Path, "read_text", missing)
    assert cpu_features() == frozenset()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the state to that of a process that has loaded nothing."""
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(library, "_why_not", library.functools.cache(library._why_not.__wrapped__))


def test_missing_kernels_are_reported_once(fresh, monkeypatch, caplog):
    monkeypatch.setattr(library, "cpu_features", frozenset)
    with caplog.at_level(logging.WARNING, "forge_kernels"):
        assert not cpu.available() and not cpu.available()
    assert len(caplog.records) == 1
    assert (
        "bfloat16 models run about half as fast: the CPU kernels need a CPU with AVX2"
        in caplog.text
    )
    with pytest.raises(BuildError):
        cpu.load()


def test_unloadable_library_is_a_build_error(fresh, fake):
    with pytest.raises(BuildError, match="could not be loaded"):
        cpu.load("avx2", fake / "cache")


def test_checked_library_is_the_one_that_is_loaded(cpu_kernels, tmp_path, monkeypatch):
    """Another file replaces the library between the check and the load."""
    path = tmp_path / "library.so"
    shutil.copyfile(build(cpu_kernels), path)
    path.chmod(0o700)
    loads = library.ctypes.CDLL

    def load(name: str):
        (tmp_path / "other").write_text("planted")
        (tmp_path / "other").replace(path)
        return loads(name)

    monkeypatch.setattr(library.ctypes, "CDLL", load)
    assert library._load_private(path).forge_pack
    assert path.read_text() == "planted"


# ---- in a separate process -----------------------------------------------------------------------


def child(*arguments: str) -> dict:
    """Return the results of `cpu_child.py`. All children compile the same programs once."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "cpu_child.py"), *arguments],
        env=os.environ | cache,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Each part of the code of `avx512_vnni` is also in `avx512_bf16` or `avx512`.
@pytest.mark.parametrize(
    ("isa", "runs"),
    [
        *((isa, True) for isa in ISAS if isa not in ("avx512_bf16", "avx512_vnni")),
        ("avx512_vnni", False),
        pytest.param("avx512_vnni", True, marks=pytest.mark.soak),
    ],
)
def test_other_instruction_sets_pass_the_same_checks(cpu_kernels, isa, runs, monkeypatch, tmp_path):
    from cpu_contract import digests
    from test_blocks import rounded_digests

    if not runs or isa not in runnable_isas(cpu_features()):
        monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-O0"))  # in a third of the time
        assert build(isa, tmp_path / "cache").exists()
        return
    result = child("--isa", isa)
    assert result["isa"] == isa and result["failed"] == {}
    # On rows rounded to int8, blocks have the same bits with every instruction set.
    assert result["rounded"] == rounded_digests()
    mine = digests()  # int8 and int4 also do
    for name in ("int8, residual", "int4, residual"):
        assert result["digests"][name] == mine[name]


def test_one_cpu_computes_the_same_bits(cpu_kernels):
    from cpu_contract import digests
    from test_attention import cpu_digests
    from test_blocks import rounded_digests

    result = child("--one-cpu", "--no-checks")
    assert result["isa"] == cpu_kernels and result["digests"] == digests() | cpu_digests()
    assert result["rounded"] == rounded_digests()


FAULTS = {  # file: (correct text, faulty text), each in its own part of the suite
    "rows.h": (
        # int8 has another offset of its weights; the last columns of a matrix are shifted.
        ("isplat(bias * packed.sums[row])", "isplat((bias - 1) * packed.sums[row])"),
        ("for (long i = 0; i < columns; ++i) {", "for (long i = 1; i < columns; ++i) {"),
        # Rows are rounded with a scale of 16 values instead of 32.
        ("float top = maximum(max(abs(first), abs(second)));", "float top = maximum(abs(first));"),
    ),
    "attention.h": (
        # A row sees one key too many, its window drops one too early, chunks lose their weight, and
        # rotation has a wrong sign.
        ("op.cu_q_lens[seq]) + row + 1;", "op.cu_q_lens[seq]) + row + 2;"),
        ("visible - op.window)", "visible - op.window + 1)"),
        ("next.total[i] * after", "next.total[i] * before"),
        ("fms(a, c, mul(b, s))", "fma(a, c, mul(b, s))"),
    ),
    "experts.h": (("weights[at] = op.weights[p];", "weights[at] = op.weights[at];"),),
    "lora.h": (("up.w = op.a + (p - 1) * a_bytes;", "up.w = op.a;"),),
    "pack.h": (("extreme / -8.0f", "extreme / -7.0f"),),
    "sampling.h": (("shift_right<15>(x)", "shift_right<14>(x)"),),
}


def test_checks_detect_planted_faults(cpu_kernels, tmp_path):
    shutil.copytree(module.SOURCES, tmp_path / "src")
    for name, faults in FAULTS.items():
        path = tmp_path / "src" / name
        text = path.read_text()
        for old, new in faults:
            assert text.count(old) >= 1, f"{name} has changed: plant another fault"
            text = text.replace(old, new)
        path.write_text(text)
    failed = child("--sources", str(tmp_path / "src"), "--quick-build")["failed"]
    assert {
        "linear int8, whole panels",
        "linear bf16, a tail of 15 columns",
        "rounded rows, 8 bits",
        "pack int4",
        "experts bf16, whole panels",
        "lora, whole panels",
        "attention, mixed",
        "attention, one decode, int8",
        "attention, many, fp8, window, soft cap",
        "rotate and write",
        "sampling",
    } <= set(failed)
    # Parts without a planted fault pass.
    assert not {"linear bf16, whole panels", "pack bf16", "pack int8", "embed bf16"} & set(failed)


# Continues when two processes have read its version, which is right before they build.
MEETS = """for last; do :; done
case "$1" in --version) echo fake 1.0; exit;; esac
until [ $(grep -c version {calls}) = 2 ]; do sleep 0.01; done
sleep 0.5
cp {library} "$last"
"""


def test_concurrent_processes_build_once(cpu_kernels, tmp_path):
    """Both find a complete library, whichever was first, and nothing else remains."""
    body = MEETS.format(calls=tmp_path / "calls", library=build(cpu_kernels))
    cache = tmp_path / "cache"
    command = f"from forge_kernels import cpu; print(cpu.load({cpu_kernels!r}))"
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "CXX": compiler(tmp_path, body)}

    def one(_: int) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", command],
            env=environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as threads:
        for done in threads.map(one, range(2)):
            assert (done.returncode, done.stdout.strip()) == (0, cpu_kernels), done.stderr
    asked = calls(tmp_path)
    assert asked.count("--version") == 2 and len(asked) == 2 + len(UNITS) + 1
    assert len(list((cache / "forge-jax" / "kernels").iterdir())) == 1


def test_processes_build_even_without_file_locks(fake, monkeypatch):
    def no_locks(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    assert build("avx2", fake / "cache").read_text() == "a library\n"


# ---- threads ------------------------------------------------------------------------------------


def stress(folder: Path, *changes: tuple[str, str]) -> int:
    """Return the stress test's exit code on `parallel.h`, for 1 to 100 threads up to a failure.

    The leader is delayed before it joins, and a helper before it sleeps, as if they lost their
    cores there. Helpers wait a shorter time for the next job, so most fall asleep. All this happens
    on a busy machine, but too rarely for a test.
    """
    text = (module.SOURCES / "parallel.h").read_text()
    pause = "std::this_thread::sleep_for(std::chrono::microseconds(200));"
    for old, new in (
        ("job->lead();", f"if (std::rand() % 4 == 0) {pause} job->lead();"),
        ("asleep.store(true);", f"{pause} asleep.store(true);"),
        ("microseconds(1000)", "microseconds(50)"),
        *changes,
    ):
        assert text.count(old) == 1, f"parallel.h has changed: {old}"
        text = text.replace(old, new)
    (folder / "parallel.h").write_text(text)
    source, program = HERE / "cpu_stress" / "stress.cc", folder / "stress"
    include = [f"-I{HERE / 'cpu_stress'}", f"-I{folder}"]
    command = [*find_compiler(), "-O1", "-std=c++17", "-pthread", *include, source, "-o", program]
    subprocess.run(command, check=True)
    pools = (("1", "1"), ("2", "1"), ("3", "1"), ("3", "3"), ("8", "1"), ("100", "3"))
    for threads, callers in pools:
        done = subprocess.run([program, threads, "200", callers], stdout=subprocess.DEVNULL)
        if done.returncode:
            return done.returncode
    return 0


def test_every_item_runs_once_before_the_caller_continues(cpu_kernels, tmp_path):
    assert stress(tmp_path) == 0


@pytest.mark.parametrize(
    "fault",
    [
        ("done_.load(std::memory_order_acquire) < count_", "false"),
        ("if (changed()) asleep.store(false);", ""),
        ("std::fesetenv(&float_mode_);", ""),
    ],
    ids=["no wait for helpers", "no look before sleep", "no floating-point mode"],
)
def test_stress_test_detects(cpu_kernels, fault, tmp_path):
    assert stress(tmp_path, fault) == 1
