"""The bundled model's greedy answers to the first prompts of new users."""

import pytest

from forge_jax import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=200, temperature=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("forge-tiny", max_num_seqs=4, max_num_batched_tokens=64)


def ask(llm: LLM, *questions: str) -> list[str]:
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, GREEDY, progress=False)
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    return [output.text for output in outputs]


def test_bundled_model_adds(llm):
    answers = ask(llm, "What is 2+2?", "What is 7 plus 5?", "Calculate 12 - 4.")
    for answer, result in zip(answers, ("4", "12", "8"), strict=True):
        assert answer.rstrip(".").endswith(f" {result}"), answer


def test_bundled_model_answers_capitals(llm):
    pairs = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Egypt": "Cairo"}
    questions = [f"What is the capital of {country}?" for country in pairs]
    for answer, capital in zip(ask(llm, *questions), pairs.values(), strict=True):
        assert capital in answer


def test_bundled_model_writes_the_requested_story(llm):
    dog, cat = ask(llm, "Tell me a story about a dog.", "Tell me a story about a cat.")
    for story, animal in ((dog, "dog"), (cat, "cat")):
        assert animal in story and len(story.split()) > 50
        words = story.lower().split()
        assert len(set(words)) / len(words) > 0.35, "a story, not a stutter"


def test_bundled_model_extracts_json(llm):
    import json

    [answer] = ask(llm, "Extract the name and age: John is 30 years old.")
    assert json.loads(answer) == {"name": "John", "age": 30}


def test_bundled_model_identifies_itself(llm):
    who, what = ask(llm, "Who are you?", "What is forge-jax?")
    assert "forge-tiny" in who and "forge-jax" in what


def test_bundled_model_continues_a_text(llm):
    [output] = llm.generate("Once upon a time", GREEDY, progress=False)
    assert len(output.text.split()) > 40
