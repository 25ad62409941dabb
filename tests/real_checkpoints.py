"""Compare published checkpoints with what transformers computes. This needs a network.

    python -m tests.real_checkpoints [--list FILE] [--expectations FOLDER] [MODEL ...]

Each model of the list is downloaded and run in float32 on greedy prompts and on a short text. The
exit status is 1 if a model cannot be loaded or differs from its expectation. Models without an
expectation, and gated models that this machine may not download, are reported but do not fail.
`tests/fixtures/real_checkpoints/README.md` describes the files.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import GatedRepoError

from forge_jax import LLM, SamplingParams
from forge_jax.errors import ForgeError
from forge_jax.models.families import ARCHITECTURES

HERE = Path(__file__).parent / "fixtures" / "real_checkpoints"
PROMPTS = ("Once upon a time", "The capital of France is")  # for models without an expectation
GREEDY = 24  # tokens
TIE = 1e-3  # logits: two tokens this close may be chosen in either order
TOLERANCE = 1e-3  # relative, for the perplexity
MISMATCH, FAILED = "MISMATCH", "FAILED"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one model. `verdict` starts with MISMATCH or FAILED if the model failed."""

    id: str
    family: str
    verdict: str
    greedy: str = "-"
    perplexity: float | None = None
    expected: float | None = None

    @property
    def failed(self) -> bool:
        return self.verdict.startswith((MISMATCH, FAILED))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.real_checkpoints", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--list", type=Path, default=HERE / "models.toml", help="the models")
    parser.add_argument("--expectations", type=Path, default=HERE / "expectations")
    parser.add_argument("models", nargs="*", help="ids; default: all models of the list")
    args = parser.parse_args(argv)
    entries = tomllib.loads(args.list.read_text())["model"]
    unknown = set(args.models) - {entry["id"] for entry in entries}
    if unknown:
        parser.error(f"not in {args.list}: {', '.join(sorted(unknown))}")
    rows = []
    for entry in entries:
        if not args.models or entry["id"] in args.models:
            rows.append(check(entry, read_expectation(args.expectations, entry["id"])))
            print(f"{rows[-1].id}: {rows[-1].verdict}", file=sys.stderr)
    print(table(rows))
    without = sorted(ARCHITECTURES.keys() - {entry["family"] for entry in entries})
    print(f"\n{sum(row.failed for row in rows)} of {len(rows)} failed.")
    print(f"Families that are not in the list: {', '.join(without)}.")
    return int(any(row.failed for row in rows))


def read_expectation(folder: Path, id: str) -> dict[str, Any] | None:
    file = folder / (id.replace("/", "--") + ".json")
    return json.loads(file.read_text()) if file.exists() else None


def check(entry: Mapping[str, Any], expectation: Mapping[str, Any] | None) -> Row:
    """Download, load and run one model, at the commit of its expectation if there is one."""
    about = {"id": entry["id"], "family": entry["family"]}
    revision = (expectation or {}).get("commit") or entry["revision"]
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 256}
    try:
        with LLM(entry["id"], revision=revision, dtype="float32", **sizes) as llm:
            if llm.tokenizer is None:
                return Row(**about, verdict=f"{FAILED}: it has no tokenizer")
            if expectation is not None:
                return compare(llm, about, expectation)
            greedy(llm, list(PROMPTS))
            found = perplexity(llm, text_ids(llm))
            return Row(**about, verdict="no expectation yet", perplexity=found)
    except ForgeError as error:
        if entry["gated"] and isinstance(error.__cause__, GatedRepoError):
            return Row(**about, verdict="skipped: gated, and not accepted for HF_TOKEN")
        return Row(**about, verdict=f"{FAILED}: {error}")
    except Exception as error:  # the other models still run
        return Row(**about, verdict=f"{FAILED}: {type(error).__name__}: {error}")


def compare(llm: LLM, about: dict[str, str], expectation: Mapping[str, Any]) -> Row:
    """Compare tokens, the chat template, greedy tokens and perplexity with the expectation."""
    prompts = expectation["prompts"]
    outputs = greedy(llm, [each["prompt"] for each in prompts])
    faults = [
        f"prompt {each['prompt']!r} has the tokens {prompt_ids}, expected {each['prompt_ids']}"
        for each, (prompt_ids, _) in zip(prompts, outputs, strict=True)
        if prompt_ids != each["prompt_ids"]
    ]
    agreeing = 0
    for each, (_, ids) in zip(prompts, outputs, strict=True):
        same = num_agreeing(ids, each["greedy_ids"])
        agreeing += same
        if same < len(each["greedy_ids"]) and each["margins"][same] > TIE:
            faults.append(
                f"greedy token {same} of {each['prompt']!r} differs, although its logit is "
                f"{each['margins'][same]:g} above the next"
            )
    chat = expectation["chat"]
    if chat and chat_ids(llm, chat["messages"]) != chat["ids"]:
        faults.append("the chat template gives other tokens")
    ids, expected = expectation["text_ids"], expectation["perplexity"]
    if text_ids(llm)[: len(ids)] != ids:
        faults.append("the text has other tokens")
    found = perplexity(llm, ids)
    if not math.isclose(found, expected, rel_tol=TOLERANCE):
        faults.append("the perplexity differs")
    total = sum(len(each["greedy_ids"]) for each in prompts)
    return Row(
        **about,
        verdict=f"{MISMATCH}: {'; '.join(faults)}" if faults else "ok",
        greedy=f"{agreeing} of {total}",
        perplexity=found,
        expected=expected,
    )


def num_agreeing(ids: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    pairs = enumerate(zip(ids, expected, strict=True))
    return next((at for at, (a, b) in pairs if a != b), len(expected))


def greedy(llm: LLM, prompts: list[str]) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each prompt and of its greedy continuation."""
    params = SamplingParams(max_tokens=GREEDY, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params, progress=False)
    return [(list(each.prompt_token_ids), list(each.outputs[0].token_ids)) for each in outputs]


def chat_ids(llm: LLM, messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of a conversation."""
    [output] = llm.chat(messages, SamplingParams(max_tokens=1, temperature=0.0), progress=False)
    return list(output.prompt_token_ids)


def text_ids(llm: LLM) -> list[int]:
    """Return the first 256 tokens of the text, or as many as fit the model."""
    ids = llm.tokenizer.encode((HERE / "text.txt").read_text())
    return ids[: min(256, llm.max_model_len)]


def perplexity(llm: LLM, ids: list[int]) -> float:
    """Return the perplexity of all tokens except the first."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [output] = llm.generate([ids], params, progress=False)
    entries = output.prompt_logprobs or ()
    return math.exp(-sum(entry.logprob for entry in entries) / len(entries))


def table(rows: Sequence[Row]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| model | family | greedy tokens | perplexity | expected | verdict |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        numbers = ["-" if x is None else f"{x:.4f}" for x in (row.perplexity, row.expected)]
        cells = [row.id, row.family, row.greedy, *numbers, row.verdict.replace("\n", " ")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
