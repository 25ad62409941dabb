"""`benchmarks.fleet`: load balancers in front of simulated replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fleet, fleet_chart
from benchmarks.fleet import BALANCERS, LeastLoaded, PrefixAware, Random
from benchmarks.simulation import Arrival, EngineSizes, Outcome, Prompt, Replica, play
from benchmarks.virtual import DEVICES
from forge_serve.bench.traces import TRACE_BLOCK

pytestmark = pytest.mark.slow

TRACE = next((Path(__file__).parent.parent / "fixtures" / "traces").glob("mooncake*"))
H200 = DEVICES["h200-8b"]
SIZES = EngineSizes(
    max_num_seqs=8, max_num_batched_tokens=2048, num_blocks=2000, block_size=64, context=65_536
)


def conversations(count: int, turns: int) -> list[Arrival]:
    """Return conversations, each with a separate prompt that grows by a block per turn."""
    return [
        Arrival(
            arrival_s=2.0 * turn + 0.01 * number,
            prompt=Prompt([1 + number] * (4 + turn), TRACE_BLOCK * (4 + turn)),
            output_len=4,
            urgent=False,
            decode_s=1.0,
        )
        for turn in range(turns)
        for number in range(count)
    ]


def run(kind: type, requests: list[Arrival], count: int, *, rate: float = 1.0) -> Outcome:
    replicas = [Replica(policy="prefix", sizes=SIZES, cost=H200) for _ in range(count)]
    return play(requests, replicas, rate=rate, balancer=kind(replicas, 0))


def hit_tokens(outcome: Outcome) -> int:
    return sum(replica.pool.hit_tokens for replica in outcome.replicas)


@pytest.mark.parametrize("kind", BALANCERS.values())
def test_every_request_is_served_once(kind):
    requests = conversations(6, 3)
    outcome = run(kind, requests, 4)
    assert len(outcome.served) == len(requests)
    assert {served.completion_tokens for served in outcome.served} == {4}
    assert sum(replica.device.num_steps for replica in outcome.replicas) > 0
    assert not any(replica.has_work for replica in outcome.replicas)


def test_prefix_aware_balancer_keeps_conversations_on_their_replica():
    requests = conversations(8, 6)
    prefix, random = (run(kind, requests, 4) for kind in (PrefixAware, Random))
    prompts = sum(len(request.prompt) for request in requests)
    new = sum(len(request.prompt) for request in requests[:8]) + 8 * 5 * TRACE_BLOCK
    assert hit_tokens(prefix) == prompts - new
    assert hit_tokens(random) < 0.6 * hit_tokens(prefix)


def test_prefix_aware_balancer_uses_every_replica_for_one_shared_prefix():
    requests = [
        Arrival(
            arrival_s=0.001 * number,
            prompt=Prompt([1, 1, 100 + number], 3 * TRACE_BLOCK),
            output_len=64,
            urgent=False,
            decode_s=1.0,
        )
        for number in range(32)
    ]
    outcome = run(PrefixAware, requests, 4)
    assert all(replica.device.num_steps for replica in outcome.replicas)


def test_least_loaded_balancer_spreads_requests_that_arrive_together():
    outcome = run(LeastLoaded, conversations(8, 1), 4, rate=1e6)
    assert [replica.device.num_tokens for replica in outcome.replicas] == [
        2 * 4 * TRACE_BLOCK + 2 * 3
    ] * 4


def test_replicas_run_at_the_same_time():
    requests = conversations(8, 1)
    one, eight = (run(LeastLoaded, requests, count, rate=1e6) for count in (1, 8))
    assert eight.virtual_s < 0.3 * one.virtual_s


def test_command_writes_a_row_per_rate_count_and_balancer(tmp_path, capsys):
    file = tmp_path / "report.json"
    arguments = ["--trace", str(TRACE), "--replicas", "1", "3", "--rates", "0.5"]
    assert fleet.main([*arguments, "--output", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["replicas"], row["balancer"]) for row in rows] == [
        (1, "random"),
        *((3, balancer) for balancer in BALANCERS),
    ]
    for row in rows:
        assert 0 <= row["goodput"]["share"] <= 1 <= row["busiest"]
    assert "| 0.5x | 3 | prefix-aware | " in capsys.readouterr().out


def test_committed_chart_matches_the_committed_report():
    report = json.loads(fleet_chart.newest().read_text())
    assert fleet_chart.CHART.read_text() == fleet_chart.chart(report)


def test_chart_of_one_replica_is_rejected():
    report = json.loads(fleet_chart.newest().read_text())
    rows = [row for row in report["rows"] if row["replicas"] == 1]
    with pytest.raises(ValueError, match="several replicas"):
        fleet_chart.chart(report | {"rows": rows})


def test_impossible_fleets_fail_with_one_line(capsys):
    assert fleet.main(["--trace", str(TRACE), "--replicas", "0"]) == 1
    assert "--replicas must be at least 1" in capsys.readouterr().err
