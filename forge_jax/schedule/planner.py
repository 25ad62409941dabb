"""Planning of one step from its parts: decodes, prefill chunks, admissions, drafts."""

from __future__ import annotations

from collections.abc import Callable

from forge_jax.schedule.admission import AdmissionPart
from forge_jax.schedule.config import SchedulerConfig
from forge_jax.schedule.decodes import DecodePart
from forge_jax.schedule.drafts import DraftPart, Drafts
from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.loading import Loading
from forge_jax.schedule.partial_plan import PartialPlan
from forge_jax.schedule.plan import StepPlan
from forge_jax.schedule.prefill import PrefillPart
from forge_jax.schedule.prefix_cache import PrefixCache
from forge_jax.schedule.request import Sequence, decode
from forge_jax.schedule.slots import Slots
from forge_jax.schedule.step_budget import StepBudget
from forge_jax.schedule.token_budget import TokenBudget


class Planner:
    """A planner that fills each part of a step from one budget, then writes the plan.

    A step that preempted a sequence admits none.

    Args:
      clock: seconds, for the aging of waiting requests.
      latency_budget: limits the size of steps that contain both prompts and decodes. None: no such
        limit.
      loading: loads from host memory. None: there are no copies in host memory.

    Attributes:
      admission: the part that counts cached and computed prompt tokens.
    """

    def __init__(
        self,
        slots: Slots,
        prefixes: PrefixCache,
        clock: Callable[[], float],
        latency_budget: TokenBudget | None,
        loading: Loading | None = None,
    ):
        self._slots = slots
        self._decodes = DecodePart(slots)
        self._prefill = PrefillPart(slots)
        self.admission = AdmissionPart(slots, prefixes, self._prefill, clock, loading)
        self._drafts = DraftPart(slots)
        self._latency_budget = latency_budget

    def plan(
        self,
        config: SchedulerConfig,
        drafts: Drafts | None,
        *,
        masks_late: bool,
        pools: bool | None,
    ) -> StepPlan | None:
        """Return the next step, or None if no sequence can be part of it.

        Args:
          pools: plan only sequences with (True) or without (False) `pooling`. None: both.
        """
        slots = self._slots
        num_preemptions = slots.num_preemptions
        plan = PartialPlan(StepBudget(config, len(slots.free)))
        if pools:
            prompts, awaited = self._pooling_prompts(), False
        else:
            prompts, awaited = self._decodes.fill(plan, masks_late=masks_late)
            if pools is not None:
                prompts = [seq for seq in prompts if seq.pooling is None]
        if self._latency_budget is not None and (prompts or len(slots.backlog.queue)):
            num_drafts = sum(map(len, drafts.values())) if drafts else 0
            num_decodes = len(plan.decodes) + num_drafts
            self._hold_back(plan, self._latency_budget, num_decodes, awaited, config)
        if prompts:
            self._prefill.fill(plan, prompts, config)
        if slots.num_preemptions == num_preemptions and (
            config.batching == "continuous" or not slots.running
        ):
            self.admission.fill(plan, config, pools)
        if not plan.decodes and not plan.chunks:
            self._decodes.forget()
            return None
        if drafts and plan.decodes:
            self._drafts.fill(plan, drafts)
        return self._written(plan)

    def _pooling_prompts(self) -> list[Sequence]:
        """Return the running sequences with `pooling` that still prefill.

        Sequences with `pooling` never decode: the other running ones only await results.
        """
        return [
            seq
            for seq in self._slots.running
            if seq.status is Status.PREFILLING and seq.pooling is not None
        ]

    def _hold_back(
        self,
        plan: PartialPlan,
        latency_budget: TokenBudget,
        num_decodes: int,
        awaited: bool,
        config: SchedulerConfig,
    ) -> None:
        """Withhold tokens from prompts to meet the latency target, but never all of them."""
        most = config.max_num_batched_tokens
        size = latency_budget.choose(max(num_decodes, 1) if awaited else 0, most)
        if size < most:
            for_prompts = max(size - num_decodes, 1)
            plan.budget.hold_back(max(plan.budget.tokens - for_prompts, 0))

    def _written(self, plan: PartialPlan) -> StepPlan:
        """Write the plan, and count its tokens as computed and sampled."""
        seqs = plan.decodes
        columns, epochs = self._decodes.columns(plan)
        decode(seqs)
        rows = []
        if plan.chunks or plan.drafts:
            others = plan.drafts | {chunk.seq: self._prefill.row(chunk) for chunk in plan.chunks}
            for seq in plan.drafts:
                seq.verify()
            # Single tokens first, like the decodes, and drafts before prompts. The sort is stable.
            ordered = sorted(others, key=lambda seq: others[seq].num_tokens > 1)
            rows = [others[seq] for seq in ordered]
            seqs = seqs + ordered
            epochs = [seq.epoch for seq in seqs]
        step = self._slots.in_flight.add(seqs, epochs)
        return StepPlan(step, tuple(plan.admissions), tuple(rows), columns)
