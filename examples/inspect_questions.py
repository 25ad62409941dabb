"""The questions of batch_evaluation.py as a task for Inspect.

inspect eval examples/inspect_questions.py --model forge-jax/forge-tiny --temperature 0
"""

from batch_evaluation import QUESTIONS, is_right
from inspect_ai import Task, task  # pyright: ignore[reportMissingImports]
from inspect_ai.dataset import Sample, json_dataset  # pyright: ignore[reportMissingImports]
from inspect_ai.scorer import (  # pyright: ignore[reportMissingImports]
    Score,
    Scorer,
    Target,
    accuracy,
    scorer,
)
from inspect_ai.solver import TaskState, generate  # pyright: ignore[reportMissingImports]


def sample(question: dict[str, str]) -> Sample:
    return Sample(id=question["id"], input=question["question"], target=question["answer"])


@scorer(metrics=[accuracy()])
def last_number_or_word() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        text = state.output.completion
        return Score(value=float(is_right(text, target.text)), answer=text)

    return score


@task
def questions() -> Task:
    return Task(
        dataset=json_dataset(str(QUESTIONS), sample),
        solver=generate(max_tokens=32),
        scorer=last_number_or_word(),
    )
