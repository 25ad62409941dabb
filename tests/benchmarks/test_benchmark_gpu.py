"""`benchmarks.gpu`: isolation of failing parts, and the small parts on any device."""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import attention, clock, engine, model, parts, write
from benchmarks.gpu.tables import markdown
from forge_jax import LLM, SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture
def three_parts(monkeypatch, tmp_path):
    """Install parts that work, raise, never end, and lack a dependency."""
    (tmp_path / "odd_parts.py").write_text(
        "import time\n"
        "from benchmarks.gpu.parts import PARTS, Missing, Part\n"
        "def works(tiny): return [{'rate': 2.5e9, 'tiny': tiny}, {'rate': 1.0, 'more': None}]\n"
        "def breaks(tiny): raise ValueError('the device is on fire')\n"
        "def hangs(tiny): time.sleep(60)\n"
        "def lacks(tiny): raise Missing('torch is not installed')\n"
    )
    module = parts.__name__.rpartition(".")[0]
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import odd_parts\n"
        f"sys.modules['{module}.odd_parts'] = odd_parts\n"
        "from benchmarks.gpu.parts import PARTS, Part\n"
        "PARTS.clear()\n"
        "PARTS.update({n: Part('odd_parts', n, 30.0) "
        "for n in ('works', 'breaks', 'hangs', 'lacks')})\n"
        "from benchmarks.gpu.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    run = gpu.subprocess.run

    def with_odd_parts(command, **options):
        assert command[1:3] == ["-m", "benchmarks.gpu"]
        return run([sys.executable, "-c", code, *command[3:]], **options)

    monkeypatch.setattr(gpu.subprocess, "run", with_odd_parts)
    made = {n: parts.Part("odd_parts", n, 30.0) for n in ("works", "breaks", "lacks", "hangs")}
    made["hangs"] = parts.Part("odd_parts", "hangs", 2.0)
    monkeypatch.setattr(gpu, "PARTS", made)
    return list(made)


def test_failing_part_costs_only_its_own_section(three_parts, tmp_path):
    output = tmp_path / "report.json"
    report = gpu.measure(three_parts, 60.0, tiny=True, output=output)
    assert json.loads(output.read_text()) == report
    found = report["parts"]
    assert found["works"]["figures"][0] == {"rate": 2.5e9, "tiny": True}
    assert "on fire" in found["breaks"]["failed"]
    assert found["hangs"]["failed"] == "took more than 2 s"
    assert found["lacks"]["skipped"] == "torch is not installed"
    text = output.with_suffix(".md").read_text()
    assert text.strip() == markdown(report)
    for piece in ("| 2.5e+09 | True | - |", "on fire", "skipped: torch", "mean nothing"):
        assert piece in text


def test_part_that_exceeds_the_time_is_skipped(three_parts):
    report = gpu.measure(["works"], 1.0, tiny=True, output=None)
    assert report["parts"]["works"]["skipped"] == "no time left"


def test_every_part_has_a_function():

    for part in parts.PARTS.values():
        assert callable(
            getattr(importlib.import_module(f"benchmarks.gpu.{part.module}"), part.function)
        )
    assert sum(part.seconds for part in parts.PARTS.values()) > 520, "limits are for bad days"


def test_numeric_checks_pass_on_cpu():
    rows = attention.numerics(True)
    assert {row["implementation"] for row in rows} >= {"xla"}
    mine = [row for row in rows if row["implementation"] == "xla"]
    assert {row["kv"] for row in mine} == {"bfloat16", "fp8"}
    assert all(row.get("right") for row in mine), rows


def test_cache_writes_are_timed(monkeypatch):
    monkeypatch.setattr(write, "seconds", partial(clock.seconds, target_s=0.01, rounds=2))
    rows = write.write(True)
    assert [row["batch"] for row in rows] == [1, 4]
    for row in rows:
        assert row["scatter_us"] > 0 and row["rotate_and_scatter_us"] > 0, row


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_wrong_kernel_is_detected(monkeypatch, kv_dtype):
    right = attention.ragged_paged_attention

    def wrong(q, kv, *args, implementation, **options):
        out = right(q, kv, *args, implementation=implementation, **options)
        return out if implementation == "reference" else out * 1.05

    monkeypatch.setattr(attention, "ragged_paged_attention", wrong)
    row = attention._error(
        "xla", kv_dtype, "x", attention.LLAMA_3_1_8B, "decode", attention.Batch([(1, 40)]), 16
    )
    assert row["right"] is False


def test_written_model_is_served(tmp_path):
    spec = model.write_folder(tmp_path, tiny=True)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    llm = LLM(str(tmp_path), num_blocks=32, **sizes)
    prompts = engine.prompts(3, 7, spec.vocab_size)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    outputs = llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True), progress=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3, 3]
