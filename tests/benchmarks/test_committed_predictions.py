"""The committed predictions: tables of the page, and columns next to measurements."""

import itertools
import json
import types
from pathlib import Path

import pytest

from benchmarks.aot import costs
from benchmarks.gpu import linears, predicted, predictions, step
from forge_jax.step.targets import TARGETS
from forge_kernels.attention.shapes import LLAMA_3_1_8B
from forge_kernels.devices import HOPPER, described

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads(predicted.REPORT.read_text())


def page_between_marks() -> str:
    page = (ROOT / "docs/gpu.md").read_text()
    begin, end = "predictions.py --page` -->\n", "<!-- end of predictions -->"
    return page[page.index(begin) + len(begin) : page.index(end)].strip()


def test_the_page_shows_the_committed_predictions():
    assert page_between_marks() == predictions.page_tables(COMMITTED["rows"])


def test_the_report_in_markdown_shows_the_committed_predictions():
    assert predicted.REPORT.with_suffix(".md").read_text() == predictions.markdown(COMMITTED) + "\n"


def test_tables_are_labeled_as_predictions():
    page, report = (ROOT / "docs/gpu.md").read_text(), predictions.markdown(COMMITTED)
    assert f"## {predictions.TITLE}" in page and report.startswith(f"# {predictions.TITLE}")


def test_every_gpu_model_and_quantization_is_predicted():
    one = {
        (row["device"], row["model"], row["quantization"], row["context"])
        for row in COMMITTED["rows"]
        if row["batch"] == 1
    }
    kinds = ("none", "int4", "Q4_K_M")
    assert one == set(itertools.product(TARGETS, predictions.MODELS, kinds, (1024, 8192)))


def test_committed_predictions_use_the_current_assumptions():
    assert COMMITTED["assumptions"] == costs.ASSUMPTIONS


def test_predictions_are_slower_than_their_floor():
    for row in COMMITTED["rows"]:
        parts = row["busy_ms"] + row["start_ms"] + row["collective_ms"]
        assert row["predicted_ms"] == pytest.approx(parts)
        assert row["floor_ms"] < row["predicted_ms"], row
        assert row["least_gb"] <= row["moved_gb"], row
        assert (row["collectives"] > 0) == (row["gpus"] > 1), row


def test_a_page_without_a_row_differs_from_the_predictions():
    assert page_between_marks() != predictions.page_tables(COMMITTED["rows"][1:])


# ---- predictions next to measurements ----------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch):
    """Let JAX report a GPU with this name."""

    def name(kind: str) -> None:
        device = types.SimpleNamespace(device_kind=kind)
        monkeypatch.setattr(predicted.jax, "devices", lambda: [device])

    with described(HOPPER):
        yield name


@pytest.fixture
def on_h200(on_gpu):
    on_gpu("NVIDIA H200")


@pytest.mark.parametrize(("batch", "kv_dtype"), sorted({kind[:2] for kind in step.KINDS}))
def test_every_measured_step_has_a_prediction_on_an_h200(on_h200, batch, kv_dtype):
    found = predicted.step(batch, kv_dtype, step.CONTEXT)["predicted_ms"]
    assert 3.0 < found < 20.0


def test_every_measured_product_has_a_prediction_on_an_h200(on_h200):
    names = ("bfloat16", *linears.quantizations(frozenset(("int8", "int4", "fp8"))))
    for name, tokens in itertools.product(names, linears.TOKENS):
        assert predicted.linear(name, tokens)["predicted_us"] > 10, (name, tokens)


def test_measured_attention_has_a_prediction_on_an_h200(on_h200):
    one, many = (
        predicted.attention(LLAMA_3_1_8B, batch, 4096, "bfloat16")["predicted_us"]
        for batch in (1, 64)
    )
    work = 63 * 4096 * 4096 / (costs.BANDWIDTH_PART * 4.8e12)
    assert many - one == pytest.approx(1e6 * work, rel=0.1)
    eight_bits = predicted.attention(LLAMA_3_1_8B, 64, 4096, "fp8")["predicted_us"]
    assert 0.5 * many < eight_bits < 0.6 * many


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "cpu"])
def test_other_devices_have_no_predictions(on_gpu, kind):
    on_gpu(kind)
    assert predicted.step(64, "auto", 1024) == {}
    assert predicted.linear("bfloat16", 16) == {}
    assert predicted.attention(LLAMA_3_1_8B, 64, 4096, "bfloat16") == {}
