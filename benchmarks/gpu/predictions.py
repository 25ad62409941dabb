"""`--predict`: expected decode steps of GPUs that this machine need not have.

Importing this module does not import JAX: the processes of `predictions` must set it up first.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks import report as reports
from forge_jax.errors import ConfigError

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b")
ROUNDED, MIXED = ("none", "int8", "int4", "fp8"), "Q4_K_M"
KV_DTYPES = ("auto", "fp8", "int8")
MOST_BATCH, MOST_CONTEXT = 1024, 131072
COMPILER = "jax_plugins.xla_cuda13"
MISSING = (
    "--predict: the CUDA compiler is missing. It needs no GPU. Run `make .venv-aot/.aot`, then "
    "`.venv-aot/bin/python -m benchmarks.gpu --predict ...`"
)
TITLE = "Predictions, not measurements"
COLUMNS = {
    "gpu": "GPU",
    "gpus": "GPUs",
    "model": "model",
    "quantization": "quantization",
    "kv_dtype": "cache",
    "batch": "batch",
    "context": "context",
    "kernels": "kernels",
    "collectives": "collectives",
    "moved_gb": "GB moved",
    "least_gb": "GB needed",
    "predicted_ms": "predicted ms",
    "floor_ms": "floor ms",
    "of_floor": "predicted / floor",
}
LINEAR_COLUMNS = {
    "device": "device",
    "matrix": "matrix",
    "tokens": "tokens",
    "kernels": "kernels",
    "moved_mb": "MB moved",
    "predicted_us": "predicted us",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "predictions", "Compile decode steps without a GPU, and print their expected times."
    )
    group.add_argument(
        "--predict",
        nargs=2,
        metavar=("DEVICE[,DEVICE...]", "MODEL[,MODEL...]"),
        help="devices: h200, a100, l4, b200, rtx5090, or paths of target configurations "
        f"(.txtpb). Models: {', '.join(MODELS)}",
    )
    group.add_argument(
        "--quantization",
        nargs="+",
        default=["none"],
        metavar="TYPE",
        help=f"{', '.join(ROUNDED)}, {MIXED} or a GGUF type such as Q8_0 (default: none)",
    )
    for name, most, default in (("batch", MOST_BATCH, 1), ("context", MOST_CONTEXT, 1024)):
        group.add_argument(
            f"--{name}",
            nargs="+",
            type=_within(most),
            default=[default],
            metavar="N",
            help=f"{'sequences' if name == 'batch' else 'tokens of each'}, 1 to {most} "
            f"(default: {default})",
        )
    group.add_argument(
        "--kv-dtype", choices=KV_DTYPES, default="auto", help="type of the cache (default: auto)"
    )


def _within(most: int) -> Any:
    def number(text: str) -> int:
        if not text.isdigit() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {most}")
        return int(text)

    return number


def run(args: argparse.Namespace) -> int:
    """Predict, print a table, and write the report. Return the exit status."""
    try:
        devices, models = (list(filter(None, text.split(","))) for text in args.predict)
        check(devices, models, args.quantization)
        found = predictions(devices, list(cells(models, args)))
    except (ConfigError, OSError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1
    report = new_report(found)
    if args.output is not None:
        reports.write(report, args.output)
        args.output.with_suffix(".md").write_text(markdown(report) + "\n")
    print(markdown(report))
    return 0


def check(devices: Sequence[str], models: Sequence[str], quantizations: Sequence[str]) -> None:
    """Raise ConfigError with the argument that is invalid, or without a CUDA compiler."""
    from forge_jax.step.targets import Target
    from forge_jax.weights.ggml_types import TYPES
    from forge_kernels.devices import OLDEST

    for device in devices:
        target = Target.read(device)
        if target.gpu.capability < OLDEST:
            raise ConfigError(
                f"--predict: {target.name} has compute capability {target.compute_capability}: use "
                f"a GPU with {'.'.join(map(str, OLDEST))} or newer"
            )
    for name in models:
        if name not in MODELS:
            raise ConfigError(f"--predict: no model {name!r}: use {', '.join(MODELS)}")
    if not devices or not models:
        raise ConfigError("--predict: name at least one device and one model")
    kinds = (*ROUNDED, MIXED, *TYPES)
    for quantization in quantizations:
        if quantization not in kinds:
            raise ConfigError(f"--quantization: no type {quantization!r}: use {', '.join(kinds)}")
    if not has_compiler():
        raise ConfigError(MISSING)


def has_compiler() -> bool:
    try:
        return importlib.util.find_spec(COMPILER) is not None
    except ModuleNotFoundError:
        return False


def cells(models: Sequence[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each `benchmarks.aot.predict.Cell`."""
    for model in models:
        for quantization in args.quantization:
            for batch in args.batch:
                yield {
                    "model": model,
                    "quantization": quantization,
                    "batch": batch,
                    "contexts": tuple(args.context),
                    "kv_dtype": args.kv_dtype,
                }


def predictions(devices: Sequence[str], cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of all devices. Each device is compiled in its own process.

    Mosaic compiles for only one GPU per process. The processes must start without JAX, because it
    reads the compiler's settings at import.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        max_workers=min(len(devices), _processes()), mp_context=context, max_tasks_per_child=1
    ) as pool:
        futures = [pool.submit(predict_on, device, cells) for device in devices]
        return [row for future in futures for row in future.result()]


def _processes() -> int:
    return max(1, multiprocessing.cpu_count() // 2)


def predict_on(device: str, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of one device; the compiler's settings apply to this process."""
    from benchmarks.aot import predict

    return predict.predict(device, [predict.Cell(**cell) for cell in cells])


def linears_on(device: str) -> list[dict[str, Any]]:
    """Return the predicted products of one device, as `predict_on` returns steps."""
    from benchmarks.aot import predict

    return predict.predict_linears(device)


def new_report(
    rows: list[dict[str, Any]], linears: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    from benchmarks.aot.costs import ASSUMPTIONS

    return reports.new("gpu-predictions", assumptions=ASSUMPTIONS, rows=rows, linears=linears)


def markdown(report: dict[str, Any]) -> str:
    """Return a table of the predictions, and their assumptions."""
    table = [[_text(row[name]) for name in COLUMNS] for row in report["rows"]]
    sections = [reports.table(list(COLUMNS.values()), table)]
    if report["linears"]:
        products = [[_text(row[name]) for name in LINEAR_COLUMNS] for row in report["linears"]]
        sections.append("Products with the matrix of gates and ups of Llama 3.1 8B:")
        sections.append(reports.table(list(LINEAR_COLUMNS.values()), products))
    assumed = "\n".join(f"- `{name}`: {value:g}" for name, value in report["assumptions"].items())
    return "\n\n".join(
        (
            f"# {TITLE}",
            reports.heading(report),
            "Expected times of decode steps, compiled without a GPU. Bytes, kernels and times are "
            "per GPU.",
            *sections,
            "Assumptions (`benchmarks/aot/costs.py`):",
            assumed,
        )
    )


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def page_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables of docs/gpu.md, which show one sequence with the shortest context.

    Each model has a table with a row per GPU. A cell has the predicted time, the floor and, if
    there are several, the number of GPUs.
    """
    single = [row for row in rows if row["batch"] == 1]
    context = min(row["context"] for row in single)
    kinds = list(dict.fromkeys(row["quantization"] for row in single))
    others = [kind for kind in kinds if kind != "none"]
    header = ["GPU", *(f"{_weights(kind)}, ms" for kind in kinds)]
    header += [f"{kind} / bf16" for kind in others]
    sections = []
    for model in MODELS:
        times: dict[str, dict[str, dict[str, Any]]] = {}
        for row in single:
            if row["model"] == model and row["context"] == context:
                times.setdefault(row["gpu"], {})[row["quantization"]] = row
        lines = []
        for gpu, of in times.items():
            ratios = (_ratio(of, kind) for kind in others)
            lines.append([_short(gpu), *(_time(of.get(kind)) for kind in kinds), *ratios])
        title = model.replace("llama-", "Llama ").replace("b", "B").replace("-", " ")
        sections.append(f"### {title}\n\n{reports.table(header, lines)}")
    return "\n\n".join(sections)


def _weights(kind: str) -> str:
    return "bf16" if kind == "none" else kind


def _short(gpu: str) -> str:
    return gpu.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _time(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    gpus = f" on {row['gpus']}" if row["gpus"] > 1 else ""
    return f"{row['predicted_ms']:.2f} ({row['floor_ms']:.2f}){gpus}"


def _ratio(of: dict[str, dict[str, Any]], kind: str) -> str:
    """Return a time relative to that of bfloat16, if both are on as many GPUs."""
    if kind not in of or "none" not in of or of[kind]["gpus"] != of["none"]["gpus"]:
        return "-"
    return f"{of[kind]['predicted_ms'] / of['none']['predicted_ms']:.2f}"
