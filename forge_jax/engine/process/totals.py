"""Statistics and snapshots of several engines, combined as if they were one engine."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forge_jax.engine.async_engine import EngineStats
from forge_jax.schedule.host_tier import HostKVStats
from forge_jax.speculate.speculator import SpeculationStats
from forge_jax.telemetry.engine_state import (
    MAX_FINISHED,
    MAX_RUNNING,
    MAX_STEPS,
    MAX_WAITING,
    BlockMap,
    EngineState,
    Holder,
    SequenceState,
    StepRecord,
)
from forge_jax.telemetry.phases import Phase, PhaseTotals, TokenTotals

_SUMS = (
    *("num_running", "num_waiting", "num_deferred", "num_slots", "num_blocks", "num_free_blocks"),
    *("num_used_blocks", "num_cached_blocks", "evictions", "steps", "step_sequences"),
    *("prompt_tokens", "cached_prompt_tokens", "computed_prompt_tokens", "generation_tokens"),
    *("preemptions", "recoveries", "restarts", "prefix_cache_queries", "prefix_cache_hits"),
    *("compilations_after_ready", "completed_requests"),
)


def total_stats(parts: Seq[EngineStats]) -> EngineStats:
    """Return the statistics of equal engines together.

    Counters and gauges are sums, `stalled_s` is the shortest, other times and limits are the
    largest. Everything else is the first engine's, including `state` and `healthy`.
    """
    first = parts[0]
    sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    times = [part.expected_step_s for part in parts if part.expected_step_s is not None]
    dropped = [part.dropped_kv_event_batches for part in parts]
    return dataclasses.replace(
        first,
        **sums,
        step_tokens=_token_totals([part.step_tokens for part in parts]),
        max_step_sequences=max(part.max_step_sequences for part in parts),
        stalled_s=min(part.stalled_s for part in parts),
        step_phases=_phase_totals([part.step_phases for part in parts]),
        startup_seconds=_longest([part.startup_seconds for part in parts]),
        step_token_budget=max(part.step_token_budget for part in parts),
        expected_step_s=max(times, default=None),
        speculation=_speculation([part.speculation for part in parts]),
        host_kv=_host_kv([part.host_kv for part in parts]),
        dropped_kv_event_batches=(
            None if first.dropped_kv_event_batches is None else sum(each or 0 for each in dropped)
        ),
    )


def _token_totals(parts: Seq[TokenTotals]) -> TokenTotals:
    return TokenTotals(
        count=sum(part.count for part in parts),
        total=sum(part.total for part in parts),
        buckets=_columns(part.buckets for part in parts),
    )


def _phase_totals(parts: Seq[Mapping[Phase, PhaseTotals]]) -> dict[Phase, PhaseTotals]:
    found: dict[Phase, list[PhaseTotals]] = {}
    for part in parts:
        for name, totals in part.items():
            found.setdefault(name, []).append(totals)
    return {
        name: PhaseTotals(
            count=sum(each.count for each in totals),
            total_s=sum(each.total_s for each in totals),
            buckets=_columns(each.buckets for each in totals),
        )
        for name, totals in found.items()
    }


def _longest(parts: Seq[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: max(part.get(name, 0.0) for part in parts) for name in names}


def _speculation(parts: Seq[SpeculationStats | None]) -> SpeculationStats | None:
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return SpeculationStats(
        num_drafts=sum(part.num_drafts for part in found),
        num_draft_tokens=sum(part.num_draft_tokens for part in found),
        accepted_per_position=_columns(part.accepted_per_position for part in found),
    )


def _host_kv(parts: Seq[HostKVStats | None]) -> HostKVStats | None:
    found = [dataclasses.asdict(part) for part in parts if part is not None]
    if not found:
        return None
    return HostKVStats(**{name: sum(part[name] for part in found) for name in found[0]})


def _columns(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))


@dataclass(slots=True)
class StateMerger:
    """Combines snapshots of several engines into those of one engine with all of their blocks.

    Steps are numbered in the order in which they are found, because each engine has its own
    numbers, which begin again in a new process.
    """

    _num_steps: int = 0
    _latest_s: dict[int, float] = field(default_factory=dict[int, float])  # by engine
    _steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))

    def merge(self, states: Mapping[int, EngineState]) -> EngineState:
        """Return the snapshot of all engines, from at least one engine's, by its index."""
        parts = list(states.values())
        sequences, places = _sequences(parts)
        self._record(states)
        finished = [each for part in parts for each in part.finished]
        finished.sort(key=lambda each: each.finished_s or 0.0)
        return EngineState(
            time_s=max(part.time_s for part in parts),
            cost_s=sum(part.cost_s for part in parts),
            num_running=sum(part.num_running for part in parts),
            num_waiting=sum(part.num_waiting for part in parts),
            sequences=sequences,
            finished=finished[-MAX_FINISHED:],
            blocks=_blocks([part.blocks for part in parts], places),
            steps=list(self._steps),
        )

    def _record(self, states: Mapping[int, EngineState]) -> None:
        new: list[StepRecord] = []
        for engine, state in states.items():
            latest_s = self._latest_s.get(engine, 0.0)
            new += [record for record in state.steps if record.end_s > latest_s]
            if state.steps:
                self._latest_s[engine] = state.steps[-1].end_s
        for record in sorted(new, key=lambda each: each.end_s):
            self._steps.append(dataclasses.replace(record, step=self._num_steps))
            self._num_steps += 1


def _sequences(parts: Seq[EngineState]) -> tuple[list[SequenceState], list[dict[int, int]]]:
    """Return the listed sequences, and for each engine their indices by those of the engine."""
    places: list[dict[int, int]] = [{} for _ in parts]
    found: list[SequenceState] = []
    for status, most in (("running", MAX_RUNNING), ("waiting", MAX_WAITING)):
        room = most
        for part, place in zip(parts, places, strict=True):
            for index, each in enumerate(part.sequences):
                if each.status == status and room:
                    place[index], room = len(found), room - 1
                    found.append(each)
    return found, places


def _blocks(maps: Seq[BlockMap], places: Seq[Mapping[int, int]]) -> BlockMap:
    def moved(holder: Holder, place: Mapping[int, int]) -> Holder:
        return place.get(holder, "other") if isinstance(holder, int) else holder

    return BlockMap(
        block_size=maps[0].block_size,
        num_blocks=sum(each.num_blocks for each in maps),
        num_free=sum(each.num_free for each in maps),
        num_cached=sum(each.num_cached for each in maps),
        num_shared=sum(each.num_shared for each in maps),
        num_owned=sum(each.num_owned for each in maps),
        blocks_per_cell=maps[0].blocks_per_cell,
        runs=[
            (length, moved(holder, place))
            for each, place in zip(maps, places, strict=True)
            for length, holder in each.runs
        ],
    )
