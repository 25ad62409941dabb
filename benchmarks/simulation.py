"""Simulated engines: the engine's own scheduler and block pool on a modeled device.

The device computes nothing (`virtual.py`). Time is virtual, so a simulation does not wait, and
equal arguments give equal figures on every machine.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.virtual import StepCost, VirtualClock, VirtualDevice, VirtualHostMemory
from forge_jax.config import Policy
from forge_jax.engine.core import max_rows
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule import request as schedule
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.host_tier import HostTier
from forge_jax.schedule.plan import StepPlan, StepResult
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig
from forge_jax.schedule.token_budget import TokenBudget
from forge_jax.step.host_blocks import BATCH, SAVING
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import Measured
from forge_serve.bench.traces import TRACE_BLOCK, TraceEntry, fitted

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


@dataclass(frozen=True, kw_only=True)
class HostMemorySize:
    """Host memory for evicted blocks, and the bandwidth of each direction of a copy."""

    num_blocks: int
    block_bytes: int
    bytes_per_s: float


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


class Balancer:
    """Chooses the replica of each request. This one always chooses the first."""

    def choose(self, request: schedule.Request) -> int:
        """Return the index of the replica that serves a request, at its arrival."""
        return 0

    def started(self, request: schedule.Request) -> None:
        """Record the first token of a request."""

    def finished(self, request: schedule.Request, num_output: int) -> None:
        """Record the end of a request."""


@dataclass(slots=True)
class _Live:
    request: schedule.Request
    arrival: Arrival
    measured: Served


class Replica:
    """An engine's scheduler on a modeled device, with a separate clock.

    Like the engine, it runs one step ahead: `tick` schedules and dispatches step t + 1 while t
    runs, and then reads t. A request that arrives in between is in step t + 2 at the earliest.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        sizes: EngineSizes,
        cost: StepCost,
        seed: int = 0,
        itl_target_s: float = 0.0,
        host: HostMemorySize | None = None,
    ):
        self.clock = VirtualClock()
        self.device = VirtualDevice(cost.step_s, self.clock)
        self.pool = BlockPool(sizes.num_blocks, sizes.block_size)
        self._host = None
        if host is not None:
            self.pool.host = HostTier(host.num_blocks, sizes.block_size, BATCH * SAVING)
            self._host = VirtualHostMemory(host.block_bytes, host.bytes_per_s, self.clock)
        limits = SchedulerConfig(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_rows=max_rows(sizes.max_num_seqs),
            max_model_len=sizes.context,
            policy=policy,
            aging_s=sizes.aging_s,
        )
        self._cost = cost
        self._budget = TokenBudget(itl_target_s) if itl_target_s else None
        self.scheduler = Scheduler(
            limits, self.pool, clock=self.clock, rng=random.Random(seed), budget=self._budget
        )
        self.queue_peak = 0  # largest number of waiting sequences after scheduling a step
        self.blocks_peak = 0  # most blocks in use
        self._live: dict[str, _Live] = {}
        self._in_flight: tuple[StepPlan, tuple[StepResult, float], float] | None = None

    @property
    def num_requests(self) -> int:
        """Requests that have not finished."""
        return len(self._live)

    @property
    def has_work(self) -> bool:
        return bool(self._live) or self._in_flight is not None

    def add(self, request: schedule.Request, arrival: Arrival) -> Served:
        """Add a request at its arrival; `tick` fills in the measurements."""
        if not self.has_work:
            self.clock.now_s = max(self.clock.now_s, request.arrival_s)
        measured = _measured(arrival, request.arrival_s)
        self._live[request.request_id] = _Live(request, arrival, measured)
        self.scheduler.add(request)
        return measured

    def tick(self, balancer: Balancer) -> int:
        """Dispatch a step and read the previous one, which moves the clock to that one's end.

        Returns:
          The number of requests that finished.
        """
        now_s = self.clock.now_s
        if self._host is not None:
            self.scheduler.finish_transfers(self._host.finished())
        plan = self.scheduler.schedule()
        step, self._in_flight = self._in_flight, None
        if self._host is not None:
            self._host.start(self.scheduler.transfers())
            if plan is None and step is None and self.scheduler.loads:
                self._host.wait()
        if plan is not None:
            self._in_flight = plan, self.device.dispatch(plan), now_s
            for admission in plan.admissions:
                measured = self._live[admission.seq_key[0]].measured
                if measured.waited_s is None:
                    measured.waited_s = now_s - measured.sent_s
        self.queue_peak = max(self.queue_peak, self.scheduler.num_waiting)
        self.blocks_peak = max(self.blocks_peak, self.pool.num_used)
        return 0 if step is None else self._read(balancer, *step)

    def _read(
        self,
        balancer: Balancer,
        plan: StepPlan,
        pending: tuple[StepResult, float],
        dispatched_s: float,
    ) -> int:
        result = self.device.read(pending)
        now_s = self.clock.now_s
        if self._budget is not None:
            self._budget.record(plan, dispatched_s, now_s)
        finished = 0
        for seq, _ in self.scheduler.commit(plan, result):
            live = self._live[seq.key[0]]
            measured = live.measured
            if measured.ttft_s is None:
                balancer.started(live.request)
            measured.gained(now_s - measured.sent_s)
            if seq.finish_reason is not None:
                del self._live[seq.key[0]]
                finished += 1
                balancer.finished(live.request, seq.num_output)
                measured.end_s = now_s - measured.sent_s
                measured.completion_tokens = seq.num_output
                measured.cached_tokens = seq.num_cached
                measured.alone_s = live.arrival.decode_s + self._cost.prefill_s(
                    seq.num_cached, seq.prompt_len, self.scheduler.config.max_num_batched_tokens
                )
        return finished


@dataclass(kw_only=True)
class Outcome:
    """The outcome of one simulation."""

    served: list[Served]
    replicas: Sequence[Replica]
    virtual_s: float  # from the first arrival to the last token


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
    replicas: Sequence[Replica],
    *,
    rate: float,
    balancer: Balancer,
    on_finished: Callable[[], object] = lambda: None,
) -> Outcome:
    """Serve all requests, `rate` times as fast as they came.

    Args:
      requests: In the order of their arrival.
      replicas: Engines without requests. Each has its own clock.
      rate: Factor of the trace's own rate.
      balancer: Chooses a replica for each request, at its arrival.
      on_finished: Runs after each finished request.
    """
    served: list[Served] = []
    busy: list[tuple[float, int]] = []  # a heap: when each replica with requests ticks next
    while len(served) < len(requests) or busy:
        if len(served) < len(requests):
            arrival = requests[len(served)]
            arrival_s = arrival.arrival_s / rate
            if not busy or arrival_s <= busy[0][0]:
                request = _request(str(len(served)), arrival, arrival_s)
                chosen = balancer.choose(request)
                replica = replicas[chosen]
                idle = not replica.has_work
                served.append(replica.add(request, arrival))
                if idle:
                    heapq.heappush(busy, (replica.clock.now_s, chosen))
                continue
        _, ticking = busy[0]
        replica = replicas[ticking]
        for _ in range(replica.tick(balancer)):
            on_finished()
        if replica.has_work:
            heapq.heapreplace(busy, (replica.clock.now_s, ticking))
        else:
            heapq.heappop(busy)
    return Outcome(
        served=served,
        replicas=replicas,
        virtual_s=max(measured.sent_s + measured.end_s for measured in served),
    )


def _measured(arrival: Arrival, arrival_s: float) -> Served:
    return Served(
        group=URGENT if arrival.urgent else ORDINARY,
        sent_s=arrival_s,
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
