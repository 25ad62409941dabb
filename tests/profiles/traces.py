"""Handmade traces in the format of JAX's profiler."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from jax.profiler import ProfileData

Stats = Mapping[str, str | int]


class Event(NamedTuple):
    name: str
    start_us: float
    us: float
    stats: Stats = MappingProxyType({})


def op(name: str, start_us: float, us: float, module: str = "jit_decode_4", run: int = 1) -> Event:
    """Return one operation on a CPU."""
    return Event(name, start_us, us, {"hlo_op": name, "hlo_module": module, "run_id": run})


def serialized(planes: Mapping[str, Mapping[str, Sequence[Event]]]) -> bytes:
    """Serialize events by plane and line."""
    return ProfileData.text_proto_to_serialized_xspace("".join(map(_plane, planes.items())))


def _plane(item: tuple[str, Mapping[str, Sequence[Event]]]) -> str:
    name, lines = item
    events = [event for line in lines.values() for event in line]
    names = {name: i for i, name in enumerate({e.name: None for e in events}, start=1)}
    stats = {name: i for i, name in enumerate({s: None for e in events for s in e.stats}, start=1)}
    parts = [f"planes {{ name: {json.dumps(name)}\n"]
    for number, (line, own) in enumerate(lines.items(), start=1):
        parts.append(f"lines {{ id: {number} name: {json.dumps(line)}\n")
        for event in own:
            values = [
                f"stats {{ metadata_id: {stats[stat]} "
                + (f"str_value: {json.dumps(v)}" if isinstance(v, str) else f"int64_value: {v}")
                + " }"
                for stat, v in event.stats.items()
            ]
            parts.append(
                f"events {{ metadata_id: {names[event.name]} offset_ps: "
                f"{round(event.start_us * 1e6)} duration_ps: {round(event.us * 1e6)} "
                f"{' '.join(values)} }}\n"
            )
        parts.append("}\n")
    for field, known in (("event_metadata", names), ("stat_metadata", stats)):
        parts += [
            f"{field} {{ key: {i} value {{ id: {i} name: {json.dumps(name)} }} }}\n"
            for name, i in known.items()
        ]
    return "".join([*parts, "}\n"])


def write_trace(
    run: Path,
    planes: Mapping[str, Mapping[str, Sequence[Event]]],
    hlo: str | None = None,
    session: str = "2026_01_01_00_00_00",
    **figures: float,
) -> Path:
    """Write a run's folder, with `hlo` as the compiled `jit_decode_4`."""
    folder = run / "plugins" / "profile" / session
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(serialized(planes))
    if hlo is not None:
        (run / "executables").mkdir()
        with gzip.open(run / "executables" / "decode_4.hlo.txt.gz", "wt") as file:
            file.write(hlo)
        known = json.dumps({"name": "decode[4]", **figures})
        (run / "executables" / "decode_4.json").write_text(known)
    return run


HLO = """\
HloModule jit_decode_4, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %multiply.1 = f32[4]{0} multiply(%p, %p), metadata={op_name="jit(decode_4)/layer_0/gate_up/mul"}
  ROOT %add.1 = f32[4]{0} add(%multiply.1, %p), metadata={op_name="jit(decode_4)/layer_0/gate_up/add"}
}

%body.3 (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %inner_fusion.7 = f32[4]{0} fusion(%t), kind=kLoop, calls=%fused_without_names
  ROOT %tuple.2 = (s32[], f32[4]{0}) tuple(%t, %inner_fusion.7)
}

ENTRY %main.9 (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %ffi_call.12 = f32[4]{0} custom-call(%a), custom_call_target="forge_attention", metadata={op_name="jit(decode_4)/layer_0/attention/ffi_call"}
  %ffi_call.13 = f32[4]{0} custom-call(%a), custom_call_target="forge_attention", metadata={op_name="jit(decode_4)/layer_1/attention/ffi_call"}
  %while.5 = (s32[], f32[4]{0}) while(%a), condition=%cond.2, body=%body.3, metadata={op_name="jit(decode_4)/layer_1/attention/jit(walk)/while"}
  %add_multiply_fusion.3 = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused
  %argmax.clone.2 = s32[4]{0} reduce(%a), to_apply=%larger, metadata={op_name="jit(decode_4)/sample/greedy/cond/branch_1_fun/argmax"}
  ROOT %copy.4 = f32[4]{0} copy(%a)
}
"""  # noqa: E501
