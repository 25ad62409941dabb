"""What a compiled step consists of, from XLA's text: which part of the model each op is of."""

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
_INSIDE = ("calls", "to_apply", "called_computations")  # of one instruction, but for a call's
_NUMBER = re.compile(r"(?:[._](?:\d+|clone|remat\d*))+$")
# What transformations and control flow add to the names of scopes.
_MACHINERY = re.compile(
    r"\w*\(.*\)|while|body|cond|branch_\d+_fun|closed_call|checkpoint|pjit|eval_jaxpr|scan|custom_[jv][jv]p_call"
)
_LAYER = re.compile(r"layer_\d+")
_FREE = {"parameter", "get-tuple-element", "bitcast", "tuple", "constant", "opt-barrier"}


class Instruction(NamedTuple):
    scope: str  # "layers/attention"
    kernel: str  # what runs, without its number: "multiply_add_fusion", "forge_attention"


@dataclass
class Hlo:
    """A compiled module.

    Attributes:
      instructions: by the name that traces have for it, all computations' together.
      kernels: how many there are of each scope, which a fusion counts as one of.
      fusions: how many of them are fusions.
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
    computation: str  # that it stands in
    called: list[str]  # computations, in any way


def read_hlo(text: str) -> Hlo:
    """Reads what `jax.stages.Compiled.as_text` gives. What it does not know it leaves out.

    An instruction without a scope of its own has that of most of what was fused into it, or of the
    instruction whose computation (a loop's body, say) it stands in.
    """
    header = re.match(r"HloModule ([\w.-]+)", text)
    hlo = Hlo(header[1] if header else "")
    lines, inside = _lines(text)
    within: dict[str, Counter[str]] = {}  # scopes by computation
    for line in lines:
        if line.scope != NO_SCOPE:
            within.setdefault(line.computation, Counter())[line.scope] += 1
    of_caller: dict[str, str] = {}
    for line in reversed(lines):  # whoever calls a computation stands below it
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
    """The instructions, and the computations that are part of one and not run by themselves."""
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
    """The named scopes of "jit(decode_4)/layer_3/attention/while/body/dot_general", layers
    together: "layers/attention".
    """
    *scopes, _ = op_name.partition(";")[0].split("/")
    kept = [
        _LAYER.sub("layers", scope) for scope in scopes if scope and not _MACHINERY.fullmatch(scope)
    ]
    return "/".join(kept) or NO_SCOPE


def kernel_name(name: str) -> str:
    """Without the numbers that tell instances apart, which change with every compilation."""
    return _NUMBER.sub("", name) or name
