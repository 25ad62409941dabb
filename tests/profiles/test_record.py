"""Traces of a real engine: scopes, phases of the host, and differences between kernels."""

from __future__ import annotations

import gzip
import io
import json
import stat
import sys

import ml_dtypes
import numpy as np
import pytest
from jax.profiler import ProfileData
from safetensors.numpy import save_file

from forge_jax.config import EngineConfig
from forge_jax.errors import ConfigError, RequestError
from forge_jax.step.step_shapes import step_shapes
from forge_jax.telemetry import spans
from forge_jax.telemetry.trace_recorder import Recorder
from forge_jax.tools.profile.compare import (
    KERNELS,
    OPERATIONS,
    PARTS,
    PHASES,
    compare,
    part_times,
)
from forge_jax.tools.profile.config import Workload
from forge_jax.tools.profile.hlo import NO_SCOPE
from forge_jax.tools.profile.trace import read_traces
from forge_jax.tools.profile.workload import record, shapes_of
from forge_kernels import cpu
from forge_serve.cli import main as cli

STEPS = 4


def test_profile_is_readable_only_by_the_user(tmp_path):
    folder = tmp_path / "profiles" / "one"
    recorder = Recorder(dict, "nothing")
    recorder.start(folder)
    recorder.stop()
    for made in (folder.parent, folder):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a Llama of one layer that the C++ kernels support."""
    folder = tmp_path_factory.mktemp("model")
    d, inner, head, vocab = 64, 128, 32, 256
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": d,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": head, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    layer = "model.layers.0"
    shapes |= {
        f"{layer}.self_attn.q_proj.weight": (2 * head, d),
        f"{layer}.self_attn.k_proj.weight": (head, d),
        f"{layer}.self_attn.v_proj.weight": (head, d),
        f"{layer}.self_attn.o_proj.weight": (d, 2 * head),
        f"{layer}.mlp.gate_proj.weight": (inner, d),
        f"{layer}.mlp.up_proj.weight": (inner, d),
        f"{layer}.mlp.down_proj.weight": (d, inner),
        f"{layer}.input_layernorm.weight": (d,),
        f"{layer}.post_attention_layernorm.weight": (d,),
    }
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.normal(size=shape) / 8).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def profile(model, target, *flags):
    command = f"profile {model} --logdir {target} --steps {STEPS} --warmup-steps 2 --sequences 2 "
    command += "--prompt-tokens 24 --max-num-seqs 2 --max-num-batched-tokens 32 --num-blocks 32"
    assert cli.main([*command.split(), *flags]) == 0
    return target


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def on_terminal(folder, tmp_path_factory):
    """Return the folder of a profile, and the output of its command on a terminal."""
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        place = profile(folder, tmp_path_factory.mktemp("xla"), "--kernels", "xla")
    return place, terminal.getvalue()


@pytest.fixture(scope="module")
def xla(on_terminal):
    return on_terminal[0]


@pytest.fixture(scope="module")
def cpp(folder, tmp_path_factory):
    if not cpu.available():
        pytest.skip("there are no C++ kernels here")
    return profile(folder, tmp_path_factory.mktemp("cpp"))


def test_profile_has_the_requested_steps(xla):
    decode, prefill = read_traces(xla)
    assert (decode.name, prefill.name) == ("decode", "prefill")
    assert decode.steps == prefill.steps == STEPS
    assert decode.runs == {"decode": STEPS} and decode.modules == {"decode": {"jit_decode_2"}}
    assert prefill.runs["mixed"] == STEPS and "decode" not in prefill.runs


def test_terminal_shows_progress(on_terminal):
    _, said = on_terminal
    for bar in ("compile", "decode", "prefill"):
        assert f"\r{bar}: " in said
    assert "\rcompile:  50%" in said


def test_only_executables_of_the_workloads_are_compiled(xla):
    for name in ("decode", "prefill"):
        files = {file.name for file in (xla / name / "executables").glob("*.json")}
        steps = {"decode_2.json", "mixed_32.json"}
        assert files == steps | {"admit.json", "set_history.json"}


@pytest.mark.parametrize(
    ("options", "prompt_tokens", "names"),
    [
        ({}, 128, ["decode[4]", "mixed[1024]"]),
        ({}, 4, ["decode[4]", "mixed[64]"]),
        ({"deterministic": True}, 128, ["mixed[1024]"]),
    ],
)
def test_smallest_sufficient_shapes_are_selected(options, prompt_tokens, names):
    shapes = step_shapes(
        max_num_seqs=16, max_num_batched_tokens=1024, max_rows=16, block_size=16, **options
    )
    workload = Workload(sequences=4, prompt_tokens=prompt_tokens)
    assert [shape.name for shape in shapes_of(workload, shapes, 16)] == names


def test_speculation_selects_all_shapes():
    shapes = step_shapes(
        max_num_seqs=16, max_num_batched_tokens=64, max_rows=16, block_size=16, max_drafts=3
    )
    assert shapes_of(Workload(), shapes, 16) == shapes


def test_step_markers_have_the_name_that_xprof_requires(xla):
    [file] = (xla / "decode").rglob("*.xplane.pb")
    events = [
        event
        for plane in ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        if event.name.startswith("test")
    ]
    numbers = [dict(event.stats)["step_num"] for event in events]
    assert len(numbers) == STEPS and numbers == sorted(set(numbers))


def test_every_part_of_the_step_has_a_scope(xla):
    decode, _ = read_traces(xla)
    times = part_times(decode)
    parts = "embed layers/qkv layers/rope_write layers/attention layers/attention_out "
    parts += "layers/gate_up layers/down final_norm rows logits sample inputs"
    assert not [part for part in parts.split() if not times.get(f"decode/{part}")]
    scopes = {op.scope for op in decode.ops}
    assert {"layers/qkv/norm", "layers/gate_up/norm", "layers/down/product"} <= scopes
    nameless = {op.kernel for op in decode.ops if op.scope == NO_SCOPE}
    assert len(nameless) < 0.3 * len({op.kernel for op in decode.ops})


def test_host_phases_are_in_the_trace_once_per_step(xla):
    decode, _ = read_traces(xla)
    counts = {name: time.count for name, time in decode.phases.items()}
    phases = ("step", "schedule", "dispatch", "read", "commit", "text")
    assert counts == dict.fromkeys(phases, STEPS)
    of_step = sum(time.us for name, time in decode.phases.items() if name != "step")
    assert 0 < of_step <= decode.phases["step"].us


def test_chrome_trace_and_compiled_modules_are_saved_with_it(xla):
    [file] = (xla / "decode").rglob("*.trace.json.gz")
    with gzip.open(file, "rt") as content:
        *events, last = json.load(content)["traceEvents"]
    assert last == {}  # XLA's end marker, which viewers skip
    named = {(e["pid"], e["tid"]) for e in events if (e["ph"], e["name"]) == ("M", "thread_name")}
    spans = [event for event in events if event["ph"] != "M"]
    for event in spans:
        assert event["ph"] == "X" and event["name"] and (event["pid"], event["tid"]) in named
        assert event["ts"] >= 0 and event["dur"] >= 0
    names = {event["name"] for event in spans}
    assert {"forge.schedule", "forge.dispatch", "forge.read", "forge.text"} <= names
    decode, _ = read_traces(xla)
    figures = {figure: v for (name, figure), v in decode.figures.items() if name == "decode_2"}
    assert figures["flops"] > 0 and figures["bytes accessed"] > 0
    assert figures["kernels"] > figures["fusions"] > 0


def test_profiled_command_is_recorded_as_its_command_line(xla, folder):
    decode, prefill = read_traces(xla)
    told = f"{folder} --kernels xla --num-blocks 32 --max-num-seqs 2 --max-num-batched-tokens 32"
    told += f" --steps {STEPS} --warmup-steps 2 --sequences 2 --prompt-tokens 24"
    assert sorted(decode.ran.split()) == sorted(told.split()) and prefill.ran == decode.ran


def test_operations_and_phases_add_up_to_the_step(xla):
    for comparison, kind in zip(compare(*[read_traces(xla)] * 2), ("decode", "mixed"), strict=True):
        [points, _] = comparison.points
        whole = points[PARTS][kind]
        operations = [line for name, line in points[OPERATIONS].items() if name.startswith(kind)]
        assert len(whole) == STEPS and min(whole) > 0
        assert [sum(us) for us in zip(*operations, strict=True)] == pytest.approx(whole)
        step = points[PHASES]["step"]
        phases = [line for name, line in points[PHASES].items() if name != "step"]
        for us, within in zip(step, zip(*phases, strict=True), strict=True):
            assert 0 < sum(within) <= us


@pytest.mark.slow
def test_comparison_names_other_kernels(cpp, xla):
    decode, prefill = compare(read_traces(cpp), read_traces(xla))
    for found, kind in ((decode, "decode"), (prefill, "mixed")):
        changes = {row.name: row.change for row in found.table(OPERATIONS).changed}
        assert changes[f"{kind}/layers/attention: forge_attention"] == "vanished"
        assert changes[f"{kind}/layers/rope_write: forge_rotate_write"] == "vanished"
        appeared = {name for name, change in changes.items() if change == "appeared"}
        assert any(name.startswith(f"{kind}/layers/attention: ") for name in appeared)
        kernels = {row.name: row.change for row in found.table(KERNELS).rows}
        assert kernels[f"{kind}: forge_linear"] == "vanished"
        parts = {row.name: row.change for row in found.table(PARTS).rows}
        assert parts[f"{kind}/layers/attention"] not in ("appeared", "vanished")


def test_spans_are_free_without_a_trace():
    assert spans.span("read") is spans.span("text") is spans.step_span(3)


def test_only_one_profile_runs_and_stop_needs_a_start(tmp_path):
    recorder = Recorder(dict, "a model")
    with pytest.raises(RequestError, match="no profile is running"):
        recorder.stop()
    recorder.start(tmp_path / "a")
    try:
        assert spans.span("read") is not spans.span("text")
        with pytest.raises(RequestError, match="stop it first"):
            Recorder(dict, "a model").start(tmp_path / "b")
    finally:
        assert recorder.stop() == tmp_path / "a"
    assert spans.span("read") is spans.span("text")
    assert not (tmp_path / "b").exists()
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be written"):
        recorder.start(tmp_path / "file")


def test_workload_that_does_not_fit_is_rejected(folder, tmp_path):
    with pytest.raises(ConfigError, match="--steps must be at least 1"):
        Workload(steps=0)
    config = EngineConfig.from_options(
        model=str(folder), kernels="xla", max_num_seqs=2, max_num_batched_tokens=32,
        num_blocks=32, block_size=16,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--sequences 3 exceeds --max-num-seqs, which is 2"):
        record(config, Workload(sequences=3), tmp_path)
