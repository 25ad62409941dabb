"""The verdict on two step times, and what follows from it in the summary."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from forge_jax.telemetry.trace_recorder import Recorder
from forge_jax.tools.profile.compare import compare
from forge_jax.tools.profile.report import html, markdown, text
from forge_jax.tools.profile.trace import read_traces
from forge_jax.tools.profile.verdict import T_975, StepTime, Verdict
from tests.profiles.traces import HLO, Event, op, write_trace

RUNS = 500


def verdict(before, after, percent=5.0) -> Verdict:
    times = StepTime.of(before), StepTime.of(after)
    assert times[0] is not None and times[1] is not None
    return Verdict(*times, percent)


def correlated_steps(rng: random.Random, steps: int = 20) -> list[float]:
    """Return step times of 1000 us, with a correlation of 0.5 between neighbors and spikes."""
    state, found = 0.0, []
    for _ in range(steps):
        state = 0.5 * state + math.sqrt(0.75) * rng.gauss(0, 1)
        found.append(1000 + 50 * state + (rng.random() < 0.05) * 2000 * rng.random())
    return found


def test_equal_runs_rarely_differ_beyond_the_noise():
    rng = random.Random(0)
    pairs = [(correlated_steps(rng), correlated_steps(rng)) for _ in range(RUNS)]
    wrong = sum(verdict(*pair).outcome != "no difference" for pair in pairs)
    assert wrong / RUNS < 0.07  # by definition, about 5% of 95% intervals miss

    def naive_margin(*runs: list[float]) -> float:
        """Return the margin if steps were independent, which the check above must reject."""
        medians = (1.2533 * statistics.stdev(sorted(us)[1:-1]) / math.sqrt(len(us)) for us in runs)
        return 1.96 * math.hypot(*medians)

    naive = sum(abs(verdict(*pair).delta) > naive_margin(*pair) for pair in pairs)
    assert naive / RUNS > 0.07


@pytest.mark.parametrize(
    ("factor", "outcome"),
    [(1.5, "slower"), (0.6, "faster"), (1.03, "slightly slower"), (0.97, "slightly faster"),
     (1.0, "no difference")],
)  # fmt: skip
def test_real_differences_exceed_the_noise(factor, outcome):
    rng = random.Random(1)
    before, after = ([rng.gauss(1000, 10) for _ in range(100)] for _ in range(2))
    found = verdict(before, [us * factor for us in after])
    assert found.outcome == outcome
    assert found.in_percent(found.delta) == pytest.approx(100 * (factor - 1), abs=1)


def test_margin_is_that_of_batch_medians():
    before, after = ([1.0, 1, 2, 2, 3, 3, 4, 4, 5, 5], [9.0] * 10)
    found = verdict(before, after)
    assert found.before.batches == (1, 2, 3, 4, 5)
    assert found.delta == 6 and found.margin == pytest.approx(T_975 * math.sqrt(2.5 / 5))
    assert (found.before.p10, found.before.p90) == (1, 5)
    assert StepTime.of([1.0] * 9) is None


def trace(place, step_us, ops=(), steps=10, **about):
    """Write a trace with steps of this time, and with these operations in each."""
    python = [Event("forge.step", 1e4 * i, step_us, {"step_num": i}) for i in range(steps)]
    worker = [
        op(name, 1e4 * run + at, us, run=run)
        for run in range(steps)
        for at, (name, us) in zip(range(0, 9000, 200), ops, strict=False)
    ]
    write_trace(place, {"/host:CPU": {"python": python, "worker": worker}}, HLO)
    (place / "about.json").write_text(json.dumps(about))
    return place


def compared(tmp_path, **sides):
    """Return the only comparison of the traces that `sides` describes."""
    places = [trace(tmp_path / name, **sides[name]) for name in ("before", "after")]
    [found] = compare(*map(read_traces, places))
    return found


def test_verdict_comes_first_everywhere(tmp_path):
    found = compared(tmp_path, before={"step_us": 200}, after={"step_us": 300})
    said = "slower beyond the noise: +50.0% (95% interval +50.0% to +50.0%)"
    assert text([found]).startswith(f"== profile: {said}\n")
    assert markdown(found).startswith(f"**{said}**")
    assert f'</h2>\n<p class="verdict">{said}</p>' in html([found])
    lines = text([found]).splitlines()
    assert "before                    0.200  0.200 to 0.200     10" in lines


def test_too_few_steps_give_no_verdict(tmp_path):
    found = compared(tmp_path, before={"step_us": 200, "steps": 9}, after={"step_us": 300})
    assert text([found]).startswith("== profile: no verdict: a trace has fewer than 10 host steps")


@pytest.mark.parametrize(("share", "reliable"), [(0.1, True), (0.3, False)])
def test_busy_machine_gives_no_reliable_verdict(tmp_path, share, reliable):
    after = {"step_us": 300, "other_cpu_share": share}
    found = compared(tmp_path, before={"step_us": 200}, after=after)
    first = text([found]).splitlines()[0]
    assert first.startswith("== profile: slower beyond") == reliable
    assert ("used the CPUs (unknown before and 30% after)" in first) == (not reliable)
    assert ("stop other programs" in text([found])) == (not reliable)


def test_at_most_15_operations_are_listed_below_their_parts(tmp_path):
    kernels = [(f"op_{chr(97 + i)}", 2.0 + i / 10) for i in range(24)]
    long = "a_kernel_with_a_very_long_name_" * 5
    before = [("ffi_call.12", 90), ("argmax.clone.2", 20), *kernels, (long, 70)]
    after = [(name, 2 * us) for name, us in before]
    sides = {"before": {"step_us": 5e3, "ops": before}, "after": {"step_us": 5e3, "ops": after}}
    said = text([compared(tmp_path, **sides)])
    lines = said.splitlines()
    start = lines.index("largest differences of operations, us per step (15 of 27 that changed)")
    table = lines[start + 2 : lines.index("", start)]
    assert [line.split("  ")[0] for line in table if not line.startswith(" ")] == [
        "decode/layers/attention: forge_attention", "decode/(no scope)",
        "decode/sample: greedy: argmax",
    ]  # fmt: skip
    assert sum(line.startswith("  ") for line in table) == 13
    assert table[0].split()[1:] == ["forge_attention", "90.0", "180.0", "+90.0", "+100.0", "slower"]
    assert max(map(len, lines)) <= 100 and "…" in said


def suggested(tmp_path, before, after) -> str:
    base = {"step_us": 200}
    said = text([compared(tmp_path, before=base | before, after=base | after)])
    return " ".join(said.partition("to try:\n")[2].split())


def test_suggestions_follow_from_the_differences(tmp_path):
    other = suggested(
        tmp_path / "a", {"ops": [("ffi_call.12", 50)]}, {"ops": [("while.5", 90)], "step_us": 400}
    )
    assert "layers/attention ran other kernels: forge_attention vanished, while appeared" in other
    assert "Profile the same configuration twice" in suggested(tmp_path / "b", {}, {})
    said = suggested(tmp_path / "c", {"command_buffers": "on"}, {"command_buffers": "off"})
    assert "they were on before, off after" in said
    profiled = {"command_buffers": "off during the profile"}
    said = suggested(tmp_path / "d", profiled, profiled)
    assert "XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true" in said
    ops = [("ffi_call.12", 50)]
    said = suggested(tmp_path / "e", {"ops": ops}, {"ops": [], "step_us": 400})
    assert "used other executables (jit_decode_4 and none)" in said


def test_verdict_names_the_host_phase_that_causes_the_difference(tmp_path):
    for name, text_us in (("before", 10), ("after", 110)):
        events = []
        for i in range(10):
            events.append(Event("forge.step", 1e3 * i, 200 + text_us, {"step_num": i}))
            events.append(Event("forge.text", 1e3 * i, text_us))
        write_trace(tmp_path / name, {"/host:CPU": {"python": events}})
    [found] = compare(*(read_traces(tmp_path / name) for name in ("before", "after")))
    assert "- The host phase text changed by +100 us per step." in text([found])


@pytest.mark.parametrize(
    ("enabled", "flags", "expected"),
    [
        (False, "", "off"),
        (True, "", "off during the profile"),
        (True, "--xla_enable_command_buffers_during_profiling=false", "off during the profile"),
        (True, "--a=1 --xla_enable_command_buffers_during_profiling=true --b", "on"),
    ],
)
def test_recorder_states_whether_command_buffers_were_on(
    tmp_path, monkeypatch, enabled, flags, expected
):
    monkeypatch.setenv("XLA_FLAGS", flags)
    recorder = Recorder(dict, "a model", command_buffers=enabled)
    recorder.start(tmp_path / "a")
    recorder.stop()
    about = json.loads((tmp_path / "a" / "about.json").read_text())
    assert about["command_buffers"] == expected
    assert 0 <= about.get("other_cpu_share", 0) <= 1
