"""`benchmarks.host_kv`: the host tier on a simulated device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import host_kv
from benchmarks.simulation import Arrival, Balancer, EngineSizes, HostMemorySize, Prompt, play
from benchmarks.simulation import Replica as SimulatedReplica
from benchmarks.virtual import DEVICES, VirtualClock, VirtualHostMemory
from forge_jax.schedule.host_tier import Transfers
from forge_serve.bench.traces import TRACE_BLOCK

TRACE = next((Path(__file__).parent.parent / "fixtures" / "traces").glob("mooncake*"))
SIZES = EngineSizes(
    max_num_seqs=4, max_num_batched_tokens=2048, num_blocks=100, block_size=64, context=6400
)
BLOCKS = 5  # per prompt, with `TRACE_BLOCK` tokens each


def replica(bytes_per_s: float | None) -> SimulatedReplica:
    host = None
    if bytes_per_s is not None:
        host = HostMemorySize(num_blocks=10_000, block_bytes=1_000, bytes_per_s=bytes_per_s)
    return SimulatedReplica(policy="fcfs", sizes=SIZES, cost=DEVICES["h200-8b"], host=host)


def rounds(replica: SimulatedReplica) -> list[float]:
    """Serve six prompts in two rounds, and return the TTFT of the second one."""
    requests = [
        Arrival(
            arrival_s=10.0 * number,
            prompt=Prompt([1 + number % 6] * BLOCKS, BLOCKS * TRACE_BLOCK),
            output_len=2,
            urgent=False,
            decode_s=1.0,
        )
        for number in range(12)
    ]
    outcome = play(requests, [replica], rate=1.0, balancer=Balancer())
    assert not replica.has_work and replica.pool.num_used == 0
    return [served.ttft_s or 0.0 for served in outcome.served[6:]]


def test_copies_take_their_bytes_at_the_bandwidth():
    clock = VirtualClock()
    memory = VirtualHostMemory(1_000, 10_000.0, clock)
    memory.start(Transfers(saves=[(0, 0), (1, 1)], loads=[(7, [(0, 3), (1, 4), (2, 5)])]))
    clock.now_s = 0.15
    finished = memory.finished()
    assert (finished.saves, finished.loads) == ([0], [])
    memory.wait()
    assert clock.now_s == pytest.approx(0.3)
    finished = memory.finished()
    assert (finished.saves, finished.loads) == ([1], [7])


def test_host_memory_replaces_the_prefill_of_evicted_prompts():
    without, fast, slow = map(rounds, map(replica, (None, 1e9, 1e4)))
    assert max(fast) < 0.5 * min(without)
    assert min(slow) > 3.0  # 39 blocks of 1,000 bytes


def test_report_has_the_hit_rates_of_both_tiers(tmp_path, capsys):
    output = tmp_path / "report.json"
    arguments = ["--trace", str(TRACE), "--rates", "1", "--num-blocks", "600", "--context", "32768"]
    assert host_kv.main([*arguments, "--host-gib", "0", "64", "--output", str(output)]) == 0
    without, kept = json.loads(output.read_text())["rows"]
    assert without["host_hit_rate"] == without["out_bytes"] == 0
    assert kept["host_hit_rate"] > 0 and kept["in_bytes"] > 0
    assert kept["device_hit_rate"] + kept["host_hit_rate"] > without["device_hit_rate"]
    assert "hit rate: device" in capsys.readouterr().out


def test_invalid_bandwidth_is_rejected(capsys):
    assert host_kv.main(["--trace", str(TRACE), "--host-gbps", "0"]) == 1
    assert "--host-gbps must be greater than 0" in capsys.readouterr().err
