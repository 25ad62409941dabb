"""The kernels of a compiled program, and the arrays that they read and write, from its HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

SIZES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "u16": 2, "bf16": 2, "f16": 2}
SIZES |= {"s4": 0.5, "u4": 0.5, "s16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
SIZES |= {"f8e5m2": 1, "f64": 8}
NO_WORK = {"parameter", "get-tuple-element", "bitcast", "tuple", "constant", "opt-barrier"}
SLICES = {"gather", "slice", "dynamic-slice"}
IN_PLACE = {"scatter", "dynamic-update-slice"}
# Instructions of a fusion that compute nothing, because they only select what others read.
MOVES = {"broadcast", "reshape", "transpose", "copy", "iota", "concatenate", "pad", "reverse"}
COLLECTIVES = (
    *("all-reduce", "all-gather", "all-to-all", "reduce-scatter"),
    *("collective-permute", "collective-broadcast"),
)
FEW_ROWS_SCOPE = "/forge_linear_few_rows/"
# Instructions of that kernel per value, without and with minima, by the bytes of a value and levels
# of scales. They were counted in the PTX of its loop for an H200, without moves.
FEW_ROWS_OPERATIONS = {(0.5, 1): (2.7, 3.3), (1.0, 1): (4.0, 4.6), (1.0, 2): (5.3, 5.6)}
# Scopes that name a part; the innermost one counts.
PARTS = (
    "inputs", "rope_tables", "embed", "norm", "rope_write", "attention", "swiglu", "residual",
    "product", "final_norm", "rows", "sample", "fault", "changed", "bias", "penalties",
    "min_tokens", "greedy", "random", "filter", "top_k", "top_p", "logprobs",
)  # fmt: skip


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


@dataclass
class Instruction:
    name: str
    opcode: str
    sizes: list[float]  # bytes of each array; 4-bit values may end within a byte
    operands: list[str]
    called: list[str]
    scope: str
    target: str  # target of a custom call
    number: int  # index of a parameter, or of a tuple's element
    shapes: list[tuple[int, ...]]  # one per array
    contracted: tuple[int, ...] = ()  # axes of a product's left operand

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def bytes(self) -> float:
        return sum(self.sizes)


@dataclass
class Computation:
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""


def parse(hlo: str) -> tuple[dict[str, Computation], Computation]:
    """Return all computations, and the entry."""
    computations: dict[str, Computation] = {}
    current = entry = Computation()
    for line in hlo.splitlines():
        header = re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line)
        if header is not None:
            current = computations[header[2]] = Computation()
            entry = current if header[1] else entry
            continue
        made = re.match(r"\s+(ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$", line)
        if made is None:
            continue
        root, name, shape, opcode, rest = made.groups()
        arguments = rest.split("), ", 1)[0]
        scope = re.search(r'op_name="([^"]*)"', rest)
        target = re.search(r'custom_call_target="([^"]*)"', rest)
        number = re.search(r"\bindex=(\d+)", rest) or re.match(r"(\d+)\)", rest)
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", rest)
        arrays = [
            (kind, tuple(int(size) for size in dimensions.split(",") if size))
            for kind, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", shape)
            if kind in SIZES
        ]
        current.instructions[name] = Instruction(
            name=name,
            opcode=opcode,
            sizes=[SIZES[kind] * math.prod(dimensions) for kind, dimensions in arrays],
            operands=re.findall(r"%([\w.-]+)", arguments),
            called=re.findall(r"(?:calls|true_computation|false_computation)=%([\w.-]+)", rest),
            scope=scope[1] if scope else "",
            target=target[1] if target else "",
            number=int(number[1]) if number else 0,
            shapes=[dimensions for _, dimensions in arrays],
            contracted=tuple(map(int, contracted[1].split(","))) if contracted else (),
        )
        if root:
            current.root = name
    return computations, entry


def used(fused: Computation) -> dict[int, float]:
    """Return the bytes that the computation reads of each parameter."""
    read = _read(fused)
    return {
        i.number: read.get(i.name, 0.0)
        for i in fused.instructions.values()
        if i.opcode == "parameter"
    }


def _read(fused: Computation) -> dict[str, float]:
    """Return the bytes that the computation needs of each instruction's result."""
    read: dict[str, float] = {}
    order = list(fused.instructions.values())
    for instruction in reversed(order):
        name, wanted = instruction.name, read.get(instruction.name, 0.0)
        if name == fused.root:
            wanted = read[name] = instruction.bytes
        part = min(1.0, wanted / instruction.bytes) if instruction.bytes else 1.0
        for position, operand in enumerate(instruction.operands):
            source = fused.instructions.get(operand)
            if source is None:
                continue
            if position == 0 and instruction.opcode in IN_PLACE:
                continue
            if position == 0 and instruction.opcode in SLICES:
                count = wanted
            elif instruction.opcode in IN_PLACE:
                count = source.bytes
            else:
                count = part * source.bytes
            read[operand] = min(source.bytes, read.get(operand, 0.0) + count)
    return read


def written(i: Instruction, computations: dict[str, Computation]) -> dict[str, float]:
    """Return the bytes that a kernel writes, by array."""
    if i.opcode != "fusion":
        return {_element(i.name, n, len(i.sizes)): float(size) for n, size in enumerate(i.sizes)}
    fused = computations[i.called[0]]
    root = fused.instructions[fused.root]
    makers = [fused.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    writes = {}
    for n, maker in enumerate(makers):
        while maker.opcode == "bitcast":
            maker = fused.instructions[maker.operands[0]]
        size = maker.bytes
        if maker.opcode in IN_PLACE:
            size = fused.instructions[maker.operands[2 if maker.opcode == "scatter" else 1]].bytes
        writes[_element(i.name, n, len(makers))] = float(size)
    return writes


def _element(name: str, number: int, count: int) -> str:
    return name if count == 1 else f"{name}#{number}"


def multiplied(fused: Computation, computations: dict[str, Computation]) -> float:
    """Return the operations of a computation's matrix products, two per multiplication."""
    total = 0.0
    for i in fused.instructions.values():
        total += sum(multiplied(computations[name], computations) for name in i.called)
        if i.opcode == "dot":
            left = fused.instructions[i.operands[0]].shapes[0]
            total += 2.0 * i.elements * math.prod(left[axis] for axis in i.contracted)
    return total


def computed(fused: Computation) -> float:
    """Return the other operations: one per element that an instruction computes or adds up."""
    read, total = _read(fused), 0.0
    for i in fused.instructions.values():
        if i.opcode in NO_WORK | SLICES | IN_PLACE | MOVES | {"dot"} or not i.bytes:
            continue
        source = fused.instructions[i.operands[0]] if i.opcode == "reduce" else i
        total += source.elements * min(1.0, read.get(i.name, 0.0) / i.bytes)
    return total


@dataclass
class Kernel:
    part: str
    layer: int | None
    asked: bool  # runs only in steps in which a row requests it
    reads: dict[str, float]  # bytes, by array
    writes: dict[str, float]
    opcode: str = "fusion"
    scope: str = ""
    multiplied: float = 0.0  # operations of matrix products
    computed: float = 0.0  # other operations

    @property
    def matrices(self) -> bool:
        return self.multiplied > 0

    @property
    def moved(self) -> float:
        """The bytes that are read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def collective(self) -> str | None:
        return next((name for name in COLLECTIVES if self.opcode.startswith(name)), None)


def kernels(hlo: str, layer_bytes: float = math.inf) -> list[Kernel]:
    """Return all kernels of a program, including the branches of its conditions.

    XLA drops the names of some kernels that it deduplicates. These get the layer of the kernel that
    runs before them.
    Reads of arrays of `layer_bytes` or more by custom calls do not count, because these arrays are
    the cache. An exception is the kernel for few rows, which reads matrices.
    """
    computations, entry = parse(hlo)
    return list(_Reader(computations, layer_bytes).kernels(entry, "", "", asked=False))


@dataclass(frozen=True)
class _Reader:
    computations: dict[str, Computation]
    layer_bytes: float

    def kernels(
        self, computation: Computation, branch: str, scope: str, *, asked: bool
    ) -> Iterator[Kernel]:
        origin: dict[str, str] = {}  # through bitcasts and tuples
        before: int | None = None  # the layer
        for i in computation.instructions.values():
            given = [origin.get(operand, operand) for operand in i.operands]
            if i.opcode == "conditional":
                path = i.scope if "/" in i.scope else scope
                yield _kernel_of(i, path, asked=asked)
                for n, name in enumerate(i.called):  # the true branch comes first
                    below, path = self.computations[name], f"{branch}/{name}"
                    yield from self.kernels(below, path, i.scope or scope, asked=asked or n == 0)
            elif i.opcode == "get-tuple-element":
                origin[i.name] = f"{given[0]}#{i.number}"
            elif i.opcode in ("bitcast", "opt-barrier") or i.opcode.endswith("-done"):
                origin[i.name] = given[0]
            elif i.opcode == "parameter":
                origin[i.name] = f"{branch}:{i.name}"
            elif i.opcode not in NO_WORK:
                path = i.scope if "/" in i.scope else scope
                kernel = self._kernel(i, computation, given, path, asked=asked)
                if not kernel.scope:
                    kernel.layer = before
                before = kernel.layer
                yield kernel

    def _kernel(
        self, i: Instruction, computation: Computation, given: list[str], path: str, *, asked: bool
    ) -> Kernel:
        fused = self.computations[i.called[0]] if i.opcode == "fusion" else None
        counts = {} if fused is None else used(fused)
        reads: dict[str, float] = {}
        for position, (operand, source) in enumerate(zip(i.operands, given, strict=True)):
            size = float(computation.instructions[operand].bytes)
            if fused is None and FEW_ROWS_SCOPE not in path and size >= self.layer_bytes:
                size = 0.0  # the cache
            reads[source] = max(reads.get(source, 0.0), counts.get(position, size))
        kernel = _kernel_of(i, path, asked=asked)
        kernel.reads, kernel.writes = reads, written(i, self.computations)
        if fused is not None:
            kernel.multiplied = multiplied(fused, self.computations)
            kernel.computed = computed(fused)
        elif FEW_ROWS_SCOPE in path:
            kernel.multiplied, kernel.computed = _few_rows_work(
                [computation.instructions[name] for name in i.operands]
            )
        elif "cublas" in i.target:
            left, right = (computation.instructions[name].elements for name in i.operands[:2])
            out = math.prod(i.shapes[0])
            kernel.multiplied = 2.0 * out * math.sqrt(left * right / out)
        return kernel


def _few_rows_work(operands: list[Instruction]) -> tuple[float, float]:
    """Return the operations of the kernel for few rows: of products, and others.

    Args:
      operands: x, the matrix, its scales, its minima if it has any, and the residual. Scales and
        minima have one array per level.
    """
    x, matrix, scale, *others = operands
    rows, values = x.shapes[0][0], matrix.elements
    minima = any(other.shapes == scale.shapes for other in others)
    levels = 1 + any(other.bytes == other.elements for other in others)
    # The products of minima with x are another matrix product.
    by_levels = FEW_ROWS_OPERATIONS[matrix.bytes / values, levels]
    return 2.0 * rows * values * (1 + minima), by_levels[minima] * values


def _kernel_of(i: Instruction, path: str, *, asked: bool) -> Kernel:
    names = [name for name in path.split("/") if name in PARTS]
    layer = re.search(r"layer_(\d+)", path)
    return Kernel(
        part=" ".join(dict.fromkeys(names[-2:])) or "other",
        layer=int(layer[1]) if layer else None,
        asked=asked,
        reads={},
        writes={},
        opcode=i.opcode,
        scope=path,
    )
