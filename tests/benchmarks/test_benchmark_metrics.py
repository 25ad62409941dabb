"""The report's arithmetic, on handmade measurements."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import report as reports
from forge_jax.tools.doctor import machine as doctor_machine
from forge_serve.bench.metrics import Measured, Slo, percentile, refusal, summarize


def measured(
    ttft_s: float = 0.1, gaps_s: tuple[float, ...] = (0.02, 0.04), tokens: int = 3, **more
) -> Measured:
    last_s = ttft_s + sum(gaps_s)
    values = {
        "ttft_s": ttft_s,
        "last_s": last_s,
        "end_s": last_s + 0.01,
        "gaps_s": list(gaps_s),
        "events": len(gaps_s) + 1,
        "prompt_tokens": 10,
        "completion_tokens": tokens,
        "tokens_known": True,
        "asked_tokens": tokens,
    }
    return Measured(**(values | more))


FAILED = Measured(error="HTTP 500: no", asked_tokens=9)


def test_percentiles_interpolate_linearly():
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0) == 1.0
    assert percentile(values, 50) == 2.5
    assert percentile(values, 95) == pytest.approx(3.85)
    assert percentile(values, 100) == 4.0
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


def test_rates_divide_completed_work_by_wall_time():
    summary = summarize([measured(), measured(tokens=5, asked_tokens=8), FAILED], wall_s=2.0)
    assert (summary["requests"], summary["completed"]) == (3, 2)
    assert summary["errors"] == {"HTTP 500: no": 1}
    assert summary["requests_per_s"] == 1.0
    assert (summary["output_tokens"], summary["output_tokens_asked"]) == (8, 11)
    assert summary["output_tokens_per_s"] == 4.0
    assert summary["total_tokens_per_s"] == (20 + 8) / 2.0
    assert summary["events"] == 6


def test_latencies_are_in_milliseconds():
    summary = summarize([measured(), measured(ttft_s=0.3)], wall_s=1.0)
    assert summary["ttft_ms"]["mean"] == pytest.approx(200)
    assert summary["ttft_ms"]["p50"] == pytest.approx(200)
    assert summary["ttft_ms"]["p99"] == pytest.approx(298)
    assert summary["itl_ms"]["p50"] == pytest.approx(30)
    assert summary["tpot_ms"]["p50"] == pytest.approx(30)
    assert summary["e2e_ms"]["p50"] == pytest.approx(100 + 170)


def test_tpot_counts_tokens_and_itl_counts_events():
    merged = measured(gaps_s=(0.06,), tokens=7)  # two events with seven tokens
    assert merged.tpot_s == pytest.approx(0.01)
    assert summarize([merged], 1.0)["itl_ms"]["p50"] == pytest.approx(60)
    assert measured(gaps_s=(), tokens=1).tpot_s is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=101), 2),
        (Slo(ttft_ms=99), 0),
        (Slo(itl_ms=39), 0),  # the largest latency of each is 40 ms or more
        (Slo(itl_ms=41), 1),
        (Slo(tpot_ms=31), 1),
        (Slo(e2e_ms=171), 1),
        (Slo(ttft_ms=101, tpot_ms=31, itl_ms=41, e2e_ms=171), 1),
        (Slo(ttft_ms=99, e2e_ms=1e6), 0),
    ],
)
def test_goodput_counts_requests_within_every_limit(slo, good):
    runs = [measured(), measured(gaps_s=(0.01, 0.07)), FAILED, Measured()]
    goodput = summarize(runs, wall_s=4.0, slo=slo)["goodput"]
    assert goodput["requests_per_s"] == good / 4.0
    assert goodput["share"] == good / 4
    assert goodput["slo"] == slo.asked


def test_goodput_is_absent_without_a_limit():
    assert "goodput" not in summarize([measured()], 1.0, Slo())
    assert "goodput" not in summarize([measured()], 1.0)


def test_groups_have_their_own_figures():
    summary = summarize(
        [measured(group="long", ttft_s=0.5), measured(group="decoder"), measured(group="decoder")],
        wall_s=1.0,
    )
    assert summary["groups"]["decoder"]["requests"] == 2
    assert summary["groups"]["decoder"]["ttft_ms"]["p99"] == pytest.approx(100)
    assert summary["groups"]["long"]["ttft_ms"]["p50"] == pytest.approx(500)
    assert "groups" not in summarize([measured(), measured()], 1.0)


def test_valid_json_answers_are_counted():
    texts = ['{"name": "Ann", "age": 3}', '{"name": "Ann"', "[1]", "Ann is 3"]
    answers = [measured(json_wanted=True, text=text) for text in texts]
    assert summarize(answers, 1.0)["json_valid"] == 1


def test_refusals_are_a_share_of_all_requests():
    refused = Measured(error="HTTP 400: response_format", refused=True)
    assert refusal([refused, refused]) == "HTTP 400: response_format"
    assert refusal([refused, measured()]) is None
    assert refusal([FAILED]) is None
    assert refusal([]) is None


def test_run_without_successes_still_has_a_report(tmp_path):
    report = reports.new("serving", runs=[summarize([FAILED], 1.0)])
    file = tmp_path / "report.json"
    reports.write(report, file)
    read = json.loads(file.read_text())
    assert read["runs"][0]["ttft_ms"] is None
    assert read["benchmark"] == "serving" and read["versions"]["jax"] in reports.heading(read)


@pytest.mark.parametrize(
    ("cpu_info", "sets"),
    [
        (
            "processor : 0\nmodel name : X\nflags : fpu avx2 fma amx_int8 avx512_bf16\n",
            ["avx2", "fma", "avx512_bf16", "amx_int8"],
        ),
        ("processor : 0\nFeatures : fp asimd i8mm bf16\n", ["asimd", "bf16", "i8mm"]),
        ("processor : 0\n", []),
    ],
    ids=["x86", "Arm", "neither"],
)
def test_report_names_the_cpus_instruction_sets(cpu_info, sets, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text(cpu_info)
    monkeypatch.setattr(doctor_machine, "CPU_INFO", file)
    report = reports.new("serving")
    assert report["instruction_sets"] == sets
    assert " ".join(sets) in reports.heading(report)


def test_report_is_strict_json(tmp_path):
    with pytest.raises(ValueError):
        reports.write({"figure": float("nan")}, tmp_path / "report.json")


def test_table_cells_escape_their_separators():
    table = reports.table(("a", "b"), [("x|y", "1\n2")])
    assert table == "| a | b |\n| --- | --- |\n| x\\|y | 1 2 |"
