"""The instructions of a compiled step, from XLA's text, with their parts of the model."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

NO_SCOPE = "(no scope)"

_COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.-]+) = (?:\(.*?\)|\S+) ([\w-]+)\((.*)$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CALLED = re.compile(
    r"\b(calls|to_apply|called_computations|body|condition|branch_computations|true_computation"
    r"|false_computation)=\{?(%[\w.-]+(?:, %[\w.-]+)*)"
)
_INSIDE = ("calls", "to_apply", "called_computations")  # part of an instruction, except a call
_NUMBER = re.compile(r"(?:[._](?:\d+|clone|remat\d*))+$")
# Names that transformations and control flow add to scopes.
_MACHINERY = re.compile(
    r"\w*\(.*\)|while|body|cond|branch_\d+_fun|closed_call|checkpoint|pjit|eval_jaxpr|scan|custom_[jv][jv]p_call"
)
_LAYER = re.compile(r"layer_\d+")
_FREE = {"parameter", "get-tuple-element", "bitcast", "tuple", "constant", "opt-barrier"}


class Instruction(NamedTuple):
    scope: str  # "layers/attention"
    kernel: str  # without its number: "multiply_add_fusion", "forge_attention"


@dataclass
class Hlo:
    """A compiled module.

    Attributes:
      instructions: the instructions of all computations, by their name in traces.
      kernels: the number of kernels in each scope. A fusion counts as one.
      fusions: the number of kernels that are fusions.
    """

    module: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    kernels: Counter[str] = field(default_factory=Counter)
    fusions: int = 0


class _Line(NamedTuple):
    name: str
    opcode: str
    scope: str
    target: str
    computation: str  # that contains the instruction
    called: list[str]  # computations that it calls in any way


def read_hlo(text: str) -> Hlo:
    """Return the module of a `jax.stages.Compiled.as_text`, without unknown lines.

    An instruction without a scope gets the most common scope of its fused instructions. If there is
    none, it gets that of the instruction that calls its computation, such as a loop.
    """
    header = re.match(r"HloModule ([\w.-]+)", text)
    hlo = Hlo(header[1] if header else "")
    lines, inside = _lines(text)
    within: dict[str, Counter[str]] = {}  # scopes by computation
    for line in lines:
        if line.scope != NO_SCOPE:
            within.setdefault(line.computation, Counter())[line.scope] += 1
    of_caller: dict[str, str] = {}
    for line in reversed(lines):  # callers come after the computations that they call
        scope = line.scope
        if scope == NO_SCOPE:
            fused = Counter[str]()
            for name in line.called:
                fused += within.get(name, Counter())
            [(scope, _)] = fused.most_common(1) or [(of_caller.get(line.computation, scope), 0)]
        of_caller |= dict.fromkeys(line.called, scope)
        hlo.instructions[line.name] = Instruction(scope, line.target or kernel_name(line.name))
        if line.opcode not in _FREE and line.computation not in inside:
            hlo.kernels[scope] += 1
            hlo.fusions += line.opcode == "fusion"
    return hlo


def _lines(text: str) -> tuple[list[_Line], set[str]]:
    """Return the instructions, and the computations that are only parts of an instruction."""
    lines: list[_Line] = []
    inside: set[str] = set()
    computation = ""
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins is not None:
            computation = begins[1]
            continue
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        name, opcode, rest = found.groups()
        called = []
        for how, names in _CALLED.findall(rest):
            which = [name.removeprefix("%") for name in names.split(", ")]
            called += which
            if how in _INSIDE and opcode != "call":
                inside.update(which)
        op_name, target = _OP_NAME.search(rest), _TARGET.search(rest)
        scope = scope_of(op_name[1]) if op_name else NO_SCOPE
        lines.append(_Line(name, opcode, scope, target[1] if target else "", computation, called))
    return lines, inside


def scope_of(op_name: str) -> str:
    """Return the named scopes of an op, with all layers as "layers".

    "jit(decode_4)/layer_3/attention/while/body/dot_general" becomes "layers/attention".
    """
    *scopes, _ = op_name.partition(";")[0].split("/")
    kept = [
        _LAYER.sub("layers", scope) for scope in scopes if scope and not _MACHINERY.fullmatch(scope)
    ]
    return "/".join(kept) or NO_SCOPE


def kernel_name(name: str) -> str:
    """Return a name without the numbers of its instance, which change with every compilation."""
    return _NUMBER.sub("", name) or name
