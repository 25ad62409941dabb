"""Reading traces and compiled modules."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from forge_jax.errors import ConfigError
from forge_jax.tools.profile.hlo import NO_SCOPE, kernel_name, read_hlo, scope_of
from forge_jax.tools.profile.trace import Op, Time, kind_of, read_traces
from tests.profiles.traces import HLO, Event, op, write_trace


def test_instruction_scope_comes_from_its_name_fusion_or_loop():
    hlo = read_hlo(HLO)
    assert hlo.module == "jit_decode_4"
    assert hlo.instructions["ffi_call.12"] == ("layers/attention", "forge_attention")
    assert hlo.instructions["add_multiply_fusion.3"] == ("layers/gate_up", "add_multiply_fusion")
    assert hlo.instructions["inner_fusion.7"] == ("layers/attention", "inner_fusion")
    assert hlo.instructions["argmax.clone.2"] == ("sample/greedy", "argmax")
    assert hlo.instructions["copy.4"] == (NO_SCOPE, "copy")


def test_fusion_counts_as_one_kernel_and_a_parameter_as_none():
    hlo = read_hlo(HLO)
    assert hlo.kernels == {
        "layers/attention": 4, "layers/gate_up": 1, "sample/greedy": 1, NO_SCOPE: 1,
    }  # fmt: skip
    assert hlo.fusions == 2


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(decode_4)/layer_12/down/product/dot_general", "layers/down/product"),
        ("jit(f)/sample/cond/branch_0_fun/top_k;jit(f)/embed/add", "sample"),
        ("jit(f)/vmap()/vmap(jit(_fold))/row_keys/while", "row_keys"),
        ("jit(f)/add", NO_SCOPE),
        ("", NO_SCOPE),
    ],
)
def test_scopes_drop_transformation_prefixes(op_name, scope):
    assert scope_of(op_name) == scope


def test_kernels_and_steps_are_grouped_by_name_without_numbers():
    assert kernel_name("multiply_add_fusion.12.clone.3") == "multiply_add_fusion"
    assert kernel_name("loop_add_fusion_4") == "loop_add_fusion"
    assert kernel_name("sm90_gemm_128x64") == "sm90_gemm_128x64"
    assert kind_of("jit_decode_4") == "decode" and kind_of("jit_set_history") == "set_history"


def test_operations_runs_and_phases_are_counted(tmp_path):
    worker = [
        op("ffi_call.12", 0, 10), op("ffi_call.13", 20, 30), op("ffi_call.12", 100, 20, run=2),
        op("copy.4", 130, 5, run=2), Event("ThunkExecutor::Execute", 0, 500),
    ]  # fmt: skip
    python = [
        Event("forge.step", 0, 60, {"step_num": 1}), Event("forge.read", 10, 40),
        Event("forge.step", 100, 50, {"step_num": 2}), Event("forge.read", 110, 20),
    ]  # fmt: skip
    planes = {"/host:CPU": {"python": python, "worker": worker}, "/host:metadata": {}}
    write_trace(tmp_path, planes, HLO, flops=7)
    [trace] = read_traces(tmp_path)
    assert trace.name == "" and trace.steps == 2
    assert trace.runs == {"decode": 2} and trace.modules == {"decode": {"jit_decode_4"}}
    assert trace.ops == {
        Op("decode", "layers/attention", "forge_attention"): Time(3, pytest.approx(60)),
        Op("decode", NO_SCOPE, "copy"): Time(1, pytest.approx(5)),
    }
    assert trace.phases == {"step": Time(2, pytest.approx(110)), "read": Time(2, pytest.approx(60))}
    assert trace.figures["decode_4", "flops"] == 7
    assert trace.figures["decode_4", "kernels in layers/attention"] == 4


def test_containers_have_only_their_self_time(tmp_path):
    worker = [op("while.5", 0, 100), op("inner_fusion.7", 10, 30), op("inner_fusion.7", 50, 25)]
    write_trace(tmp_path, {"/host:CPU": {"worker": worker}}, HLO)
    [trace] = read_traces(tmp_path)
    times = {name: time.us for (_, _, name), time in trace.ops.items()}
    assert times == {"while": pytest.approx(45), "inner_fusion": pytest.approx(55)}
    assert trace.runs == {"decode": 1}


@pytest.mark.parametrize("has_ops", [False, True])
def test_device_kernels_are_read_from_operations_or_streams(tmp_path, has_ops):
    stats = {"hlo_module": "jit_decode_4", "hlo_op": "ffi_call.12"}
    kernels = [Event("mosaic_attention_7", 10 * i, 4, stats) for i in range(3)]
    lines = {"Stream #1(Compute)": kernels, "Steps": [Event("1", 0, 50)]}
    if has_ops:
        lines["XLA Ops"] = [Event("ffi_call.12", 10 * i, 6, stats) for i in range(3)]
    write_trace(tmp_path, {"/device:GPU:0": lines}, HLO)
    [trace] = read_traces(tmp_path)
    name, us = ("forge_attention", 18) if has_ops else ("mosaic_attention", 12)
    assert trace.ops == {Op("decode", "layers/attention", name): Time(3, pytest.approx(us))}
    assert trace.runs == {"decode": 3}  # kernels are not assigned to runs


def test_traces_are_named_by_folder_and_use_the_newest_session(tmp_path):
    for name in ("decode", "prefill"):
        write_trace(tmp_path / name, {"/host:CPU": {"w": [op("copy.4", 0, 5)]}}, HLO)
    newer = {"/host:CPU": {"w": [op("copy.4", 0, 9)]}}
    write_trace(tmp_path / "decode", newer, session="2026_01_02_00_00_00")
    decode, prefill = read_traces(tmp_path)
    assert (decode.name, prefill.name) == ("decode", "prefill")
    assert [time.us for time in decode.ops.values()] == [pytest.approx(9)]


def test_file_or_session_folder_finds_its_metadata(tmp_path, monkeypatch):
    write_trace(tmp_path / "a", {"/host:CPU": {"w": [op("ffi_call.12", 0, 5)]}}, HLO, flops=7)
    (tmp_path / "a" / "about.json").write_text('{"ran": "forge-tiny --kernels xla"}')
    [file] = tmp_path.rglob("*.xplane.pb")
    monkeypatch.chdir(file.parent)
    for place in (file, file.parent, Path(file.name), Path()):
        [trace] = read_traces(place)
        assert list(trace.ops) == [Op("decode", "layers/attention", "forge_attention")]
        assert trace.figures["decode_4", "flops"] == 7
        assert trace.ran == "forge-tiny --kernels xla"


def test_times_are_kept_per_run_and_per_step(tmp_path):
    worker = [
        op("ffi_call.12", 900, 7, run=3), op("ffi_call.12", 0, 10, run=9),
        op("ffi_call.13", 20, 30, run=9), op("copy.4", 930, 5, run=3),
    ]  # fmt: skip
    python = [
        Event("forge.step", 100, 50, {"step_num": 2}), Event("forge.read", 110, 20),
        Event("forge.read", 140, 1), Event("forge.step", 0, 60, {"step_num": 1}),
    ]  # fmt: skip
    write_trace(tmp_path, {"/host:CPU": {"python": python, "worker": worker}}, HLO)
    [trace] = read_traces(tmp_path)
    by_run = {op.kernel: dict(time.by_run) for op, time in trace.ops.items()}
    assert by_run == {
        "forge_attention": pytest.approx({0: 40, 1: 7}), "copy": pytest.approx({1: 5}),
    }  # fmt: skip
    assert dict(trace.phases["step"].by_run) == pytest.approx({0: 60, 1: 50})
    assert dict(trace.phases["read"].by_run) == pytest.approx({1: 21})


def test_missing_or_invalid_trace_is_named_in_the_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no trace .* forge-jax profile MODEL --logdir DIR"):
        read_traces(tmp_path)
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        read_traces(tmp_path / "nowhere")
    (tmp_path / "a.xplane.pb").write_bytes(b"\xff\xff no trace")
    with pytest.raises(ConfigError, match=r"a\.xplane\.pb: not a trace"):
        read_traces(tmp_path)


# No time in its header, because test names must be equal in all processes.
CUT_GZIP = gzip.compress(b"HloModule jit_decode_4" * 99, mtime=0)[:-9]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("executables/decode_4.hlo.txt.gz", b"no gzip"),
        ("executables/decode_4.hlo.txt.gz", CUT_GZIP),
        ("executables/decode_4.json", b"{"),
        ("executables/decode_4.json", b"[]"),
        ("about.json", b"\xff"),
    ],
)
def test_broken_metadata_file_is_named_in_the_error(tmp_path, name, content):
    write_trace(tmp_path, {"/host:CPU": {"w": [op("copy.4", 0, 5)]}}, HLO)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} cannot be read: take the profile again"):
        read_traces(tmp_path)
