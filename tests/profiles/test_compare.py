"""The difference of two profiles, as tables, text, a page and TensorBoard's files."""

from __future__ import annotations

import json
import re
import struct
import sys
from typing import Any

import pytest

from forge_jax.errors import ConfigError
from forge_jax.tools.profile.compare import (
    COMPILED,
    KERNELS,
    OPERATIONS,
    PARTS,
    PHASES,
    Threshold,
    compare,
)
from forge_jax.tools.profile.files import compare_files
from forge_jax.tools.profile.report import html, markdown, text, write_tensorboard
from forge_jax.tools.profile.trace import read_traces
from forge_serve.cli import main as cli
from tests.profiles.traces import HLO, Event, op, write_trace


def steps(*phases: tuple[str, float]) -> list[Event]:
    """Return two steps of the host, with these phases in each."""
    events = []
    for number in (0, 1):
        at = 1000.0 * number
        events.append(Event("forge.step", at, sum(us for _, us in phases), {"step_num": number}))
        for name, us in phases:
            events.append(Event(f"forge.{name}", at, us))
            at += us
    return events


@pytest.fixture
def places(tmp_path):
    """Write two runs before and three after, with known differences per run."""
    before = [
        event
        for run in (1, 2)
        for at in (1000.0 * run,)
        for event in (
            op("ffi_call.12", at, 40, run=run),
            op("ffi_call.13", at + 50, 60, run=run),
            op("add_multiply_fusion.3", at + 200, 10, run=run),
            op("copy.4", at + 300, 8, run=run),
            op("argmax.clone.2", at + 400, 50, run=run),
        )
    ]
    after = [
        event
        for run in (1, 2, 3)
        for at in (1000.0 * run,)
        for event in (
            op("ffi_call.12", at, 130, run=run),
            op("add_multiply_fusion.3", at + 200, 10.2, run=run),
            op("while.5", at + 300, 7, run=run),
            op("argmax.clone.2", at + 400, 20, run=run),
        )
    ]
    host = steps(("schedule", 30), ("read", 100)), steps(("read", 160), ("mask", 5))
    for name, worker, python, flops in (
        ("before", before, host[0], 1000),
        ("after", after, host[1], 1500),
    ):
        planes = {"/host:CPU": {"python": python, "worker": worker}}
        write_trace(tmp_path / name, planes, HLO, flops=flops)
    return tmp_path / "before", tmp_path / "after"


def rows(table) -> list[tuple]:
    def rounded(value):
        return None if value is None else round(value, 3)

    return [
        (
            r.name,
            rounded(r.before),
            rounded(r.after),
            rounded(r.delta),
            rounded(r.percent),
            r.change,
        )
        for r in table.rows
    ]


def test_known_differences_give_their_exact_table(places):
    [found] = compare(*map(read_traces, places))
    assert found.runs == (
        "2 host steps, 2 runs of jit_decode_4",
        "2 host steps, 3 runs of jit_decode_4",
    )
    fusion = "decode/layers/gate_up: add_multiply_fusion"
    assert rows(found.table(OPERATIONS)) == [
        ("decode/layers/attention: forge_attention", 100, 130, 30, 30, "slower"),
        ("decode/sample/greedy: argmax", 50, 20, -30, -60, "faster"),
        ("decode/(no scope): copy", 8, None, -8, None, "vanished"),
        ("decode/layers/attention: while", None, 7, 7, None, "appeared"),
        (fusion, 10, 10.2, 0.2, 2, "same"),
    ]
    assert rows(found.table(PARTS)) == [
        ("decode/layers/attention", 100, 137, 37, 37, "slower"),
        ("decode/sample", 50, 20, -30, -60, "faster"),
        ("decode/(no scope)", 8, None, -8, None, "vanished"),
        ("decode", 168, 167.2, -0.8, -0.476, "same"),
        ("decode/layers/gate_up", 10, 10.2, 0.2, 2, "same"),
    ]
    assert rows(found.table(KERNELS))[0] == ("decode: argmax", 50, 20, -30, -60, "faster")
    assert rows(found.table(PHASES)) == [
        ("read", 100, 160, 60, 60, "slower"),
        ("step", 130, 165, 35, 26.923, "slower"),
        ("schedule", 30, None, -30, None, "vanished"),
        ("mask", None, 5, 5, None, "appeared"),
    ]
    compiled = found.table(COMPILED)
    assert rows(compiled)[0] == ("decode_4: flops", 1000, 1500, 500, 50, "more")
    assert [row.name for row in compiled.changed] == ["decode_4: flops"]


def test_trace_does_not_differ_from_itself(places):
    [found] = compare(read_traces(places[0]), read_traces(places[0]))
    assert not any(table.changed for table in found.tables)
    assert all(table.rows for table in found.tables)


def test_change_must_reach_both_thresholds(places):
    def changed(threshold: Threshold) -> set[str]:
        [found] = compare(*map(read_traces, places), threshold)
        return {row.change for row in found.table(OPERATIONS).changed}

    assert changed(Threshold(percent=50, us=1)) == {"faster", "appeared", "vanished"}
    assert changed(Threshold(percent=5, us=7.5)) == {"slower", "faster", "vanished"}
    assert changed(Threshold(percent=5, us=31)) == set()
    assert changed(Threshold(percent=1, us=0.1)) >= {"slower", "faster"}


def test_traces_are_compared_by_name(tmp_path):
    for place, us in (("a", 5), ("b", 9)):
        for name in ("decode", place):
            planes = {"/host:CPU": {"w": [op("copy.4", 0, us)]}}
            write_trace(tmp_path / place / name, planes, HLO)
    [found] = compare(read_traces(tmp_path / "a"), read_traces(tmp_path / "b"))
    assert found.name == "decode"
    write_trace(tmp_path / "c" / "x", {"/host:CPU": {"w": [op("copy.4", 0, 5)]}})
    write_trace(tmp_path / "c" / "y", {"/host:CPU": {"w": [op("copy.4", 0, 5)]}})
    with pytest.raises(ConfigError, match=r"\(a, decode\).*\(x, y\)"):
        compare_files(tmp_path / "a", tmp_path / "c")


def test_command_prints_only_changes(places, capsys):
    assert cli.main(["profile", "diff", *map(str, places)]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if "forge_attention" in line)
    assert line.split()[-5:] == ["100.0", "130.0", "+30.0", "+30.0", "slower"]
    assert "vanished" in printed and "add_multiply_fusion" not in printed
    assert cli.main(["profile", "diff", "--all", *map(str, places)]) == 0
    assert "add_multiply_fusion" in capsys.readouterr().out


def test_command_reports_errors(places, tmp_path, capsys):
    def said(*words: object) -> str:
        assert cli.main(["profile", "diff", *map(str, words)]) == 1
        [line] = capsys.readouterr().err.splitlines()
        return line

    (tmp_path / "nothing").mkdir()
    assert "nothing contains no trace" in said(tmp_path / "nothing", places[1])
    assert "nowhere does not exist" in said(places[0], tmp_path / "nowhere")
    assert "--percent must be a number of at least 0, not -1.0" in said(*places, "--percent", "-1")
    assert "--us must be a number of at least 0, not nan" in said(*places, "--us", "nan")
    assert "cannot write" in said(*places, "--html", tmp_path / "nowhere" / "a.html")


def test_empty_trace_is_not_compared(places, tmp_path):
    empty = write_trace(tmp_path / "empty", {"/host:CPU": {"python": []}})
    for pair in ((empty, places[1]), (places[0], empty)):
        with pytest.raises(ConfigError, match=r"empty: nothing ran while .* take it again while"):
            compare_files(*pair)


def test_header_names_the_profiled_command(places):
    for place, ran in zip(places, ("forge-tiny", "llama --kernels xla"), strict=True):
        (place / "about.json").write_text(json.dumps({"ran": ran}))
    [found] = compare(*map(read_traces, places))
    lines = text([found]).splitlines()
    [before] = [line for line in lines if line.startswith("before: ")]
    [after] = [line for line in lines if line.startswith("after: ")]
    assert before == "before: forge-tiny: 2 host steps, 2 runs of jit_decode_4"
    assert after == "after: llama --kernels xla: 2 host steps, 3 runs of jit_decode_4"
    assert "`llama --kernels xla: " in markdown(found)
    assert "after: llama --kernels xla: " in html([found])


def test_operations_kernels_and_parts_add_up_to_the_step(places):
    [found] = compare(*map(read_traces, places))
    for which in ("before", "after"):
        parts = {row.name: getattr(row, which) or 0 for row in found.table(PARTS).rows}
        whole = parts.pop("decode")
        assert whole == pytest.approx({"before": 168, "after": 167.2}[which])
        assert sum(parts.values()) == pytest.approx(whole)
        for title in (OPERATIONS, KERNELS):
            rows = found.table(title).rows
            assert sum(getattr(row, which) or 0 for row in rows) == pytest.approx(whole)


def test_step_points_have_the_means_of_the_tables(places):
    [found] = compare(*map(read_traces, places))
    for which, points in zip(("before", "after"), found.points, strict=True):
        for title in (OPERATIONS, PARTS, PHASES):
            means = {name: sum(line) / len(line) for name, line in points[title].items()}
            rows = {row.name: getattr(row, which) for row in found.table(title).rows}
            rows = {name: mean for name, mean in rows.items() if mean is not None}
            assert rows and means == pytest.approx(rows)
    assert len(found.points[1][OPERATIONS]["decode/sample/greedy: argmax"]) == 3


def test_html_page_has_every_row_and_no_external_requests(places, tmp_path):
    page = tmp_path / "diff.html"
    compare_files(*places, html_file=page)
    content = page.read_text()
    [found] = compare(*map(read_traces, places))
    for table in found.tables:
        assert content.count(f"{table.title}") >= 1
    cells = re.findall(r"<td>(.*?)</td>", content)
    assert len(cells) == 6 * sum(len(table.rows) for table in found.tables)
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link", content)


def test_names_are_escaped_in_the_page(tmp_path):
    worker = [op("<script>alert(1)</script>", 0, 5)]
    write_trace(tmp_path, {"/host:CPU": {"w": worker}})
    page = html(compare(read_traces(tmp_path), []) or compare(*[read_traces(tmp_path)] * 2))
    assert "<script" not in page and "&lt;script&gt;" in page


def tensorboard_values(folder) -> dict[str, Any]:
    """Return the contents of event files: numbers by tag and step, and texts by tag."""
    from tensorboardX.proto.event_pb2 import Event as Recorded

    found: dict[str, Any] = {}
    for file in folder.glob("events.out.tfevents.*"):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Recorded.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                texts = value.tensor.string_val
                if texts:
                    found[value.tag] = texts[0].decode()
                    assert value.metadata.plugin_data.plugin_name == "text"
                else:
                    line = found.setdefault(value.tag, {})
                    assert event.step not in line
                    line[event.step] = value.simple_value
    return found


def test_tensorboard_overlays_both_and_has_the_difference_as_text(places, tmp_path):
    for _ in range(2):  # existing files are replaced
        compare_files(*places, logdir=tmp_path / "tb")
    before, after = (tensorboard_values(tmp_path / "tb" / run) for run in ("before", "after"))
    tag = "op_time_us/decode/layers.attention.forge_attention"
    assert before[tag] == pytest.approx({0: 100, 1: 100})
    assert after[tag] == pytest.approx({0: 130, 1: 130, 2: 130})
    assert "op_time_us/decode/layers.attention.while" in after.keys() - before.keys()
    assert before["part_time_us/decode"] == pytest.approx({0: 168, 1: 168})
    assert before["host_time_us/read"] == pytest.approx({0: 100, 1: 100})
    [(tag, table)] = tensorboard_values(tmp_path / "tb" / "difference").items()
    assert tag.startswith("difference")
    [found] = compare(*map(read_traces, places))
    assert table == markdown(found)
    assert "| decode/sample/greedy: argmax | 50.0 | 20.0 | -30.0 | -60.0 | faster |" in table


def test_missing_extra_is_named_in_the_error(places, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    comparisons = compare(*map(read_traces, places))
    with pytest.raises(ConfigError, match=r"extra profile: pip install .*\[profile\]"):
        write_tensorboard(comparisons, tmp_path)
    assert text(comparisons)  # needs no extra


def test_workload_name_is_in_its_tags_once(tmp_path):
    for place, us in (("a", 5), ("b", 9)):
        for name in ("decode", "prefill"):
            planes = {"/host:CPU": {"w": [op("copy.4", 0, us)]}}
            write_trace(tmp_path / place / name, planes, HLO)
    compare_files(tmp_path / "a", tmp_path / "b", logdir=tmp_path / "tb")
    found = tensorboard_values(tmp_path / "tb" / "after")
    for tag in ("op_time_us/decode/_no_scope_.copy", "op_time_us/prefill/decode/_no_scope_.copy"):
        assert found[tag] == pytest.approx({0: 9})


def test_long_traces_are_sampled_evenly(tmp_path):
    worker = [op("copy.4", 10 * run, 5, run=run) for run in range(2500)]
    write_trace(tmp_path / "a", {"/host:CPU": {"w": worker}}, HLO)
    compare_files(tmp_path / "a", tmp_path / "a", logdir=tmp_path / "tb")
    line = tensorboard_values(tmp_path / "tb" / "after")["part_time_us/decode"]
    assert list(line) == list(range(0, 2500, 3))
