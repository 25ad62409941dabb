"""Checks of the CPU kernels in a new process; prints failures and hashes as JSON.

    python cpu_child.py [--isa ISA|amx] [--one-cpu] [--sources FOLDER [--quick-build]] [--no-checks]

A process has one library, and a CPU count that is fixed when jax starts, so these checks run
separately.
"""

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

LEFT_OUT = (
    "norm, wide",
    "norm, residual",
    "residual",
    "swiglu",
    "plain",
)  # cases of linear that are skipped here
RAGGED = ("mixed", "tile edges", "empty sequences between", "nothing at all")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isa")
    parser.add_argument("--one-cpu", action="store_true")
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--quick-build", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    args = parser.parse_args()
    if args.one_cpu:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from forge_kernels import cpu

    if args.sources is not None:
        build = import_module("forge_kernels.cpu.build")
        build.SOURCES = args.sources
        if args.quick_build:
            build.FLAGS = (*build.FLAGS, "-O1")  # in two thirds of the time
    isa = cpu.load(args.isa)

    import cpu_contract as contract
    import test_attention as attention

    failed = {}
    found = {} if args.no_checks else checks(isa, in_tiles=args.isa == "amx")
    for name, check in found.items():
        try:
            check()
        except AssertionError as error:
            failed[name] = str(error).strip().splitlines()[0]
    from test_blocks import rounded_digests

    digests = contract.digests() | attention.cpu_digests()
    result = {
        "isa": isa,
        "identity": cpu.identity(),
        "failed": failed,
        "digests": digests,
        "rounded": rounded_digests(),
    }
    if args.isa == "amx" and args.sources is not None:
        library = cpu.library.library()
        result["products of groups"] = library.emulated_products_s8()
        choice = import_module("forge_kernels.cpu.choice")
        choice.TILE_SHAPE, choice.TILE_ROUNDS = (64, 128), 1
        result["tile times"] = choice.measure_tiles(library)
    print(json.dumps(result))


def checks(isa: str, *, in_tiles: bool) -> dict[str, Callable[[], None]]:
    """Return a selection of every operation's contract."""
    import cpu_contract as contract
    import test_attention as attention
    import test_blocks as blocks
    import test_cpu_kernels as kernels
    import test_experts as experts
    import test_packed_lora as lora
    import test_sampling as sampling

    from forge_kernels.linear import FORMATS

    found: dict[str, Callable[[], None]] = {}
    for form in FORMATS:
        for name, case in contract.cases(form).items():
            if name.startswith(LEFT_OUT):
                continue
            found[f"linear {form}, {name}"] = lambda case=case: contract.check(case)
        case = contract.invariance_case(form, "norm, swiglu")
        found[f"bits of a row, {form}"] = lambda case=case: contract.check_invariance(case)
        case = contract.invariance_case(form, "norm")
        found[f"not finite, {form}"] = lambda case=case: contract.check_not_finite(case)
        found[f"pack {form}"] = lambda form=form: kernels.check_packing((95, 100), form, False)
        for name in ("whole panels", "tails"):
            shape = experts.PACKED_SHAPES[name]
            found[f"experts {form}, {name}"] = partial(experts.check_packed, form, shape)
        found[f"experts {form}, company"] = lambda form=form: experts.check_packed_company(form)
        found[f"embed {form}"] = lambda form=form: kernels.check_embed((33, 7), form)
    if in_tiles:
        found["bits of tiles"] = contract.check_tile_bits
        found["tiles by shape"] = contract.check_tiles_by_shape
        for kind in blocks.KINDS:
            found[f"exact blocks, {kind}"] = partial(blocks.check_exact, kind)
    elif isa != "avx512_bf16":
        found["bits of two FMAs"] = contract.check_fma_bits
    for kind in blocks.ROUNDED:
        found[f"rounded rows, {kind}"] = partial(blocks.check_rounded, kind)
    ragged = {name: attention.BATCHES[name] for name in RAGGED}
    for name, batch in {**ragged, **attention.CPU_BATCHES}.items():
        found[f"attention, {name}"] = lambda batch=batch: attention.check_cpu(batch.for_cpu())
    for name, batch in attention.MANY_KEYS_BATCHES.items():
        for kind in ("int8", "fp8, window, soft cap", "sinks, window"):
            options = attention.KINDS[kind]
            found[f"attention, {name}, {kind}"] = partial(
                attention.check_cpu, batch.for_cpu(), **options
            )
    found["attention, chunks of a prompt"] = lambda: attention.check_chunks((7, 50, 93))
    found["attention, chunks of a long prompt"] = lambda: attention.check_chunks((1, 511, 788))
    for name, case in lora.CASES.items():
        found[f"lora, {name}"] = partial(lora.check, case)
    found["lora, bits of a row"] = lora.check_bits
    found["rotate and write"] = attention.check_rotate_and_write
    found["sampling"] = lambda: sampling.check_cpu((97, 8193))
    return found


if __name__ == "__main__":
    main()
