"""Measure the host time of the drafters and the acceptance rate of their drafts.

    python -m benchmarks.drafters [--only cost step acceptance] [--text FILE] [--output FILE.json]

Acceptance is replayed without a model: the text stands for the model's output. The texts are the
training text of the bundled model and this repository's documents and sources. Figures of different
commits therefore differ a little. Takes about a minute.
"""

from __future__ import annotations

import random
import re
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from benchmarks import report as reports
from forge_jax.checkpoint.hub import BUNDLED, resolve
from forge_jax.speculate.drafter import TextDrafter
from forge_jax.speculate.ngram import NgramDrafter
from forge_jax.speculate.suffix import SuffixDrafter
from forge_serve.bench.metrics import percentile
from training.forge_tiny.corpus import extraction, stories

DRAFTERS: dict[str, Callable[[int], TextDrafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
CONTEXTS = (100, 4_000, 100_000)
DRAFT_LENGTHS = (4, 8, 16)
SEQUENCES = 256
ROOT = Path(__file__).parent.parent

Report = dict[str, Any]


class Sample(NamedTuple):
    """A sequence: its prompt, and the output assumed for the model."""

    prompt: list[int]
    output: list[int]


def main() -> int:
    parser = reports.parser("drafters", "Measure the host time and acceptance rate of drafters.")
    sections = ("cost", "step", "acceptance")
    parser.add_argument(
        "--only", nargs="+", choices=sections, default=sections, help="default: all"
    )
    parser.add_argument(
        "--text",
        type=Path,
        help="another text file to draft, in addition to those of this repository",
    )
    args = parser.parse_args()
    return reports.publish("drafters", args, lambda: measure(args.only, args.text), tables)


def measure(sections: Sequence[str], file: Path | None) -> Report:
    encode, report = _encoder(), {}
    if "cost" in sections:
        text = encode(_python_and_prose())
        report["cost"] = [
            _cost(drafter, kind, tokens)
            for drafter in DRAFTERS
            for kind, tokens in (("code and prose", text), ("one token", [7] * max(CONTEXTS)))
        ]
    if "step" in sections:
        report["step"] = [_step(drafter, encode(_python_and_prose())) for drafter in DRAFTERS]
    if "acceptance" in sections:
        report["acceptance"] = acceptance(workloads(encode, file))
    return report


# ---- cost ------------------------------------------------------------------------------------


def _cost(name: str, kind: str, text: list[int]) -> Report:
    reports.progress(f"cost of {name} on {kind}")
    return {
        "drafter": name,
        "text": kind,
        "contexts": [_cost_at(name, text[:n]) for n in CONTEXTS],
    }


def _cost_at(name: str, text: list[int]) -> Report:
    """Prefill all but the last 64 tokens of a text, then add those one by one."""
    tail = min(64, len(text) // 2)
    prompt = text[: len(text) - tail]
    calls_s, single_s, end_s = [], [], []
    for _ in range(2):
        drafter = DRAFTERS[name](8)
        tokens, calls = list(prompt), []
        for _ in range(-(-len(prompt) // 512)):
            calls.append(_propose_s(drafter, tokens, len(prompt)))
        calls_s.append(calls)
        for token in text[len(prompt) :]:
            tokens.append(token)
            single_s.append(_propose_s(drafter, tokens, len(prompt)))
        begin = time.perf_counter()
        drafter.end("key", tokens, len(prompt), "")
        end_s.append(time.perf_counter() - begin)
    best = [min(times) for times in zip(*calls_s, strict=True)]
    tracemalloc.start()
    drafter, before = DRAFTERS[name](8), tracemalloc.get_traced_memory()[0]
    for _ in range(-(-len(prompt) // 512)):
        drafter.propose("key", prompt, len(prompt), "")
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {
        "context": len(text),
        "prompt_us_per_token": round(sum(best) / len(prompt) * 1e6, 2),
        "prompt_calls": len(best),
        "prompt_call_ms_max": round(max(best) * 1e3, 2),
        "propose_us_p50": round(median(single_s) * 1e6, 1),
        "propose_us_p90": round(percentile(single_s, 90) * 1e6, 1),
        "end_us": round(min(end_s) * 1e6, 1),
        "mb": round(held / 1e6, 3),
        "bytes_per_token": round(held / len(prompt)),
    }


def _step(name: str, text: list[int]) -> Report:
    """Time one more token and one draft for each of many sequences, as a step does."""
    reports.progress(f"a step of {SEQUENCES} sequences with {name}")
    drafter = DRAFTERS[name](8)
    starts = [i * 300 % (len(text) - 1200) for i in range(SEQUENCES)]
    live = [text[start : start + 1000] for start in starts]
    for key, tokens in enumerate(live):
        for _ in range(2):
            drafter.propose(key, tokens, 1000, "salt")
    steps_s, drafted = [], 0
    for step in range(20):
        for start, tokens in zip(starts, live, strict=True):
            tokens.append(text[start + 1000 + step])
        begin = time.perf_counter()
        for key, tokens in enumerate(live):
            drafted += len(drafter.propose(key, tokens, 1000, "salt").token_ids)
        steps_s.append(time.perf_counter() - begin)
    return {
        "drafter": name,
        "sequences": SEQUENCES,
        "step_ms_p50": round(median(steps_s) * 1e3, 2),
        "step_ms_min": round(min(steps_s) * 1e3, 2),
        "drafted_per_sequence": round(drafted / SEQUENCES / len(steps_s), 2),
    }


def _propose_s(drafter: TextDrafter, tokens: list[int], prompt_len: int) -> float:
    begin = time.perf_counter()
    drafter.propose("key", tokens, prompt_len, "")
    return time.perf_counter() - begin


# ---- acceptance ------------------------------------------------------------------------------


def acceptance(samples_of: dict[str, list[Sample]]) -> list[Report]:
    results = []
    for workload, samples in samples_of.items():
        for name in ("ngram", "suffix alone", "suffix"):
            for k in DRAFT_LENGTHS:
                reports.progress(f"acceptance of {name}, {k} tokens, on {workload}")
                drafter = DRAFTERS[name.split()[0]](k)
                played = play(drafter, samples, one_salt=name != "suffix alone")
                results.append({"workload": workload, "drafter": name, "k": k, **played})
    return results


def play(drafter: TextDrafter, samples: list[Sample], one_salt: bool = True) -> Report:
    """Replay the sequences; each step outputs the accepted drafts and one more token.

    If `one_salt` is false, every sequence has its own salt.
    """
    steps = drafted = accepted = 0
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for key, (prompt, output) in enumerate(samples):
        salt = "" if one_salt else str(key)
        tokens, done = list(prompt), 0
        for _ in range(len(prompt) // 512):  # a long prompt is indexed over several calls
            drafter.propose(key, tokens, len(prompt), salt)
        while done < len(output):
            draft = drafter.propose(key, tokens, len(prompt), salt)
            right = 0
            for token, confidence in zip(*draft, strict=True):
                if done + right == len(output) - 1:
                    break  # the token that a step outputs anyway
                hit = token == output[done + right]
                outcomes[f"{int(confidence * 10) / 10:.1f}"].append(hit)
                if not hit:
                    break
                right += 1
            steps, drafted, accepted = steps + 1, drafted + len(draft.token_ids), accepted + right
            tokens += output[done : done + right + 1]
            done += right + 1
        drafter.end(key, tokens, len(prompt), salt)
        while drafter.ingest(1000):
            pass
    return {
        "tokens": sum(len(sample.output) for sample in samples),
        "steps": steps,
        "tokens_per_step": round((steps + accepted) / steps, 3),
        "drafted_per_step": round(drafted / steps, 3),
        "accepted_share": round(accepted / drafted, 3) if drafted else None,
        # How many of the reached tokens of this confidence were right (0.1: 0.1 to 0.2).
        "right_by_confidence": {
            key: {"count": len(hits), "share": round(sum(hits) / len(hits), 3)}
            for key, hits in sorted(outcomes.items())
        },
    }


def workloads(encode: Callable[[str], list[int]], text: Path | None) -> dict[str, list[Sample]]:
    prose = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    code = [path.read_text() for path in sorted((ROOT / "forge_jax").glob("*.py"))]
    made = {
        "prose": _cut(encode, prose, 8),
        "code": _cut(encode, code, 8),
        "edit": _edits(encode, prose + code, 8),
        "stories": _chats(encode, stories.documents(random.Random(0)), 100),
        "extraction": _chats(encode, extraction.documents(random.Random(0)), 300),
    }
    if text is not None:
        made[text.name] = _cut(encode, [text.read_text()[:500_000]], 8)
    return made


def _cut(encode: Callable[[str], list[int]], texts: list[str], count: int) -> list[Sample]:
    """Return samples from random places: 200 tokens of prompt, the next 1000 of output."""
    tokens = [encode(text) for text in texts]
    samples = [
        Sample(ids[at : at + 200], ids[at + 200 : at + 1200])
        for ids in tokens
        for at in range(0, len(ids) - 1200, 1200)
    ]
    return random.Random(0).sample(samples, min(count, len(samples)))


def _edits(encode: Callable[[str], list[int]], texts: list[str], count: int) -> list[Sample]:
    """Return samples that repeat a text with one word in 50 omitted and one in 33 replaced."""
    rng = random.Random(0)
    samples = []
    for text in texts:
        words = re.findall(r"\S+\s*", text)
        for at in range(0, len(words) - 400, 400):
            given = words[at : at + 400]
            edited = [rng.choice(words) if rng.random() < 0.03 else word for word in given]
            edited = [word for word in edited if rng.random() >= 0.02]
            prompt = f"Edit this text:\n\n{''.join(given)}\n\nThe text, edited:\n\n"
            samples.append(Sample(encode(prompt), encode("".join(edited))))
    return rng.sample(samples, min(count, len(samples)))


def _chats(
    encode: Callable[[str], list[int]], documents: Iterator[Any], count: int
) -> list[Sample]:
    """Return questions of the bundled model's training text with their answers."""
    chats = (document.turns for document in documents if len(document.turns) > 1)
    return [
        Sample(encode(turns[-2][1] + "\n"), encode(turns[-1][1])) for turns in islice(chats, count)
    ]


def _encoder() -> Callable[[str], list[int]]:
    backend = Tokenizer.from_file(str(resolve(BUNDLED) / "tokenizer.json"))
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def _python_and_prose() -> str:
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("forge_jax/**/*.py"), *ROOT.glob("serve/**/*.py")]
    return "".join(path.read_text() for path in sorted(files))


# ---- tables ----------------------------------------------------------------------------------


def tables(report: Report) -> str:
    parts = [reports.heading(report)]
    if "cost" in report:
        header = ("drafter", "text", "context", "us per prompt token", "longest prompt call, ms",
                  "us per propose p50", "p90", "end, us", "MB", "bytes per token")  # fmt: skip
        keys = ("context", "prompt_us_per_token", "prompt_call_ms_max", "propose_us_p50",
                "propose_us_p90", "end_us", "mb", "bytes_per_token")  # fmt: skip
        rows = [
            (cost["drafter"], cost["text"], *(at[key] for key in keys))
            for cost in report["cost"]
            for at in cost["contexts"]
        ]
        parts.append(reports.table(header, rows))
    if "step" in report:
        header = ("drafter", "sequences", "ms per step, p50", "min", "drafted per sequence")
        parts.append(reports.table(header, [tuple(step.values()) for step in report["step"]]))
    if "acceptance" in report:
        header = (
            "workload",
            "drafter",
            *(f"k={k}: tokens per step (drafted)" for k in DRAFT_LENGTHS),
        )
        by_row: dict[tuple[str, str], list[str]] = defaultdict(list)
        for run in report["acceptance"]:
            figures = f"{run['tokens_per_step']:.2f} ({run['drafted_per_step']:.1f})"
            by_row[run["workload"], run["drafter"]].append(figures)
        parts.append(reports.table(header, [(*row, *cells) for row, cells in by_row.items()]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
