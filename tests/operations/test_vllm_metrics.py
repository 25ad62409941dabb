"""Compatibility with tools for vLLM's metrics: names, types, labels and buckets."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from prometheus_client import Metric
from promql import Read, label_values, reads

HERE = Path(__file__).parent
ACCEPTED = [
    line
    for line in (HERE / "vllm_acceptance.txt").read_text().splitlines()
    if not line.startswith("#")
]
DASHBOARDS = yaml.safe_load((HERE / "vllm_dashboards.yaml").read_text())
# Prometheus adds these to every scraped series: the first two always, the others for targets found
# in Kubernetes (deploy/prometheus/kubernetes.yml).
OF_THE_TARGET = {"job", "instance", "namespace", "pod", "service"}

# vllm/v1/metrics/buckets.py, used by the histograms of vllm/v1/metrics/loggers.py.
LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
           7680)  # fmt: skip
FIRST_TOKEN = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40,
               80, 160, 640, 2560)  # fmt: skip
BETWEEN_TOKENS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40,
                  80)  # fmt: skip
TOKENS_OF_1024 = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
BUCKETS = {
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "time_to_first_token_seconds": FIRST_TOKEN,
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "request_prompt_tokens": TOKENS_OF_1024,
    "request_generation_tokens": TOKENS_OF_1024,
    "request_max_num_generation_tokens": TOKENS_OF_1024,
    "request_params_max_tokens": TOKENS_OF_1024,
    "request_prefill_kv_computed_tokens": TOKENS_OF_1024,
}
GAUGES = "num_requests_running num_requests_waiting num_requests_waiting_by_reason "
GAUGES += "kv_cache_usage_perc cache_config_info"
COUNTERS = "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens "
COUNTERS += "prompt_tokens_by_source prompt_tokens_cached request_success admission_rejections"


def buckets(family: Metric) -> list[float]:
    bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    assert bounds.pop() == float("inf")
    return bounds


@pytest.mark.parametrize("name", ACCEPTED)
def test_acceptance_list_metric_exists_after_one_request(after_one_request, name):
    assert name in after_one_request.text


@pytest.mark.parametrize("name", ACCEPTED)
def test_acceptance_list_metric_exists_before_the_first_request(after_one_request, name):
    assert name in after_one_request.before


def test_acceptance_list_is_complete():
    assert len(ACCEPTED) == len(set(ACCEPTED)) == 49


def test_cache_config_has_the_labels_of_vllms_test(after_one_request):
    (info,) = after_one_request.families["vllm:cache_config_info"].samples
    assert info.value == 1
    assert int(info.labels["kv_cache_size_tokens"]) == int(info.labels["num_gpu_blocks"]) * int(
        info.labels["block_size"]
    )
    assert float(info.labels["kv_cache_max_concurrency"]) > 1


@pytest.mark.parametrize("name", BUCKETS)
def test_histograms_have_vllm_buckets(after_one_request, name):
    family = after_one_request.families[f"vllm:{name}"]
    assert family.type == "histogram"
    assert buckets(family) == list(BUCKETS[name])


@pytest.mark.parametrize(
    "name", ["inter_token_latency_seconds", "request_time_per_output_token_seconds"]
)
def test_inter_token_histograms_add_buckets_below_10_ms(after_one_request, name):
    family = after_one_request.families[f"vllm:{name}"]
    bounds = buckets(family)
    assert [b for b in bounds if b >= 0.01] == list(BETWEEN_TOKENS)
    assert len([b for b in bounds if b < 0.01]) == 4


@pytest.mark.parametrize(
    ("kind", "name"),
    [("gauge", name) for name in GAUGES.split()] + [("counter", name) for name in COUNTERS.split()],
)
def test_other_series_have_vllm_types(after_one_request, kind, name):
    assert after_one_request.families[f"vllm:{name}"].type == kind


def test_every_vllm_series_has_model_and_engine_labels(after_one_request):
    without_model = {"vllm:cache_config_info"}  # as in vLLM
    without_engine = {"vllm:admission_rejections"}
    for name, family in after_one_request.families.items():
        for sample in family.samples if name.startswith("vllm:") else ():
            if name not in without_model:
                assert sample.labels["model_name"] == after_one_request.model, sample
            if name not in without_engine:
                assert sample.labels["engine"] == "0", sample


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_vllm_dashboard_finds_its_series(after_one_request, dashboard):
    found = after_one_request.labels
    for series, labels in DASHBOARDS[dashboard].items():
        wanted = set(labels) - OF_THE_TARGET
        having = (
            found.get(series, {}) if series else {label for has in found.values() for label in has}
        )
        assert not series or series in found, f"there is no {series}"
        assert wanted <= set(having), f"{series} has no label {wanted - set(having)}"
        if isinstance(labels, dict):
            for label, values in labels.items():
                assert set(values) <= found[series][label], (series, label)


def test_missing_series_or_label_is_detected(after_one_request):
    found = after_one_request.labels
    assert "vllm:gpu_cache_usage_perc" not in found  # removed from vLLM
    assert "lora_name" not in found["vllm:num_requests_running"]
    assert "0.42" not in found["vllm:time_to_first_token_seconds_bucket"]["le"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("up", {("up", "")}),
        ('rate(a:b_total{x="1",y=~"$y"}[$__rate_interval])', {("a:b_total", "x y")}),
        ('sum by (le, m) (increase(h_bucket{m!="}"}[5m] offset 1h))', {("h_bucket", "le m")}),
        ("sum(a) without (pod) / on (x) group_left b > bool 3.5e3", {("a", "x"), ("b", "x")}),
        ("histogram_quantile(0.99, sum(rate(h_bucket[5m])) by (le))", {("h_bucket", "le")}),
    ],
)  # fmt: skip
def test_query_parser_finds_series_and_labels(query, expected):
    assert reads(query) == {Read(name, frozenset(labels.split())) for name, labels in expected}


@pytest.mark.parametrize("query", ["", "1 + 1", "a{x}", 'a{x="1"', 'a{x="1";y="2"}'])
def test_unparsable_query_is_an_error(query):
    with pytest.raises(ValueError):
        reads(query)


def test_variable_parser_finds_series_and_labels():
    assert label_values("label_values(model_name)") == {Read("", frozenset({"model_name"}))}
    found = label_values('label_values(a{job=~"$job"}, engine)')
    assert found == {Read("a", frozenset({"job", "engine"}))}
