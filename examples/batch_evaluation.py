"""Evaluate a model on a file of questions with `forge-jax batch`, and print its accuracy.

    python examples/batch_evaluation.py [MODEL] [OUT.jsonl] [--FLAG ...]

The questions are in examples/questions.jsonl. Set OUT to make interrupted runs resumable. The flags
are those of `forge-jax batch`.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

QUESTIONS = Path(__file__).parent / "questions.jsonl"
SYNONYMS = {"four": "4", "seven": "7", "eight": "8", "twelve": "12", "sixty": "60"}


def request(question: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the batch file: a greedy chat with the question's id."""
    messages = [{"role": "user", "content": question["question"]}]
    return {"id": question["id"], "messages": messages, "temperature": 0, "max_tokens": 32}


def is_right(text: str, expected: str) -> bool:
    """Return True if the expected answer is the last number or one of the words of the output."""
    words: list[str] = re.findall(r"[a-z]+|\d+", text.lower())
    words = [SYNONYMS.get(word) or word for word in words]
    if expected.isdecimal():
        return [word for word in words if word.isdecimal()][-1:] == [expected]
    return expected.lower() in words


def process_results(question: dict[str, Any], outputs: list[str]) -> dict[str, float]:
    """Return the score of one question for lm-evaluation-harness; see questions.yaml."""
    return {"acc": float(is_right(outputs[0], question["answer"]))}


def evaluate(
    questions: list[dict[str, Any]], model: str, out: Path, flags: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return the answers in the order of the questions. Reuse answers that are already in `out`."""
    source = out.with_suffix(".in.jsonl")
    source.write_text("".join(json.dumps(request(question)) + "\n" for question in questions))
    command = [sys.executable, "-m", "forge_serve", "batch", str(source), str(out), model, *flags]
    subprocess.run(command, check=True)
    lines = (json.loads(line) for line in out.read_text().splitlines())
    by_id = {line["id"]: line for line in lines}
    return [by_id[question["id"]] for question in questions]


def main(model: str = "forge-tiny", out: str | None = None, *flags: str) -> float:
    """Print the accuracy by question kind and overall. Return the overall accuracy."""
    questions = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        answers = evaluate(questions, model, Path(out or f"{folder}/out.jsonl"), flags)
    asked, right = Counter[str](), Counter[str]()
    for question, answer in zip(questions, answers, strict=True):
        asked[question["kind"]] += 1
        if is_right(answer.get("text") or "", question["answer"]):
            right[question["kind"]] += 1
        else:
            said = answer.get("text", answer.get("error"))
            print(f"wrong: {question['question']} {said!r}, not {question['answer']}")
    for kind, number in asked.items():
        print(f"{kind}: {right[kind]} of {number}")
    accuracy = right.total() / asked.total()
    print(f"accuracy: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:])
