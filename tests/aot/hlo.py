"""Arrays that a compiled program writes to memory, read from its HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator

SIZES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "u16": 2, "bf16": 2, "f16": 2}
SIZES |= {"s4": 0.5, "s32": 4, "u32": 4, "f32": 4}
NO_WORK = {"parameter", "get-tuple-element", "bitcast", "tuple", "constant"}


def large_results(hlo: str, limit: int, shapes: Collection[tuple[int, ...]] = ()) -> Iterator[str]:
    """Yield instructions outside fusions that make an array of `limit` bytes or more.

    Instructions that make an array of one of `shapes` are included, with the axes in any order.
    """
    orders = [sorted(shape) for shape in shapes]
    fused = False
    for line in hlo.splitlines():
        if line.endswith("{") and " = " not in line:
            fused = "fus" in line.split("(")[0]
        made = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if made is None or fused or made[4] in NO_WORK or made[2] not in SIZES:
            continue
        shape = [int(size) for size in made[3].split(",") if size]
        if math.prod(shape) * SIZES[made[2]] >= limit or sorted(shape) in orders:
            yield line.strip()[:120]
