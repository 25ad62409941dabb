"""Compare the same requests with and without drafts, in turns, in this process.

    python -m benchmarks.speculation --questions FILE.jsonl [--model forge-tiny] [--rounds 5]
        [--drafters ngram suffix draft] [--draft-model FOLDER] [--parts questions replay load]
        [--output FILE.json]

A step of the bundled model takes 0.25 ms, of which drafts cannot save much. A model from
`python -m training.forge_tiny.widen` gives the same answers at the cost of a larger one.

`--questions` is a file in Spec-Bench's format (Xia et al. 2024, arXiv:2401.07851): JSON lines with
`question_id`, `category` and `turns`. There are five parts:

- usual: the bundled model's own tasks (stories, facts, sums, extraction) from the grammars
  of its training text with another seed. They run one at a time, at temperature 0.7. `suffix`
  remembers earlier answers, so the two halves of the rounds are reported separately.
- batch: the same requests at each of `--loads` and `--temperatures`.
- questions: every question once, one at a time, greedy, with the model's own answers. Each round
  has other questions, so no draft comes from an earlier answer to the same one.
- replay: texts that repeat their prompt, one at a time: edits of a document, and JSON extracted
  from sentences. A small model cannot write these, so the recorded token replaces the sampled
  one. Everything is computed as usual, and drafts are verified against the record.
- load: questions at each of `--loads` and `--temperatures`, by default 0.7 with 1, 4, 16 and 64
  at once. It measures the worst slowdown by drafts: the 95% interval of the median ratio, by
  bootstrap over the rounds.

In the deterministic tier, outputs must be equal with and without drafts. In the default tier, the
share of differing requests is reported. All random requests differ with
`--draft-verification rejection`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report as reports
from benchmarks.report import number
from forge_jax.config import EngineConfig, Verification
from forge_jax.engine.builder import assemble
from forge_jax.engine.core import EngineCore
from forge_jax.engine.parts import EngineParts
from forge_jax.host.progress import progress_bar
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.request import Request, sequence_seed
from forge_jax.step import step as step_file
from forge_serve.bench.errors import BenchmarkError
from training.forge_tiny.corpus import documents

PARTS = ("usual", "batch", "questions", "replay", "load")
DEFAULT_PARTS = ("usual", "questions", "replay", "load")
USUAL = 200  # requests per round
LEAST_LOAD = 48  # requests per round
USUAL_SEED = 77_777  # not used in training
LOADS = (1, 4, 16, 64)
ANSWER = 160  # maximum tokens of an answer
RECORD = 192  # tokens of a replayed text
OFF = "off"
DRAFTING = ("draft_verification", "max_draft_tokens", "draft_model")  # options of sides that draft


# ---- requests ------------------------------------------------------------------------------------


def read_questions(path: Path) -> list[str]:
    """Return the first turn of each question.

    Raises:
      BenchmarkError: The file has another format.
    """
    try:
        lines = path.read_text().splitlines()
        return [json.loads(line)["turns"][0] for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchmarkError(f"--questions {path}: not in Spec-Bench's format ({error})") from error


def chat_prompt(parts: EngineParts, question: str, room: int) -> list[int]:
    """Return the token ids of a chat with one question, truncated to the room."""
    assert parts.tokenizer is not None and parts.chat_template is not None
    while True:
        text = parts.chat_template.render([{"role": "user", "content": question}])
        ids = parts.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= room:
            return list(ids)
        question = question[: len(question) * room // len(ids) - 8]


def question_requests(
    parts: EngineParts, questions: Sequence[str], temperature: float, tag: str
) -> list[Request]:
    room = parts.max_model_len - ANSWER
    return [
        Request(
            request_id=f"{tag}-{i}",
            prompt_token_ids=chat_prompt(parts, question, room),
            params=SamplingParams(max_tokens=ANSWER, temperature=temperature),
            seed=i,
        )
        for i, question in enumerate(questions)
    ]


@dataclass(frozen=True)
class Record:
    """A text to replay: the prompt, and the recorded answer."""

    prompt: str
    answer: str


def edits(documents: Sequence[str], count: int, rng: random.Random) -> list[Record]:
    """Return documents with their edited versions, in which one word is replaced everywhere."""
    records = []
    for document in rng.sample([d for d in documents if len(d) > 400], count):
        document = document[: rng.randint(350, 500)]
        words = [word for word in document.split() if word.isalpha() and len(word) > 3]
        old = rng.choice(words) if words else "the"
        prompt = f"Write this text again, but with Zanzibar for {old}:\n{document}\n"
        records.append(Record(prompt, document.replace(old, "Zanzibar")))
    return records


def extractions(count: int, rng: random.Random) -> list[Record]:
    """Return sentences about people, with the same facts as JSON."""
    first = (
        "Anna Boris Carla David Elena Felix Greta Hugo Irina Jonas Karin Leon Maria Nils".split()
    )
    last = "Abel Brandt Carlsen Dvorak Engel Fischer Gruber Hansen Ibsen Jung Keller Lang".split()
    towns = "Berlin Oslo Prague Vienna Lisbon Dublin Athens Riga Turin Ghent".split()
    records = []
    for _ in range(count):
        people = [
            {
                "name": f"{rng.choice(first)} {rng.choice(last)}",
                "age": rng.randint(18, 90),
                "city": rng.choice(towns),
            }
            for _ in range(5)
        ]
        said = " ".join(f"{p['name']} is {p['age']} and lives in {p['city']}." for p in people)
        prompt = f"Extract name, age and city of everybody as JSON:\n{said}\n"
        records.append(Record(prompt, "\n".join(json.dumps(person) for person in people)))
    return records


def replay_requests(parts: EngineParts, records: Sequence[Record], tag: str) -> list[Request]:
    assert parts.tokenizer is not None
    requests = []
    for i, record in enumerate(records):
        prompt = parts.tokenizer.encode(record.prompt, add_special_tokens=True)
        answer = parts.tokenizer.encode(record.answer, add_special_tokens=False)[:RECORD]
        params = SamplingParams(max_tokens=len(answer), temperature=0.0, ignore_eos=True)
        requests.append(
            Request(
                request_id=f"{tag}-{i}",
                prompt_token_ids=list(prompt),
                params=params,
                seed=i,
                outputs=None,
            )
        )
    return requests


class Records:
    """The tokens to output, by seed and position, as constants of the step."""

    def __init__(self, parts: EngineParts, records: Sequence[Record]):
        assert parts.tokenizer is not None
        self.seeds = np.array(
            [sequence_seed(i, 0) & 0xFFFFFFFF for i in range(len(records))], np.uint32
        )
        self.tokens = np.full((len(records), parts.max_model_len + 1), -1, np.int32)
        for i, record in enumerate(records):
            start = len(parts.tokenizer.encode(record.prompt, add_special_tokens=True))
            answer = parts.tokenizer.encode(record.answer, add_special_tokens=False)[:RECORD]
            self.tokens[i, start : start + len(answer)] = answer

    @contextlib.contextmanager
    def instead_of_samples(self) -> Iterator[None]:
        """Make steps traced meanwhile output the recorded tokens instead of their samples."""
        sample = step_file.sampling.sample
        seeds, tokens = jnp.asarray(self.seeds), jnp.asarray(self.tokens)

        def recorded(logits: jax.Array, **options: Any) -> jax.Array:
            own = sample(logits, **options)
            row = jnp.argmax(options["seed"][:, :1] == seeds[None], axis=1)
            position = jnp.clip(options["position"], 0, tokens.shape[1] - 1)
            token = tokens[row, position]
            return jnp.where(token >= 0, token, own)

        step_file.sampling.sample = recorded
        try:
            yield
        finally:
            step_file.sampling.sample = sample


# ---- runs ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Run:
    """One side's answers to the requests of a round."""

    wall_s: float
    decode_s: float  # from the first to the last token of each request, summed
    steps: int
    drafts: int
    draft_tokens: int
    accepted: int
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


def serve(parts: EngineParts, requests: Sequence[Request], at_once: int) -> Run:
    """Answer the requests in order, up to `at_once` concurrently, in this thread."""
    core, before = parts.core, _counters(parts.core)
    waiting, live = list(reversed(requests)), 0
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    first_s: dict[str, float] = {}
    decode_s = 0.0
    begun = time.perf_counter()
    with parts.guard():
        while waiting or live:
            while waiting and live < at_once:
                core.add(waiting.pop())
                live += 1
            for request_id, deltas in core.tick().items():
                now = time.perf_counter()
                for delta in deltas:
                    if delta.error is not None:
                        raise BenchmarkError(f"{request_id}: {delta.error}")
                    tokens[request_id] += delta.token_ids
                    if delta.token_ids:
                        first_s.setdefault(request_id, now)
                    if delta.finish_reason is not None:
                        live -= 1
                        decode_s += now - first_s.get(request_id, now)
        wall_s = time.perf_counter() - begun
        while core.has_work:
            core.tick()
    steps, drafts, draft_tokens, accepted = (
        after - first for after, first in zip(_counters(core), before, strict=True)
    )
    return Run(
        wall_s=wall_s,
        decode_s=decode_s,
        steps=steps,
        drafts=drafts,
        draft_tokens=draft_tokens,
        accepted=accepted,
        tokens={request_id: tuple(ids) for request_id, ids in tokens.items()},
    )


def _counters(core: EngineCore) -> tuple[int, int, int, int]:
    if core.speculator is None:
        return core.num_steps, 0, 0, 0
    stats = core.speculator.stats()
    return core.num_steps, stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens


class Sides:
    """An engine for each side; they take turns, in another order each round."""

    def __init__(self, names: Sequence[str], **options: Any):
        self.parts: dict[str, EngineParts] = {}
        drafting = {name: options.pop(name) for name in DRAFTING}
        for name in names:
            drafting_of = {} if name == OFF else dict(drafting)
            if name != "draft":
                drafting_of.pop("draft_model", None)
            config = EngineConfig.from_options(speculation=name, **drafting_of, **options)
            parts = assemble(config)
            parts.finish_compiling()
            self.parts[name] = parts

    def round(self, index: int, requests: Sequence[Request], at_once: int = 1) -> dict[str, Run]:
        names = list(self.parts)
        turn = index % len(names)
        names = names[turn:] + names[:turn]
        if index // len(names) % 2:
            names.reverse()
        runs = {name: serve(self.parts[name], requests, at_once) for name in names}
        return {name: runs[name] for name in self.parts}


def summary(rounds: Sequence[dict[str, Run]], name: str) -> dict[str, Any]:
    """Return the figures of one side; times are ratios to no drafts within a round."""
    runs = [round_[name] for round_ in rounds]
    off = [round_[OFF] for round_ in rounds]
    ratios = [plain.wall_s / run.wall_s for plain, run in zip(off, runs, strict=True)]
    decoding = [plain.decode_s / run.decode_s for plain, run in zip(off, runs, strict=True)]
    num_tokens, steps = sum(r.num_tokens for r in runs), sum(r.steps for r in runs)
    drafts, tokens = sum(r.drafts for r in runs), sum(r.draft_tokens for r in runs)
    accepted = sum(r.accepted for r in runs)
    pairs = [(p.tokens[i], r.tokens[i]) for p, r in zip(off, runs, strict=True) for i in r.tokens]
    low, high = interval(ratios)
    return {
        "speedup": statistics.median(ratios),
        "speedup_low": low,
        "speedup_high": high,
        "decode_speedup": statistics.median(decoding),
        "tokens_per_s": num_tokens / sum(r.wall_s for r in runs),
        "tokens": num_tokens,
        "tokens_per_step": num_tokens / steps,
        "acceptance": accepted / tokens if tokens else None,
        "mean_accepted_length": accepted / drafts if drafts else None,
        "draft_tokens": tokens,
        "differing_requests": sum(a != b for a, b in pairs) / len(pairs),
    }


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the 95% interval of the median, by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


# ---- parts ---------------------------------------------------------------------------------------


def run_questions(sides: Sides, questions: Sequence[str], rounds: int) -> list[dict[str, Run]]:
    """Run the questions, without measuring the first two, which `suffix` would remember."""
    parts = sides.parts[OFF]
    serve_warm_up(sides, question_requests(parts, questions[:2], 0.0, "warm"))
    questions = questions[2:]
    done = []
    for index in progress_bar(iterable=range(rounds), unit="rounds", desc="questions", leave=False):
        chosen = questions[index::rounds]
        done.append(sides.round(index, question_requests(parts, chosen, 0.0, f"q{index}")))
    return done


def usual_questions() -> Iterator[str]:
    """Yield endless questions for the bundled model's own tasks."""
    for batch in itertools.count():
        for document in documents(USUAL_SEED + batch, 4000):
            if document.turns[0][0] == "user":
                yield document.turns[0][1]


def run_usual(sides: Sides, rounds: int, each: int) -> list[dict[str, Run]]:
    parts, asked = sides.parts[OFF], usual_questions()
    warm_up = question_requests(parts, [*itertools.islice(asked, 5)], 0.7, "warm")
    serve_warm_up(sides, warm_up)
    done = []
    for index in progress_bar(iterable=range(rounds), unit="rounds", desc="usual", leave=False):
        requests = question_requests(parts, [*itertools.islice(asked, each)], 0.7, f"u{index}")
        requests = [dataclasses.replace(r, seed=1000 * index + i) for i, r in enumerate(requests)]
        done.append(sides.round(index, requests))
    return done


def run_load(
    sides: Sides,
    draw: Callable[[int], list[str]],
    rounds: int,
    at_once: int,
    *,
    temperature: float = 0.7,
    least: int = LEAST_LOAD,
) -> list[dict[str, Run]]:
    """Run rounds of at least `least` requests, and at least three per concurrent one.

    Args:
      draw: Returns this many questions. The warm-up questions are not measured.
    """
    parts, rng, count = sides.parts[OFF], random.Random(at_once), max(least, 3 * at_once)

    def drawn(tag: str) -> list[Request]:
        requests = question_requests(parts, draw(count), temperature, f"{tag}-{at_once}")
        return [dataclasses.replace(r, seed=rng.getrandbits(32)) for r in requests]

    serve_warm_up(sides, drawn("warm"), at_once)
    return [
        sides.round(index, drawn(f"l{index}"), at_once)
        for index in progress_bar(
            iterable=range(rounds), unit="rounds", desc=f"{at_once} at once", leave=False
        )
    ]


def serve_warm_up(sides: Sides, requests: Sequence[Request], at_once: int = 1) -> None:
    for parts in sides.parts.values():
        serve(
            parts,
            [dataclasses.replace(r, request_id=f"w-{r.request_id}") for r in requests],
            at_once,
        )


def run_replay(
    names: Sequence[str], questions: Sequence[str], rounds: int, options: dict[str, Any]
) -> dict[str, list[dict[str, Run]]]:
    rng, each = random.Random(7), 6
    kinds = {
        "edit": edits(questions, each * rounds, rng),
        "json": extractions(each * rounds, rng),
    }
    done = {}
    for kind, records in kinds.items():
        plain = {name: v for name, v in options.items() if name not in DRAFTING}
        parts = assemble(EngineConfig.from_options(**plain))  # only its tokenizer is needed
        recorded = Records(parts, records)
        with recorded.instead_of_samples():
            sides = Sides(names, **options, compile_cache=False)
        requests = replay_requests(sides.parts[OFF], records, kind)
        serve_warm_up(sides, requests[:2])
        done[kind] = [
            sides.round(index, requests[index * each : (index + 1) * each])
            for index in progress_bar(iterable=range(rounds), unit="rounds", desc=kind, leave=False)
        ]
        for round_ in done[kind]:
            for run in round_.values():
                for request_id, ids in run.tokens.items():
                    i = int(request_id.rpartition("-")[2])
                    wanted = recorded.tokens[i][recorded.tokens[i] >= 0]
                    if tuple(wanted) != ids:
                        raise BenchmarkError(f"{request_id} differs from the record")
    return done


HEADER = (
    *("part", "drafts", "speed-up", "95% interval", "decoding", "tokens/s", "tokens per step"),
    *("accepted", "length", "differing"),
)


def rows(report: dict[str, Any]) -> list[list[str]]:
    made = []
    for part, sides in report["parts"].items():
        for name, s in sides.items():
            accepted = "-" if s["acceptance"] is None else f"{100 * s['acceptance']:.0f}%"
            made.append(
                [
                    *(part, name, number(s["speedup"], 2)),
                    f"{s['speedup_low']:.2f} to {s['speedup_high']:.2f}",
                    *(number(s["decode_speedup"], 2), number(s["tokens_per_s"])),
                    *(number(s["tokens_per_step"], 2), accepted),
                    number(s["mean_accepted_length"], 2),
                    f"{100 * s['differing_requests']:.1f}%",
                ]
            )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = reports.parser(
        "speculation", "Compare requests with and without drafts.", model="forge-tiny", rounds=5
    )
    parser.add_argument(
        "--questions",
        type=Path,
        help="file in Spec-Bench's format; all parts but usual and batch need it",
    )
    parser.add_argument("--drafters", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--draft-model", type=str, help="model folder of the drafter `draft`")
    parser.add_argument("--max-draft-tokens", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=DEFAULT_PARTS)
    parser.add_argument(
        "--load-rounds", type=int, default=20, help="rounds of load and batch (default 20)"
    )
    parser.add_argument("--loads", type=int, nargs="+", default=LOADS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.7,))
    parser.add_argument(
        "--requests",
        type=int,
        help="requests per round, at least (default: usual 200, load and batch 48; "
        "at least three times the load)",
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--draft-verification", choices=get_args(Verification), default="coupled")
    parser.add_argument("--limit", type=int, help="maximum number of questions")
    args = parser.parse_args(argv)
    names = [OFF, *args.drafters]

    def measure_all() -> dict[str, Any]:
        parts = {
            part: {name: summary(rounds, name) for name in names}
            for part, rounds in measure(args, names).items()
        }
        return {"model": args.model, "rounds": args.rounds, "parts": parts}

    return reports.publish("speculation", args, measure_all, markdown)


def markdown(report: dict[str, Any]) -> str:
    return f"{reports.heading(report)}\n{reports.table(HEADER, rows(report))}"


def measure(args: argparse.Namespace, names: Sequence[str]) -> dict[str, list[dict[str, Run]]]:
    if ("draft" in names) != (args.draft_model is not None):
        raise BenchmarkError("--draft-model FOLDER and --drafters draft need each other")
    options: dict[str, Any] = {
        "model": args.model,
        "deterministic": args.deterministic,
        "draft_verification": args.draft_verification,
        "max_draft_tokens": args.max_draft_tokens,
        "draft_model": args.draft_model,
        "max_num_seqs": max(args.loads),
    }
    questions: list[str] = []
    if set(args.parts) & {"questions", "replay", "load"}:
        if args.questions is None:
            raise BenchmarkError("--questions FILE is missing")
        questions = read_questions(args.questions)
        random.Random(0).shuffle(questions)
        questions = questions[: args.limit]
    done: dict[str, list[dict[str, Run]]] = {}
    if set(args.parts) - {"replay"}:
        sides = Sides(names, **options)
        if "usual" in args.parts:
            usual = run_usual(sides, 2 * args.rounds, args.requests or USUAL)
            done["usual, first half"] = usual[: args.rounds]
            done["usual, second half"] = usual[args.rounds :]
        if "questions" in args.parts:
            done["questions"] = run_questions(sides, questions, args.rounds)
        asked, rng = usual_questions(), random.Random(0)
        draws: dict[str, Callable[[int], list[str]]] = {
            "batch": lambda count: [*itertools.islice(asked, count)],
            "load": lambda count: rng.sample(questions, min(count, len(questions))),
        }
        for part in (part for part in ("batch", "load") if part in args.parts):
            for at_once, temperature in itertools.product(args.loads, args.temperatures):
                done[f"{part}: {at_once} at once, temperature {temperature:g}"] = run_load(
                    sides,
                    draws[part],
                    args.load_rounds,
                    at_once,
                    temperature=temperature,
                    least=args.requests or LEAST_LOAD,
                )
    if "replay" in args.parts:
        replayed = run_replay(names, questions, args.rounds, options)
        done |= {f"replay: {kind}": rounds for kind, rounds in replayed.items()}
    return done


if __name__ == "__main__":
    sys.exit(main())
