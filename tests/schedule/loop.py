"""A scheduler on a fake device, one step ahead, for tests of single decisions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.drafts import Drafts
from forge_jax.schedule.plan import StepPlan
from forge_jax.schedule.request import Request, Sequence
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig, SequenceUpdate
from forge_jax.schedule.token_budget import TokenBudget
from forge_jax.telemetry.engine_state import Watcher
from forge_jax.testing import FakeDevice

VOCAB = 1000


class Loop:
    """A loop with `add`, then `step` or `run`; by default, tokens count up from the last one.

    If `step_s` is given, each step takes that long on the device, and `now_s` is the last read
    time.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        block_size: int = 4,
        prefix_cache: bool = True,
        next_token: Callable | None = lambda tokens, seed: (tokens[-1] + 1) % VOCAB,
        fault: Callable | None = None,
        budget: TokenBudget | None = None,
        step_s: Callable[[StepPlan], float] = lambda plan: 0.0,
        **limits,
    ):
        defaults = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_rows": 64,
            "max_model_len": 200,
        }
        self.now_s = 0.0
        self.pool = BlockPool(num_blocks, block_size, prefix_cache)
        config = SchedulerConfig(**{**defaults, **limits})
        self.scheduler = Scheduler(
            config, self.pool, clock=lambda: self.now_s, rng=random.Random(0), budget=budget
        )
        self.device = FakeDevice(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=config.max_num_seqs,
            vocab_size=VOCAB,
            next_token=next_token,
            pool=self.pool,
            fault=fault,
        )
        self.watcher = Watcher(self.scheduler, lambda: self.now_s)
        self.updates: list[SequenceUpdate] = []  # updates of the last step
        self._in_flight: tuple[StepPlan, Any, float] | None = None
        self._num_requests = 0
        self._step_s = step_s
        self._free_s = 0.0  # when the device is idle again

    def add(
        self, prompt, *, request_id=None, priority=0, salt="", request_seed=0, **params
    ) -> list[Sequence]:
        self._num_requests += 1
        return self.scheduler.add(
            Request(
                request_id=request_id or f"r{self._num_requests}",
                prompt_token_ids=list(prompt),
                params=SamplingParams(**params),
                priority=priority,
                cache_salt=salt,
                seed=request_seed,
            )
        )

    def add_one(self, prompt, **params) -> Sequence:
        (seq,) = self.add(prompt, **params)
        return seq

    def step(self, drafts: Drafts | None = None) -> StepPlan | None:
        """Dispatch the next step, then read the one before.

        A step with `drafts` first reads the one before.
        """
        if drafts is not None:
            self._read()
        plan = self.scheduler.schedule(drafts)
        pending = None if plan is None else self.device.dispatch(plan)
        dispatched_s = self.now_s
        self._read()
        if plan is not None:
            self._in_flight = plan, pending, dispatched_s
        self.pool.check()
        return plan

    def _read(self) -> None:
        self.updates = []
        previous, self._in_flight = self._in_flight, None
        if previous is None:
            return
        plan, pending, dispatched_s = previous
        result = self.device.read(pending)
        begin_s = self.now_s
        self._free_s = max(self._free_s, dispatched_s) + self._step_s(plan)
        self.now_s = max(self.now_s, self._free_s)
        if self.scheduler.budget is not None:
            self.scheduler.budget.record(plan, dispatched_s, self.now_s)
        if self.watcher.watches:
            self.watcher.record(plan, result, begin_s, self.now_s)
        self.updates = self.scheduler.commit(plan, result)

    def run(self, max_steps: int = 1000) -> list[StepPlan]:
        """Step until there is nothing to do, and return the plans."""
        plans = []
        for _ in range(max_steps):
            plan = self.step()
            if plan is not None:
                plans.append(plan)
            elif not self.scheduler.has_work and self._in_flight is None:
                return plans
        raise AssertionError(f"still working after {max_steps} steps")


def scheduled(plan: StepPlan | None, seq: Sequence):
    """Return what a plan gives to a sequence, or None."""
    assert plan is not None
    return next((row for row in plan.sequences if row.seq_key == seq.key), None)


def output(seq: Sequence) -> list[int]:
    return seq.tokens[seq.prompt_len :]
