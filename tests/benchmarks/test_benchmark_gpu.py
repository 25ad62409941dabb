"""`benchmarks.gpu`: isolation of failing cases, and the small cases on any device."""

from __future__ import annotations

import json
import sys
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import (
    attention,
    clock,
    engine,
    linears,
    model,
    parts,
    predicted,
    products,
    step,
    worker,
    write,
)
from benchmarks.gpu.tables import markdown
from forge_jax import LLM, SamplingParams
from forge_kernels.experts import mix_experts
from forge_kernels.linear import linear

pytestmark = pytest.mark.slow


ODD = """
import os, time
from benchmarks.gpu.parts import PARTS, Case, Missing, Part

def breaks(): raise ValueError("the device is on fire")
def lacks(): raise Missing("torch is not installed")
def waits_for_a_barrier(): time.sleep(60)
def dies(): os.abort()

def odd(tiny):
    yield Case("works", lambda: {"rate": 2.5e9, "tiny": tiny}, 30.0)
    yield Case("breaks", breaks, 30.0)
    yield Case("hangs", waits_for_a_barrier, 1.0)
    yield Case("lacks", lacks, 30.0)
    yield Case("dies", dies, 30.0)
    yield Case("last", lambda: {"rate": 1.0}, 30.0)

def lost(tiny):
    raise RuntimeError("no device")
"""


@pytest.fixture
def odd_parts(monkeypatch, tmp_path):
    """Install parts whose cases work, raise, hang, lack a dependency and end the process."""
    (tmp_path / "odd_parts.py").write_text(ODD)
    module = parts.__name__.rpartition(".")[0]
    names = {"odd": "odd", "lost": "lost"}
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import odd_parts\n"
        f"sys.modules['{module}.odd_parts'] = odd_parts\n"
        "from benchmarks.gpu.parts import PARTS, Part\n"
        "PARTS.clear()\n"
        f"PARTS.update({{n: Part('odd_parts', n) for n in {list(names)}}})\n"
        "from benchmarks.gpu.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    start = gpu.subprocess.Popen

    def with_odd_parts(command, **options):
        assert command[1:3] == ["-m", "benchmarks.gpu"]
        return start([sys.executable, "-c", code, *command[3:]], **options)

    monkeypatch.setattr(gpu.subprocess, "Popen", with_odd_parts)
    monkeypatch.setattr(gpu, "PARTS", names)


def test_failing_case_costs_only_its_own_row(odd_parts, tmp_path):
    output = tmp_path / "report.json"
    report = gpu.measure(["odd", "lost"], 60.0, tiny=True, output=output)
    assert json.loads(output.read_text()) == report
    rows = {row["case"]: row for row in report["parts"]["odd"]}
    assert list(rows) == ["works", "breaks", "hangs", "lacks", "dies", "last"]
    assert rows["works"]["rate"] == 2.5e9 and rows["last"]["rate"] == 1.0
    assert "on fire" in rows["breaks"]["failed"] and "torch" in rows["lacks"]["skipped"]
    assert "Timeout" in rows["hangs"]["failed"]
    assert "waits_for_a_barrier" in rows["hangs"]["failed"], "where it hangs"
    assert "Aborted" in rows["dies"]["failed"] or "status -6" in rows["dies"]["failed"]
    [lost] = report["parts"]["lost"]
    assert lost["case"] == "start" and "no device" in lost["failed"]
    text = output.with_suffix(".md").read_text()
    assert text.strip() == markdown(report)
    for piece in ("| works | 2.5e+09 | True |", "on fire", "lacks skipped", "mean nothing"):
        assert piece in text


def test_rows_exist_before_the_run_ends(odd_parts, tmp_path):
    """A killed run leaves its rows, and `--resume` continues after them."""
    output = tmp_path / "report.json"
    rows = output.with_suffix(".jsonl")
    worker.append(rows, {"part": "odd", "case": "works", "rate": 7.0, "seconds": 1.0})
    with rows.open("a") as file:
        file.write('{"part": "odd", "case": "bre')  # killed while it wrote
    assert [row["case"] for row in worker.read_rows(rows)] == ["works"]
    with pytest.raises(SystemExit):
        gpu.main(["--tiny", "--output", str(output), "--parts", "odd"])
    assert gpu.main(["--tiny", "--output", str(output), "--parts", "odd", "--resume"]) == 0
    found = json.loads(output.read_text())["parts"]["odd"]
    assert [row["case"] for row in found] == ["works", "breaks", "hangs", "lacks", "dies", "last"]
    assert found[0]["rate"] == 7.0, "not measured again"


def test_no_case_starts_without_time(odd_parts, tmp_path):
    report = gpu.measure(["odd"], 1.0, tiny=True, output=tmp_path / "report.json")
    assert report["parts"]["odd"] == []
    assert "no time left" in markdown(report)


@pytest.mark.parametrize("name", parts.PARTS)
def test_cases_have_distinct_names_and_limits(name):
    for tiny in (True, False):
        cases = list(parts.PARTS[name].cases(tiny))
        names = [case.name for case in cases]
        assert names and len(names) == len(set(names))
        assert all(0 < case.limit_s <= 120 for case in cases)


def test_smallest_check_of_a_kernel_runs_first():
    assert next(iter(parts.PARTS)) == "first"
    [case] = parts.PARTS["first"].cases(False)
    assert case.limit_s <= 40 and "decode" in case.name


@pytest.mark.parametrize("name", ["first", "numerics", "more_numerics"])
def test_numeric_checks_pass_on_cpu(name):
    rows = {case.name: case.run() for case in parts.PARTS[name].cases(True)}
    mine = {name: row for name, row in rows.items() if name.endswith(("xla", "cpu"))}
    assert mine and all(row["right"] for row in mine.values()), rows


def test_checks_of_products_pass_on_cpu():
    rows = {case.name: case.run() for case in parts.PARTS["products"].cases(True)}
    assert all(row["right"] for row in rows.values()), rows


@pytest.mark.parametrize("form", products.FORMS)
def test_a_wrong_product_is_detected(monkeypatch, form):
    """One output of 256 lacks the last group of inputs, SwiGLU or the residual."""

    def broken(x, w, *, swiglu, residual):
        y = linear(x, w, swiglu=swiglu, residual=residual)
        other = {
            "plain": lambda: linear(x.at[:, -16:].set(0), w),
            "swiglu": lambda: linear(x, w)[:, : y.shape[1]],
            "residual": lambda: linear(x, w),
        }[form]()
        return y.at[:, 7].set(other[:, 7])

    monkeypatch.setattr(products, "linear", broken)
    for case in parts.PARTS["products"].cases(True):
        if f", {form}," in case.name:
            assert not case.run()["right"], case.name


def test_wrong_experts_are_detected(monkeypatch):
    def broken(x, *operands, implementation):
        y = mix_experts(x, *operands, implementation=implementation)
        return y.at[0].set(0) if implementation == "auto" else y

    monkeypatch.setattr(products, "mix_experts", broken)
    for case in parts.PARTS["products"].cases(True):
        if "experts" in case.name:
            assert not case.run()["right"], case.name


def test_poisoned_entries_are_those_without_a_sequence():
    batch = attention.Batch([(1, 20), (1, 16)], 16)
    layer = attention._poisoned(jnp.zeros((3, 2, 1, 16, 4)), batch)
    bad = np.isnan(np.asarray(layer))
    assert bad.sum() == 12 * 2 * 4  # values in the second block of the first sequence
    table = np.asarray(batch.arrays()["block_tables"])
    assert bad[table[0, 1], :, :, 4:].all()


def test_cache_writes_are_timed(monkeypatch):
    monkeypatch.setattr(write, "seconds", partial(clock.seconds, target_s=0.01, rounds=2))
    for case in write.write(True):
        row = case.run()
        assert row["scatter_us"] > 0 and row["rotate_and_scatter_us"] > 0, row


def test_products_are_timed(monkeypatch):
    monkeypatch.setattr(linears, "seconds", partial(clock.seconds, target_s=0.01, rounds=2))
    monkeypatch.setattr(linears, "copy_bytes_per_s", lambda tiny: 1e9)
    sizes = {}
    for case in linears.linears(True):
        row = case.run()
        assert row["us"] > 0 and row["of_copy"] == pytest.approx(row["bytes_per_s"] / 1e9)
        sizes[case.name] = row["bytes"]
    assert sizes["bfloat16, 1 tokens"] == 256 * 512 * 2
    assert sizes["int4, groups of 128, 4 tokens"] == 256 * 512 // 2 + 256 * 4 * 4


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_wrong_kernel_is_detected(monkeypatch, kv_dtype):
    right = attention.ragged_paged_attention

    def wrong(q, kv, *args, implementation, **options):
        out = right(q, kv, *args, implementation=implementation, **options)
        return out if implementation == "reference" else out * 1.05

    monkeypatch.setattr(attention, "ragged_paged_attention", wrong)
    check = attention.Check("xla", kv_dtype, "llama-3.1-8b", "decode", 16)
    assert attention._error(check, attention.Batch([(1, 40)]))["right"] is False


def test_written_model_is_served(tmp_path):
    spec = model.write_folder(tmp_path, tiny=True)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    llm = LLM(str(tmp_path), num_blocks=32, **sizes)
    prompts = engine.prompts(3, 7, spec.vocab_size)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    outputs = llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True), progress=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3, 3]


@pytest.fixture
def small(monkeypatch):
    """Measure small shapes as if they were those of the benchmark, next to fixed predictions."""
    for module in (attention, linears, step):
        monkeypatch.setattr(module, "_ceiling", lambda tiny: 1e9)
    monkeypatch.setattr(linears, "OUTPUTS", 256)
    monkeypatch.setattr(linears, "INPUTS", 512)
    monkeypatch.setattr(step, "config", lambda tiny: model.TINY)
    monkeypatch.setattr(step, "STEPS", 2)
    for name, column in (("step", "ms"), ("linear", "us"), ("attention", "us")):
        monkeypatch.setattr(predicted, name, lambda *_, column=column: {f"predicted_{column}": 7.0})


def test_a_measured_product_has_its_prediction(small):
    assert linears._row("int8, per row", 4, True, False)["predicted_us"] == 7.0
    assert "predicted_us" not in linears._row("int8, per row", 4, False, False), "not fused"
    assert "predicted_us" not in linears._row("int8, per row", 4, True, True), "another shape"


def test_measured_attention_of_the_gpu_kernel_has_its_prediction(small, monkeypatch):
    monkeypatch.setattr(attention, "_attend", lambda *_, **__: lambda q, kv: q)
    batch = attention.Batch([(1, 128)])
    row = attention._decode("mosaic", "bfloat16", batch, 1, False)
    assert row["predicted_us"] == 7.0
    assert "predicted_us" not in attention._decode("xla", "bfloat16", batch, 1, False)


def test_a_measured_step_has_its_prediction(small):
    step._model.cache_clear()
    try:
        assert step._decode(4, "auto", True, False)["predicted_ms"] == 7.0
    finally:
        step._model.cache_clear()
