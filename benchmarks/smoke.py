"""Check a server with 32 concurrent streaming chats on the bundled model.

    python -m benchmarks.smoke [--url URL] [--requests 32] [--max-tokens 64] [--output FILE.json]

If --url is missing, it starts its own server. Exits with 1 if a request failed, something was
compiled after ready, or a block is still in use after the last request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import urllib.request
from typing import Any

from benchmarks import report as reports
from benchmarks.serving_process import serving
from forge_serve.bench.client import run_all
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import summarize

PROMPTS = (
    "Tell me a story about a dog.",
    "Tell me a story about a cat who lost her ball.",
    "What is the capital of France?",
    "What is 2+2?",
    "Extract the name and age: John is 30 years old.",
    "Who are you?",
    "How many days are in a week?",
    "Write a short story about a bird.",
)
SETTLE_S = 2.0


def main() -> int:
    parser = reports.parser("smoke", "Does it serve?")
    parser.add_argument("--url", help="URL of a running server (default: start one)")
    parser.add_argument("--model", default="forge-tiny", help="what to serve")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    try:
        with contextlib.ExitStack() as stack:
            url, ready_s = args.url, None
            if url is None:
                url, ready_s = stack.enter_context(serving([args.model]))
            figures = measure(url, args.requests, args.max_tokens)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    report = reports.new("smoke", ready_s=ready_s, **figures)
    print(table(report))
    if args.output is not None:
        reports.write(report, args.output)
    passed = (
        report["completed"] == report["requests"]
        and not report["compilations_after_ready"]
        and not report["blocks_in_use"]
    )
    return 0 if passed else 1


def measure(url: str, num_requests: int, max_tokens: int) -> dict[str, Any]:
    model = _get(url, "/v1/models")["data"][0]["id"]
    bodies = [
        {
            "model": model,
            "messages": [{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}],
            "max_tokens": max_tokens,
            "temperature": 0.8,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(num_requests)
    ]
    asyncio.run(run_all(url, bodies[:4]))  # opens connections and fills the page cache
    results, wall_s = asyncio.run(run_all(url, bodies))
    stats = _quiet_stats(url)
    return {"max_tokens": max_tokens, **summarize(results, wall_s)} | {
        "compilations_after_ready": stats["compilations_after_ready"],
        "blocks_in_use": stats["num_used_blocks"],
    }


def table(report: dict[str, Any]) -> str:
    ready = report["ready_s"]
    rows = [
        ("requests completed", f"{report['completed']} of {report['requests']}"),
        ("output", f"{report['output_tokens_per_s']:,.0f} tokens/s"),
        ("TTFT p50 / p99", reports.pair(report["ttft_ms"]) + " ms"),
        ("ITL p50 / p99", reports.pair(report["itl_ms"], 1) + " ms"),
        ("start to ready", "-" if ready is None else f"{ready:.1f} s"),
        ("compilations after ready", report["compilations_after_ready"]),
        ("blocks in use when idle", report["blocks_in_use"]),
    ]
    lines = [reports.heading(report), "", reports.table(("what", "figure"), rows)]
    lines += [f"error: {error} ({count})" for error, count in report["errors"].items()]
    return "\n".join(lines)


def _quiet_stats(url: str) -> dict[str, Any]:
    """Return the server's counters once nothing runs, or after `SETTLE_S`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        stats = _get(url, "/stats")
        if not (stats["num_running"] or stats["num_used_blocks"]) or time.monotonic() > deadline:
            return stats
        time.sleep(0.05)


def _get(url: str, path: str) -> Any:
    try:
        with urllib.request.urlopen(url + path, timeout=10) as response:
            return json.load(response)
    except OSError as error:  # includes HTTPError
        raise BenchmarkError(f"no server is ready at {url}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
