"""Replay traces of real traffic through the scheduler on a modeled device, by policy.

    python -m benchmarks.replay --trace azure_conv.csv mooncake.jsonl [--rates 1 2 4 8]

The scheduler and its block pool are the engine's own. The device computes nothing (`virtual.py`).
Time is virtual, so a replay does not wait, and equal arguments give equal figures on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from benchmarks import report as reports
from benchmarks.report import number
from benchmarks.virtual import DEVICES, StepCost, VirtualClock, VirtualDevice
from forge_jax.config import Policy
from forge_jax.engine.core import max_rows
from forge_jax.engine.gc_tuning import short_pauses
from forge_jax.host.progress import progress_bar
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule import request as schedule
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig
from forge_jax.schedule.token_budget import TokenBudget
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import Measured, Slo, latencies, percentile, spread_ms
from forge_serve.bench.traces import TRACE_BLOCK, TraceEntry, fitted, read_trace

POLICIES: tuple[Policy, ...] = get_args(Policy)
URGENT, ORDINARY = "urgent", "ordinary"  # groups, and the two classes of `priority`


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    context: int
    aging_s: float = SchedulerConfig.aging_s

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < (name != "aging_s"):
                raise BenchmarkError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.num_blocks * self.block_size < self.context:
            raise BenchmarkError(
                f"{self.num_blocks} blocks of {self.block_size} tokens cannot hold a context of "
                f"{self.context}: lower --context or raise --num-blocks"
            )


class Prompt(Sequence[int]):
    """Token ids in blocks of one repeated id, because a trace has millions of tokens.

    Prompts share exactly the tokens of their equal leading blocks.
    """

    __slots__ = ("_blocks", "_length")

    def __init__(self, blocks: Sequence[int], length: int):
        assert len(blocks) * TRACE_BLOCK >= length
        self._blocks = blocks
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):  # type: ignore[override]
        return list(self)[index]

    def __iter__(self) -> Iterator[int]:
        tokens: list[int] = []
        for block in self._blocks:
            tokens += [block] * TRACE_BLOCK
        del tokens[self._length :]
        return iter(tokens)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a trace, as it is sent at 1x."""

    arrival_s: float
    prompt: Prompt
    output_len: int
    urgent: bool
    decode_s: float  # time for its output on an idle device, after the first token


@dataclass(kw_only=True)
class Served(Measured):
    """The measurements of a request; times are virtual seconds since its arrival."""

    alone_s: float = 0.0  # on an idle device with the same part of the prompt cached
    waited_s: float | None = None  # until its first step was dispatched
    longest_gap_s: float = 0.0  # longest inter-token latency

    def gained(self, after_s: float) -> None:
        """Record a token; only the longest latency is kept, because a trace has millions."""
        if self.last_s is None:
            self.ttft_s = after_s
        else:
            self.longest_gap_s = max(self.longest_gap_s, after_s - self.last_s)
        self.last_s = after_s

    @property
    def slowdown(self) -> float:
        return self.end_s / self.alone_s


@dataclass(kw_only=True)
class Outcome:
    """The outcome of one replay."""

    served: list[Served]
    device: VirtualDevice
    scheduler: Scheduler
    virtual_s: float  # from the first arrival to the last token
    queue_peak: int  # largest number of waiting sequences after scheduling a step
    blocks_peak: int  # in use


def arrivals(
    entries: Sequence[TraceEntry],
    sizes: EngineSizes,
    cost: StepCost,
    *,
    urgent_share: float,
    seed: int,
) -> list[Arrival]:
    """Return the requests of a trace; `seed` decides at random which are urgent."""
    rng = random.Random(f"{seed}:urgent")
    own = 1 + max((i for entry in entries for i in entry.hash_ids), default=0)
    made = []
    for index, entry in enumerate(entries):
        input_len, output_len = fitted(entry, sizes.context)
        num_blocks = -(-input_len // TRACE_BLOCK)
        # Token 0 is the one that the device samples.
        blocks = [1 + hash_id for hash_id in entry.hash_ids[:num_blocks]]
        blocks += [1 + own + index] * (num_blocks - len(blocks))  # unique to this request
        made.append(
            Arrival(
                arrival_s=entry.arrival_s,
                prompt=Prompt(blocks, input_len),
                output_len=output_len,
                urgent=rng.random() < urgent_share,
                decode_s=cost.decode_s(input_len, output_len),
            )
        )
    return made


def play(
    requests: Sequence[Arrival],
    *,
    rate: float,
    policy: Policy,
    sizes: EngineSizes,
    cost: StepCost,
    seed: int = 0,
    itl_target_s: float = 0.0,
    on_finished: Callable[[], object] = lambda: None,
) -> Outcome:
    """Serve all requests, `rate` times as fast as they came.

    If `itl_target_s` is above 0, steps with decoding sequences have an inter-token latency target.

    Like the engine, this runs one step ahead: step t + 1 is scheduled and dispatched while t runs,
    and then t is read. A request that arrives in between is in step t + 2 at the earliest.
    """
    clock = VirtualClock()
    device = VirtualDevice(cost.step_s, clock)
    pool = BlockPool(sizes.num_blocks, sizes.block_size)
    limits = SchedulerConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_rows=max_rows(sizes.max_num_seqs),
        max_model_len=sizes.context,
        policy=policy,
        aging_s=sizes.aging_s,
    )
    budget = TokenBudget(itl_target_s) if itl_target_s else None
    scheduler = Scheduler(limits, pool, clock=clock, rng=random.Random(seed), budget=budget)
    served: list[Served] = []
    live: dict[str, Served] = {}
    coming = iter(enumerate(requests))
    following = next(coming, None)
    in_flight = None
    queue_peak = blocks_peak = 0
    while following is not None or live:
        now_s = clock.now_s
        while following is not None and following[1].arrival_s / rate <= now_s:
            index, arrival = following
            live[str(index)] = measured = _measured(arrival, rate)
            served.append(measured)
            scheduler.add(_request(str(index), arrival, measured.sent_s))
            following = next(coming, None)
        plan = scheduler.schedule()
        step, in_flight = in_flight, None
        if plan is not None:
            in_flight = plan, device.dispatch(plan), now_s
            for admission in plan.admissions:
                measured = live[admission.seq_key[0]]
                if measured.waited_s is None:
                    measured.waited_s = now_s - measured.sent_s
        queue_peak = max(queue_peak, scheduler.num_waiting)
        blocks_peak = max(blocks_peak, pool.num_used)
        if step is None:
            if plan is None and following is not None:
                clock.now_s = following[1].arrival_s / rate
            continue
        plan, pending, dispatched_s = step
        result = device.read(pending)
        now_s = clock.now_s
        if budget is not None:
            budget.record(plan, dispatched_s, now_s)
        for seq, _ in scheduler.commit(plan, result):
            measured = live[seq.key[0]]
            measured.gained(now_s - measured.sent_s)
            if seq.finish_reason is not None:
                measured = live.pop(seq.key[0])
                measured.end_s = now_s - measured.sent_s
                measured.completion_tokens = seq.num_output
                measured.cached_tokens = seq.num_cached
                measured.alone_s = requests[int(seq.key[0])].decode_s + cost.prefill_s(
                    seq.num_cached, seq.prompt_len, sizes.max_num_batched_tokens
                )
                on_finished()
    return Outcome(
        served=served,
        device=device,
        scheduler=scheduler,
        virtual_s=clock.now_s,
        queue_peak=queue_peak,
        blocks_peak=blocks_peak,
    )


def _measured(arrival: Arrival, rate: float) -> Served:
    return Served(
        group=URGENT if arrival.urgent else ORDINARY,
        sent_s=arrival.arrival_s / rate,
        prompt_tokens=len(arrival.prompt),
        asked_tokens=arrival.output_len,
    )


def _request(request_id: str, arrival: Arrival, arrival_s: float) -> schedule.Request:
    return schedule.Request(
        request_id=request_id,
        prompt_token_ids=arrival.prompt,
        params=SamplingParams(max_tokens=arrival.output_len, ignore_eos=True),
        arrival_s=arrival_s,
        priority=0 if arrival.urgent else 1,
    )


# --- figures -----------------------------------------------------------------------------------


def summarize(outcome: Outcome, slo: Slo) -> dict[str, Any]:
    """Return all figures of one replay, ready for JSON; every time is virtual."""
    served, device, scheduler = outcome.served, outcome.device, outcome.scheduler
    pool = scheduler.pool
    steps, span_s = device.num_steps, outcome.virtual_s
    output = sum(m.completion_tokens for m in served)
    kept = sum(map(slo.met_by, served))
    waits = [m.waited_s for m in served if m.waited_s is not None]
    return {
        "virtual_s": span_s,
        "output_tokens": output,
        "prompt_tokens": sum(m.prompt_tokens or 0 for m in served),
        "output_tokens_per_s": output / span_s,
        **_latencies(served),
        "longest_gap_ms": spread_ms(m.longest_gap_s for m in served),
        "goodput": {"requests_per_s": kept / span_s, "share": kept / len(served)},
        "prefix_hit_rate": pool.hit_tokens / max(pool.queried_tokens, 1),
        "preemptions": scheduler.num_preemptions,
        "steps": steps,
        "step_ms": 1e3 * device.busy_s / steps,
        "busy_share": device.busy_s / span_s,
        "mean_batch": device.num_sequences / steps,
        "mean_step_tokens": device.num_tokens / steps,
        "queue_peak": outcome.queue_peak,
        "blocks_peak_share": outcome.blocks_peak / pool.num_blocks,
        "waited_ms": {**(spread_ms(waits) or {}), "longest": 1e3 * max(waits)},
        "fairness": fairness(served),
        "groups": {
            group: {"requests": len(members), **_latencies(members)}
            for group in (URGENT, ORDINARY)
            if (members := [m for m in served if m.group == group])
        },
    }


def _latencies(served: Sequence[Served]) -> dict[str, Any]:
    return {name: value for name, value in latencies(served).items() if name != "itl_ms"}


def fairness(served: Sequence[Served]) -> dict[str, float]:
    """Return how evenly delay is shared, by slowdown: time taken over time alone (>= 1).

    `jain` is Jain's index of the speeds (1 / slowdown): 1 if all slow down equally, 1 / n if one
    request gets everything. Short and long are the quarters with the least and the most time alone.
    """
    speeds = [1 / m.slowdown for m in served]
    ordered = [m.slowdown for m in sorted(served, key=lambda m: m.alone_s)]
    quarter = max(len(ordered) // 4, 1)
    return {
        "jain": math.fsum(speeds) ** 2 / (len(speeds) * math.fsum(x * x for x in speeds)),
        "slowdown_p50": percentile(ordered, 50),
        "slowdown_p99": percentile(ordered, 99),
        "slowdown_short_p50": percentile(ordered[:quarter], 50),
        "slowdown_long_p50": percentile(ordered[-quarter:], 50),
    }


def rounded(value: Any) -> Any:
    """Round every float of a report to six digits."""
    if isinstance(value, Mapping):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


# --- the command -------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return reports.publish("replay", args, lambda: replay(args), markdown)


def replay(args: argparse.Namespace) -> dict[str, Any]:
    sizes = EngineSizes(**{f.name: getattr(args, f.name) for f in dataclasses.fields(EngineSizes)})
    changes = {f.name: getattr(args, f.name) for f in dataclasses.fields(StepCost)}
    changes = {name: value for name, value in changes.items() if value is not None}
    if any(not (value >= 0 and math.isfinite(value)) for value in changes.values()):
        raise BenchmarkError("the costs of a step must be finite and not negative")
    cost = dataclasses.replace(DEVICES[args.device], **changes)
    if any(not (rate > 0 and math.isfinite(rate)) for rate in args.rates):
        raise BenchmarkError("--rates must be greater than 0")
    if not 0 <= args.urgent_share <= 1:
        raise BenchmarkError(f"--urgent-share must be from 0 to 1, not {args.urgent_share}")
    if not all(0 <= target_ms < math.inf for target_ms in args.itl_target_ms):
        raise BenchmarkError("--itl-target-ms must be finite and not negative")
    slo = Slo(ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms)
    traces, rows = [], []
    for path in args.trace:
        entries = read_trace(path, args.max_requests)
        requests = arrivals(entries, sizes, cost, urgent_share=args.urgent_share, seed=args.seed)
        traces.append(_about(path, entries, requests))
        for rate, policy, target_ms in itertools.product(
            args.rates, args.policies, args.itl_target_ms
        ):
            name = f"{path.stem} {rate:g}x {policy}" + f" {target_ms:g} ms" * bool(target_ms)
            figures = _played(name, requests, rate, policy, sizes, cost, slo, args.seed, target_ms)
            which = {"rate": rate, "policy": policy, "itl_target_ms": target_ms}
            rows.append({"trace": path.stem, **which, **rounded(figures)})
    return {
        "device": args.device,
        "step_cost": rounded(vars(cost)),
        "engine": vars(sizes),
        "slo": slo.asked,
        "urgent_share": args.urgent_share,
        "seed": args.seed,
        "traces": traces,
        "rows": rows,
    }


def _about(
    path: Path, entries: Sequence[TraceEntry], requests: Sequence[Arrival]
) -> dict[str, Any]:
    clipped = sum(
        (len(request.prompt), request.output_len) != (entry.input_len, entry.output_len)
        for entry, request in zip(entries, requests, strict=True)
    )
    return {
        "trace": path.stem,
        "requests": len(requests),
        "requests_clipped": clipped,
        "span_s": rounded(entries[-1].arrival_s),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.output_len for request in requests),
        "prompt_tokens_seen_before": _seen_before(entries, requests),
    }


def _seen_before(entries: Sequence[TraceEntry], requests: Sequence[Arrival]) -> int:
    """Count prompt tokens in leading blocks of earlier prompts, which an infinite cache saves."""
    seen: set[int] = set()
    total = 0
    for entry, request in zip(entries, requests, strict=True):
        known = sum(1 for _ in itertools.takewhile(seen.__contains__, entry.hash_ids))
        total += min(known * TRACE_BLOCK, len(request.prompt))
        seen.update(entry.hash_ids)
    return total


def _played(
    name: str,
    requests: Sequence[Arrival],
    rate: float,
    policy: Policy,
    sizes: EngineSizes,
    cost: StepCost,
    slo: Slo,
    seed: int,
    itl_target_ms: float,
) -> dict[str, Any]:
    start_s = time.perf_counter()
    with short_pauses(), progress_bar(total=len(requests), desc=name, unit="requests") as bar:
        outcome = play(
            requests,
            rate=rate,
            policy=policy,
            sizes=sizes,
            cost=cost,
            seed=seed,
            itl_target_s=itl_target_ms / 1e3,
            on_finished=bar.update,
        )
    wall_s = time.perf_counter() - start_s
    steps = outcome.device.num_steps
    reports.progress(
        f"{name}: {outcome.virtual_s:,.0f} s in {wall_s:.1f} s, {steps:,} steps of "
        f"{1e6 * wall_s / steps:.0f} us"
    )
    return summarize(outcome, slo)


def markdown(report: dict[str, Any]) -> str:
    engine = report["engine"]
    slo = ", ".join(
        f"{name.removesuffix('_ms').upper()} {ms:g} ms" for name, ms in report["slo"].items()
    )
    lines = [
        f"{reports.heading(report)}; modeled device {report['device']}, {engine['num_blocks']} "
        f"blocks of {engine['block_size']}, {engine['max_num_seqs']} sequences and "
        f"{engine['max_num_batched_tokens']} tokens per step; virtual time; SLO: {slo}",
    ]
    for about in report["traces"]:
        rows = [row for row in report["rows"] if row["trace"] == about["trace"]]
        seen = about["prompt_tokens_seen_before"] / about["prompt_tokens"]
        lines += [
            "",
            f"{about['trace']}: {about['requests']:,} requests in {about['span_s']:,.0f} s, "
            f"{about['prompt_tokens']:,} prompt and {about['output_tokens']:,} output tokens; "
            f"{seen:.0%} of the prompt tokens are in blocks of an earlier prompt",
            "",
            reports.table(HEADER, [_cells(row) for row in rows]),
        ]
    return "\n".join(lines)


HEADER = (
    "rate", "policy", "ITL target, ms", "TTFT p50 / p99, ms", "TPOT p50 / p99, ms",
    "longest gap p50 / p99, ms", "whole p50 / p99, s", "goodput",
    "hit rate", "preempted", "steps", "batch", "queue peak", "longest wait, s", "Jain",
    "slowdown short / long", "TTFT p99 urgent / others, ms",
)  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    fair, groups = row["fairness"], row["groups"]
    urgent = [_of(groups[group], "ttft_ms", "p99") for group in groups]
    return [
        f"{row['rate']:g}x",
        row["policy"],
        f"{row['itl_target_ms']:g}" if row["itl_target_ms"] else "off",
        reports.pair(row["ttft_ms"]),
        reports.pair(row["tpot_ms"], 1),
        reports.pair(row["longest_gap_ms"]),
        f"{number(row['e2e_ms']['p50'] / 1e3, 1)} / {number(row['e2e_ms']['p99'] / 1e3, 1)}",
        f"{row['goodput']['share']:.1%}",
        f"{row['prefix_hit_rate']:.2f}",
        number(row["preemptions"]),
        number(row["steps"]),
        number(row["mean_batch"], 1),
        number(row["queue_peak"]),
        number(row["waited_ms"]["longest"] / 1e3, 1),
        f"{fair['jain']:.2f}",
        f"{fair['slowdown_short_p50']:.1f} / {fair['slowdown_long_p50']:.1f}",
        " / ".join(urgent),
    ]


def _of(row: dict[str, Any], name: str, percentile: str, digits: int = 0) -> str:
    return number(row[name] and row[name][percentile], digits)


def _parser() -> argparse.ArgumentParser:
    parser = reports.parser(
        "replay",
        "Replay request traces through the scheduler on a modeled device, in virtual time.",
    )
    what = parser.add_argument_group("what is sent")
    what.add_argument(
        "--trace", type=Path, nargs="+", required=True, help="Azure CSV or Mooncake JSON lines"
    )
    what.add_argument(
        "--max-requests", type=int, help="maximum number of requests per trace (default: all)"
    )
    what.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[1, 2, 4, 8],
        help="factors of the trace's own rate (default 1 2 4 8)",
    )
    what.add_argument(
        "--urgent-share",
        type=float,
        default=0.2,
        help="share of requests with the better priority (default 0.2)",
    )
    what.add_argument("--seed", type=int, default=0)
    engine = parser.add_argument_group("the engine")
    engine.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    for name, default, text in (
        ("max-num-seqs", 256, "concurrent sequences"),
        ("max-num-batched-tokens", 2048, "of one step"),
        ("num-blocks", 13_000, "blocks of the KV cache"),
        ("block-size", 64, "tokens of a block"),
        ("context", 131_072, "tokens of prompt and output, to which requests are truncated"),
    ):
        engine.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    engine.add_argument(
        "--itl-target-ms",
        type=float,
        nargs="+",
        default=[0.0],
        help="inter-token latency target in ms, as for the server; 0: off (default)",
    )
    engine.add_argument(
        "--aging-s",
        type=float,
        default=SchedulerConfig.aging_s,
        help="seconds after which a waiting request precedes all prefix matches "
        f"({SchedulerConfig.aging_s:g})",
    )
    device = parser.add_argument_group("costs of a step in the device model")
    device.add_argument("--device", choices=DEVICES, default="h200-8b", help="the preset")
    for field in dataclasses.fields(StepCost):
        flag = f"--{field.name.replace('_', '-')}"
        device.add_argument(
            flag, type=float, help=f"{field.metadata['doc']}; default: the preset's"
        )
    slo = parser.add_argument_group("goodput limits")
    slo.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="default 1000")
    slo.add_argument("--slo-tpot-ms", type=float, default=50.0, help="default 50")
    return parser


if __name__ == "__main__":
    sys.exit(main())
