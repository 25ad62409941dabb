"""Workloads: exact lengths, equal requests for equal seeds, and no unintended sharing."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from benchmarks.workloads import (
    WORKLOADS,
    make,
    mixed,
)
from forge_jax.checkpoint.hub import resolve
from forge_jax.engine.fake import fake_tokenizer
from forge_serve.bench.arrivals import poisson, with_load
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.traces import TraceEntry, read_trace, shared_tokens, trace
from forge_serve.bench.workload import ALL, Request, Sizes, Vocabulary, Workload

pytestmark = pytest.mark.slow

TRACES = Path(__file__).parent.parent / "fixtures" / "traces"
AZURE, MOONCAKE = TRACES / "azure2023_conv.csv", TRACES / "mooncake_conversation.jsonl"
PLAIN = Vocabulary.plain()
MAKERS = {**WORKLOADS, "mixed": mixed}
OF_TOKENS = [name for name in MAKERS if name != "structured"]


def lengths(workload: Workload) -> list[tuple[int, int, float, str]]:
    return [(len(r.prompt), r.max_tokens, r.arrival_s, r.group) for r in workload.requests]


@pytest.mark.parametrize("name", MAKERS)
def test_workload_depends_only_on_its_seed(name):
    sizes = Sizes(context=1024, num_requests=12)
    first = MAKERS[name](sizes, PLAIN, 7, 0)
    assert MAKERS[name](sizes, PLAIN, 7, 0) == first
    assert MAKERS[name](sizes, PLAIN, 8, 0) != first


@pytest.mark.parametrize("name", OF_TOKENS)
def test_rounds_have_equal_work_with_different_tokens(name):
    sizes = Sizes(context=1024, num_requests=12)
    first, second = (MAKERS[name](sizes, PLAIN, 7, round_) for round_ in (0, 1))
    assert lengths(first) == lengths(second)
    for a, b in itertools.product(first.requests, second.requests):
        assert a.prompt[:16] != b.prompt[:16]


def test_workloads_do_not_share_prompt_beginnings():
    sizes = Sizes(context=1024, num_requests=12)
    beginnings = [
        {r.prompt[:8] for r in MAKERS[name](sizes, PLAIN, 0, 0).requests} for name in OF_TOKENS
    ]
    for a, b in itertools.combinations(beginnings, 2):
        assert not a & b


@pytest.mark.parametrize("context", [64, 100, 1024, 32768])
@pytest.mark.parametrize("name", MAKERS)
def test_every_request_fits_the_context(name, context):
    workload = MAKERS[name](Sizes(context=context, num_requests=12), PLAIN, 0, 0)
    assert len(workload.requests) == 12
    for r in workload.requests:
        assert r.max_tokens >= 1
        assert len(r.prompt) + r.max_tokens <= context
        assert r.prompt or r.text


def test_baseline_has_the_requested_lengths():
    sizes = Sizes(context=1024, num_requests=3, input_len=33, output_len=5)
    assert [n[:2] for n in lengths(make("baseline", sizes, PLAIN))] == [(33, 5)] * 3


def test_conversations_repeat_their_history_and_wait_for_the_answer():
    requests = make("prefix_caching", Sizes(context=1024, num_requests=16), PLAIN).requests
    for i, request in enumerate(requests):
        assert request.group == f"turn {i % 4 + 1}"
        if i % 4:
            before = requests[i - 1].prompt
            assert request.after == i - 1
            assert request.prompt[: len(before)] == before
        else:
            assert request.after is None
    first, second, third = (requests[i].prompt for i in (0, 4, 8))
    assert first[:256] == third[:256] != second[:256]
    assert first[256:] != third[256:]


def test_long_prompts_arrive_while_others_decode():
    workload = make("chunked_prefill", Sizes(context=1024, num_requests=16), PLAIN)
    groups = [r.group for r in workload.requests]
    assert groups.count("long") == groups.count("decoder") == 8
    assert "decoder" in groups[groups.index("long") :]
    assert all(len(r.prompt) + r.max_tokens == 1024 for r in workload.requests if r.group == "long")
    assert (workload.limit_of("long"), workload.limit_of("decoder")) == ("long", "decoder")


def test_contiguous_cache_reserves_more_than_the_sequences_use():
    facts = make("paged_attention", Sizes(context=1024), PLAIN).facts
    assert facts["kv_tokens_contiguous"] == 64 * 1024 > 3 * facts["kv_tokens_used"]


@pytest.fixture(scope="module", params=["forge-tiny", "fake", "stories260k"])
def backend(request) -> Backend:
    if request.param == "fake":
        return fake_tokenizer().backend
    stories = Path(__file__).parent.parent / "fixtures" / "stories260k-hf"
    folder = stories if request.param == "stories260k" else resolve("forge-tiny")
    return Backend.from_file(str(folder / "tokenizer.json"))


def test_text_has_as_many_tokens_as_its_prompt(backend):
    vocabulary = Vocabulary.of(backend)
    special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    assert special and special.isdisjoint(vocabulary.ids)
    for request in make("paged_attention", Sizes(context=1024), vocabulary).requests:
        text = vocabulary.text(request.prompt)
        assert backend.encode(text, add_special_tokens=False).ids == list(request.prompt)


def test_vocabulary_is_found_by_model_name(tmp_path):
    assert Vocabulary.of_model("gpt-9", "forge-tiny").has_text
    assert not Vocabulary.of_model("gpt-9", str(tmp_path), None).has_text
    with pytest.raises(BenchmarkError, match="--tokenizer"):
        PLAIN.text([10, 11])
    with pytest.raises(BenchmarkError, match="--tokenizer"):
        Vocabulary.from_file(tmp_path)


def test_arrivals_have_the_requested_rate_and_burstiness():
    for burstiness in (1.0, 0.25, 4.0):
        times = poisson(5000, 10.0, burstiness, seed=1)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert times[0] == 0.0 and min(gaps) >= 0
        assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.06)
        # The squared coefficient of variation of a gamma distribution is 1 / shape.
        cv2 = statistics.variance(gaps) / statistics.mean(gaps) ** 2
        assert cv2 == pytest.approx(1 / burstiness, rel=0.15)
    assert poisson(4, float("inf"), 1.0, seed=1) == [0.0] * 4
    assert poisson(1, 5.0, 1.0, seed=1) == [0.0]


def test_explicit_load_replaces_the_workloads_own():
    workload = make("continuous_batching", Sizes(context=1024, num_requests=8), PLAIN)
    assert workload.requests[-1].arrival_s > 0 and not workload.concurrency
    closed = with_load(workload, concurrency=3)
    assert {r.arrival_s for r in closed.requests} == {0.0}
    assert closed.concurrency == {ALL: 3} and closed.load == "3 at once"
    both = with_load(make("chunked_prefill", Sizes(context=1024), PLAIN), rate=5.0, concurrency=2)
    assert both.concurrency == {ALL: 2} and both.requests[-1].arrival_s > 1
    assert with_load(workload) == workload
    assert with_load(workload, rate=float("inf")).load == "all at once"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: Sizes(context=63), "63"),
        (lambda: Sizes(context=1024, num_requests=0), "number of requests"),
        (lambda: Sizes(context=1024, input_len=0), "--input-len"),
        (lambda: Sizes(context=1024, output_len=-1), "--output-len"),
        (lambda: Sizes(context=1024, input_len=1000, output_len=100), "1024"),
        (lambda: make("nothing", Sizes(context=1024), PLAIN), "baseline"),
        (lambda: poisson(3, 0.0, 1.0, 0), "request rate"),
        (lambda: poisson(3, float("nan"), 1.0, 0), "request rate"),
        (lambda: poisson(3, 1.0, 0.0, 0), "burstiness"),
        (lambda: with_load(Workload(name="x", requests=()), concurrency=0), "concurrency"),
        (lambda: trace([], Sizes(context=64), PLAIN, time_scale=-1.0), "scale of a trace"),
    ],
)
def test_invalid_sizes_are_rejected_by_name(wrong, named):
    with pytest.raises(BenchmarkError, match=named):
        wrong()


def test_azure_csv_is_parsed():
    entries = read_trace(AZURE)
    assert len(entries) == 50
    assert (entries[0].input_len, entries[0].output_len, entries[0].arrival_s) == (374, 44, 0.0)
    assert (entries[1].input_len, entries[1].output_len) == (396, 109)
    assert entries[1].arrival_s == pytest.approx(4.314579, abs=1e-5)
    assert entries == sorted(entries, key=lambda e: e.arrival_s)
    assert read_trace(AZURE, 3) == entries[:3]


def test_mooncake_json_lines_are_parsed():
    entries = read_trace(MOONCAKE)
    assert len(entries) == 50
    assert entries[0] == TraceEntry(
        arrival_s=0.0, input_len=1317, output_len=98, hash_ids=(0, 52419, 52420)
    )
    last = entries[-1]
    assert 0 < last.arrival_s < 60  # the file has milliseconds
    assert all(len(e.hash_ids) == -(-e.input_len // 512) for e in entries)


def test_equal_hash_ids_become_equal_tokens():
    entries = read_trace(MOONCAKE)
    requests = trace(entries, Sizes(context=131072), PLAIN).requests
    deepest = 0
    for (a, x), (b, y) in itertools.combinations(zip(entries, requests, strict=True), 2):
        pairs = zip(a.hash_ids, b.hash_ids, strict=False)
        blocks = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        deepest = max(deepest, blocks)
        shared = min(512 * blocks, a.input_len, b.input_len)
        assert x.prompt[:shared] == y.prompt[:shared]
        assert x.prompt[shared : shared + 8] != y.prompt[shared : shared + 8]
    assert deepest > 1


@pytest.mark.parametrize("path", [AZURE, MOONCAKE])
def test_replay_keeps_fitting_lengths_and_truncates_the_rest(path):
    entries = read_trace(path)
    whole = trace(entries, Sizes(context=131072), PLAIN, time_scale=0.5)
    for entry, request in zip(entries, whole.requests, strict=True):
        assert (len(request.prompt), request.max_tokens) == (entry.input_len, entry.output_len)
        assert request.arrival_s == entry.arrival_s * 0.5
    assert whole.facts["requests_clipped"] == 0
    cut = trace(entries, Sizes(context=256), PLAIN)
    for entry, request in zip(entries, cut.requests, strict=True):
        assert len(request.prompt) + request.max_tokens <= 256
        assert request.max_tokens == min(entry.output_len, 128)
    fits = [e.input_len + e.output_len <= 256 and e.output_len <= 128 for e in entries]
    assert cut.facts["requests_clipped"] == fits.count(False) > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither JSON lines nor a CSV"),
        ("a,b\n1,2\n", "ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,7,x\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,7,8\n", "line 2"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 0}\n', "line 2"),
        ('{"timestamp": 0,\n', "line 1"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}\n', "line 1"),
    ],
)
def test_broken_trace_error_names_file_and_line(tmp_path, text, message):
    file = tmp_path / "trace.txt"
    file.write_text(text)
    with pytest.raises(BenchmarkError, match=message) as caught:
        read_trace(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_trace_fails_with_one_line(tmp_path):
    with pytest.raises(BenchmarkError, match="No such file"):
        read_trace(tmp_path / "none.csv")


def test_shared_tokens_are_the_common_prefix():
    prompts = [(1, 2, 3), (1, 2, 4), (2, 2), (1, 2, 3)]
    requests = [Request(prompt=p, max_tokens=1) for p in prompts]
    assert shared_tokens(requests) == 0 + 2 + 0 + 3
