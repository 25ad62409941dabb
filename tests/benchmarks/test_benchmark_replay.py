"""`benchmarks.replay`: the step model, the loop in virtual time, and the figures."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import replay, simulation
from benchmarks.replay import fairness
from benchmarks.simulation import (
    Arrival,
    Balancer,
    EngineSizes,
    Outcome,
    Prompt,
    Replica,
    Served,
    arrivals,
    play,
)
from benchmarks.virtual import DEVICES, StepCost, VirtualClock, VirtualDevice, pairs_of
from forge_jax.config import Policy
from forge_jax.engine.core import EngineCore, max_rows
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig
from forge_jax.schedule.token_budget import TokenBudget
from forge_serve.bench.metrics import Slo
from forge_serve.bench.traces import TRACE_BLOCK, read_trace

pytestmark = pytest.mark.slow

TRACES = Path(__file__).parent.parent / "fixtures" / "traces"
NAMES = ("azure2023_conv", "azure2023_code", "mooncake_conversation")
FILES = {name: next(TRACES.glob(f"{name}.*")) for name in NAMES}
H200 = DEVICES["h200-8b"]
SIZES = EngineSizes(
    max_num_seqs=256, max_num_batched_tokens=2048, num_blocks=13_000, block_size=64, context=131_072
)
SMALL = EngineSizes(
    max_num_seqs=4, max_num_batched_tokens=512, num_blocks=2100, block_size=64, context=131_072
)


def requests_of(name: str, sizes: EngineSizes = SIZES) -> list[Arrival]:
    return arrivals(read_trace(FILES[name]), sizes, H200, urgent_share=0.3, seed=0)


def play_one(
    requests: list[Arrival], *, rate: float, policy: Policy, sizes: EngineSizes, **options: Any
) -> Outcome:
    options = {"cost": H200, **options}
    replica = Replica(policy=policy, sizes=sizes, **options)
    return play(requests, [replica], rate=rate, balancer=Balancer())


def arrival(arrival_s: float, prompt_len: int, output_len: int, block: int = 1) -> Arrival:
    return Arrival(
        arrival_s=arrival_s,
        prompt=Prompt([block] * (1 + prompt_len // TRACE_BLOCK), prompt_len),
        output_len=output_len,
        urgent=False,
        decode_s=H200.decode_s(prompt_len, output_len),
    )


# --- costs of a step --------------------------------------------------------------------------


def test_step_time_is_overhead_plus_the_longer_of_memory_and_compute():
    cost = StepCost(overhead_ms=1.0, weights_ms=4.0, context_ns=100.0, token_us=10.0, pair_ns=1.0)
    assert cost.step_s(1, 1_000, 1_000) == pytest.approx(0.001 + 0.004 + 0.0001)
    assert cost.step_s(1_000, 1_000, 500_500) == pytest.approx(0.001 + 0.010 + 0.0005005)


def test_preset_is_the_roofline_named_in_its_comment():
    weights_s = 16e9 / 4.3e12
    assert H200.step_s(1, 0, 0) == pytest.approx(0.0005 + weights_s)
    tokens_s = 2 * 8e9 * 2048 / 788e12
    attention_s = 4 * 32 * 4096 * pairs_of(0, 2048) / 788e12
    assert H200.step_s(2048, 2048, pairs_of(0, 2048)) == pytest.approx(
        0.0005 + tokens_s + attention_s
    )
    kv_bytes = 2 * 32 * 8 * 128 * 2
    assert H200.step_s(64, 640_000, 640_000) == pytest.approx(
        0.0005 + weights_s + 640_000 * kv_bytes / 4.3e12
    )


def test_each_token_attends_to_itself_and_all_before():
    assert pairs_of(3, 6) == 4 + 5 + 6
    assert pairs_of(0, 1) == 1


# --- the loop ----------------------------------------------------------------------------------


def test_lone_request_takes_the_modeled_time():
    (only,) = play_one([arrival(5.0, 4_106, 20)], rate=2.0, policy="fcfs", sizes=SIZES).served
    prefill_s = sum(
        H200.step_s(end - start, end, pairs_of(start, end))
        for start, end in (
            (0, 2048),
            (2048, 4096),
            (4096, 4106),
        )  # the last one reads, the others compute
    )
    assert only.sent_s == 2.5 and only.waited_s == 0.0
    assert only.ttft_s == pytest.approx(prefill_s)
    decodes_s = [H200.step_s(1, 4_106 + i, 4_106 + i) for i in range(1, 20)]
    assert only.end_s == pytest.approx(prefill_s + sum(decodes_s))
    assert only.tpot_s == pytest.approx(sum(decodes_s) / 19)
    assert only.slowdown == pytest.approx(1.0)
    assert (only.completion_tokens, only.cached_tokens) == (20, 0)


def test_arrival_during_a_step_waits_for_the_step_after_the_next():
    # The first step (prefill) runs from 0, and the second is also scheduled at 0.
    first_s = H200.step_s(600, 600, pairs_of(0, 600))
    second = play_one(
        [arrival(0.0, 600, 50, 1), arrival(first_s / 2, 10, 2, 2)],
        rate=1.0, policy="fcfs", sizes=SIZES,
    ).served[1]  # fmt: skip
    assert second.waited_s == pytest.approx(first_s / 2)
    second_s = H200.step_s(1, 601, 601)
    third_s = H200.step_s(11, 602 + 10, 602 + pairs_of(0, 10))
    assert second.ttft_s == pytest.approx(first_s / 2 + second_s + third_s)


@pytest.mark.parametrize("itl_target_s", [0.0, 0.01])
@pytest.mark.parametrize("policy", replay.POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_replay_makes_the_engine_cores_steps(name, policy, itl_target_s):
    requests = requests_of(name, SMALL)[:25]
    outcome = play_one(requests, rate=8.0, policy=policy, sizes=SMALL, itl_target_s=itl_target_s)
    clock = VirtualClock()
    device = VirtualDevice(H200.step_s, clock)
    limits = SchedulerConfig(
        max_num_seqs=SMALL.max_num_seqs,
        max_num_batched_tokens=SMALL.max_num_batched_tokens,
        max_rows=max_rows(SMALL.max_num_seqs),
        max_model_len=SMALL.context,
        policy=policy,
    )
    pool = BlockPool(SMALL.num_blocks, SMALL.block_size)
    budget = TokenBudget(itl_target_s) if itl_target_s else None
    scheduler = Scheduler(limits, pool, clock=clock, rng=random.Random(0), budget=budget)
    core = EngineCore(
        scheduler=scheduler,
        device=device,
        tokenizer=None,
        vocab_size=1_000_000,
        clock=clock,
        unrecoverable=(AssertionError,),
    )
    ends: dict[str, float] = {}
    coming = list(enumerate(requests))
    while coming or core.has_work:
        while coming and coming[0][1].arrival_s / 8.0 <= clock.now_s:
            index, arrived = coming.pop(0)
            core.add(simulation._request(str(index), arrived, arrived.arrival_s / 8.0))
        if not core.has_work:
            clock.now_s = coming[0][1].arrival_s / 8.0
            continue
        for request_id, deltas in core.tick().items():
            if deltas[-1].finish_reason is not None:
                ends[request_id] = clock.now_s
    (replica,) = outcome.replicas
    assert device.num_steps == replica.device.num_steps > 100
    assert (device.num_tokens, device.busy_s) == (replica.device.num_tokens, replica.device.busy_s)
    expected = [m.sent_s + m.end_s for m in outcome.served]
    assert [ends[str(index)] for index in range(len(requests))] == pytest.approx(expected)


def test_latency_target_cuts_the_largest_inter_token_latency():
    cost = StepCost(overhead_ms=5.0, weights_ms=20.0, token_us=1_500.0)
    requests = requests_of("azure2023_conv", SMALL)[:40]
    gaps_s = []
    for itl_target_s in (0.0, 0.2):
        outcome = play_one(
            requests, rate=0.2, policy="fcfs", sizes=SMALL, cost=cost, itl_target_s=itl_target_s
        )
        gaps_s.append(max(served.longest_gap_s for served in outcome.served))
    assert gaps_s[0] > 0.5
    assert gaps_s[1] <= 0.2


@pytest.mark.parametrize("name", NAMES)
def test_every_request_gets_all_its_tokens(name):
    requests = requests_of(name)
    outcome = play_one(requests, rate=100.0, policy="fcfs", sizes=SIZES)
    for request, served in zip(requests, outcome.served, strict=True):
        assert served.completion_tokens == request.output_len
        assert served.waited_s is not None and served.ttft_s is not None
        assert 0 <= served.waited_s < served.ttft_s <= served.end_s
        assert served.slowdown > 0.999999, "faster than alone"
    (replica,) = outcome.replicas
    assert replica.pool.num_used == 0 < replica.blocks_peak


def test_prefix_cache_hits_match_the_hash_ids():
    # Slow enough that each request finds everything of the requests before it.
    requests = [
        dataclasses.replace(request, arrival_s=100.0 * index)
        for index, request in enumerate(requests_of("mooncake_conversation"))
    ]
    outcome = play_one(requests, rate=1.0, policy="fcfs", sizes=SIZES)
    served = outcome.served
    before: list[list[int]] = []
    for request, measured in zip(requests, served, strict=True):
        prompt = list(request.prompt)
        shared = max((_shared(prompt, other) for other in before), default=0)
        most = (len(prompt) - 1) // SIZES.block_size
        assert measured.cached_tokens == min(shared // SIZES.block_size, most) * SIZES.block_size
        before.append(prompt)
    assert [m.slowdown for m in served] == pytest.approx([1.0] * len(served))
    cached = sum(m.cached_tokens for m in served)
    assert cached > 50 * TRACE_BLOCK
    told = replay.summarize(outcome, Slo(ttft_ms=1e6))
    assert told["prefix_hit_rate"] == cached / told["prompt_tokens"]
    assert told["goodput"]["share"] == 1.0


def _shared(a: list[int], b: list[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def test_prompts_without_hash_ids_share_nothing():
    outcome = play_one(requests_of("azure2023_conv"), rate=0.01, policy="prefix", sizes=SIZES)
    assert outcome.replicas[0].pool.hit_tokens == 0


def test_urgent_requests_wait_less_only_under_priority():
    requests = requests_of("azure2023_conv", SMALL)
    ratios = {}
    for policy in ("fcfs", "priority"):
        outcome = play_one(requests, rate=50.0, policy=policy, sizes=SMALL)
        groups = replay.summarize(outcome, Slo(ttft_ms=1.0))["groups"]
        ratios[policy] = groups["urgent"]["ttft_ms"]["p50"] / groups["ordinary"]["ttft_ms"]["p50"]
    assert ratios["priority"] < 0.5 < ratios["fcfs"]


# --- figures -----------------------------------------------------------------------------------


def served(alone_s: float, end_s: float) -> Served:
    return Served(alone_s=alone_s, end_s=end_s)


def test_fairness_is_one_if_all_slow_down_equally():
    assert fairness([served(1.0, 3.0), served(2.0, 6.0)])["jain"] == pytest.approx(1.0)


def test_fairness_drops_if_short_requests_wait_for_long_ones():
    told = fairness([served(1.0, 9.0)] * 6 + [served(10.0, 10.0)] * 2)
    assert told["jain"] == pytest.approx((6 / 9 + 2) ** 2 / (8 * (6 / 81 + 2)))
    assert (told["slowdown_short_p50"], told["slowdown_long_p50"]) == (9.0, 1.0)


# --- the command -------------------------------------------------------------------------------

SIZED = ("--max-requests", "20", "--max-num-seqs", "4", "--num-blocks", "2100")
ARGUMENTS = ("--trace", *map(str, FILES.values()), "--rates", "1", "40", *SIZED)


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "report.json"
    assert replay.main([*arguments, "--output", str(file)]) == 0
    return json.loads(file.read_text())


def test_command_replays_each_trace_rate_and_policy(tmp_path, capsys):
    report = run(tmp_path, *ARGUMENTS)
    text, progress = capsys.readouterr()
    rows = report["rows"]
    assert [(r["trace"], r["rate"], r["policy"]) for r in rows] == [
        (name, rate, policy) for name in FILES for rate in (1, 40) for policy in replay.POLICIES
    ]
    assert [about["requests"] for about in report["traces"]] == [20, 20, 20]
    seen = [about["prompt_tokens_seen_before"] for about in report["traces"]]
    assert seen[:2] == [0, 0] and 19 * TRACE_BLOCK <= seen[2] < report["traces"][2]["prompt_tokens"]
    for row in rows:
        about = next(a for a in report["traces"] if a["trace"] == row["trace"])
        assert row["output_tokens"] == about["output_tokens"]
        assert 0 < row["fairness"]["jain"] <= 1
        assert (row["prefix_hit_rate"] > 0) == (row["trace"] == "mooncake_conversation")
        assert 1 <= row["mean_batch"] <= 4 and 0 < row["busy_share"] <= 1.000001
        assert f"{row['trace']} {row['rate']:g}x {row['policy']}: " in progress
        groups = row["groups"]
        assert sum(group["requests"] for group in groups.values()) == 20
    slow, fast = rows[0], rows[3]
    assert slow["ttft_ms"]["p99"] < fast["ttft_ms"]["p99"]
    assert slow["goodput"]["share"] > fast["goodput"]["share"]
    assert slow["queue_peak"] < fast["queue_peak"]
    assert f"| 40x | fcfs | off | {rows[3]['ttft_ms']['p50']:,.0f} / " in text


def test_same_seed_gives_the_same_bytes(tmp_path):
    arguments = ("--trace", str(FILES["mooncake_conversation"]), "--rates", "40", *SIZED)
    first = run(tmp_path, *arguments)
    file = tmp_path / "again.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.replay", *arguments, "--output", str(file)],
        env={**os.environ, "PYTHONHASHSEED": "7"}, check=True, capture_output=True,
    )  # fmt: skip
    again = json.loads(file.read_text())
    assert json.dumps(first["rows"]) == json.dumps(again["rows"])
    other = run(tmp_path, *arguments, "--seed", "1")
    assert json.dumps(first["rows"]) != json.dumps(other["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv: No such file"),
        (["--trace", str(FILES["azure2023_conv"]), "--rates", "0"], "--rates"),
        (["--trace", str(FILES["azure2023_conv"]), "--num-blocks", "10"], "--context"),
        (["--trace", str(FILES["azure2023_conv"]), "--max-num-seqs", "0"], "--max-num-seqs"),
        (["--trace", str(FILES["azure2023_conv"]), "--weights-ms", "-1"], "not negative"),
        (["--trace", str(FILES["azure2023_conv"]), "--urgent-share", "2"], "--urgent-share"),
    ],
)
def test_impossible_replays_fail_with_one_line(arguments, message, capsys):
    assert replay.main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
