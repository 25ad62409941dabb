"""`allowed_token_ids` and `bad_words` against their definition, at each position of an output."""

import random
from pathlib import Path

import numpy as np
import pytest

from forge_jax import SamplingParams
from forge_jax.engine.fake import fake_tokenizer
from forge_jax.engine.validation import Limits, check_request
from forge_jax.errors import GrammarError, RequestError
from forge_jax.grammar.token_filter import TokenFilter
from forge_jax.schedule.request import Request
from forge_jax.text import Tokenizer

FORGE_TINY = Path(__file__).parents[2] / "forge_jax" / "checkpoint" / "bundled" / "forge-tiny"
TOKENIZER = fake_tokenizer()
VOCAB = TOKENIZER.vocab_size


def ids_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def by_definition(output, allowed, bad, vocab_size) -> list[int]:
    banned = {b[-1] for b in bad if len(b) == 1 or tuple(output[-(len(b) - 1) :]) == b[:-1]}
    return [token for token in range(vocab_size) if token in allowed and token not in banned]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
def test_mask_after_each_output_follows_the_lists(vocab_size):
    rng = random.Random(vocab_size)
    for _ in range(40):
        letters = rng.sample(range(vocab_size), min(vocab_size, 4))
        allowed = rng.choice((None, [*letters, *rng.sample(range(vocab_size), vocab_size // 2)]))
        bad = [tuple(rng.choices(letters, k=rng.randint(1, 3))) for _ in range(rng.randint(0, 5))]
        made = TokenFilter(vocab_size, allowed, bad)
        may_come = range(vocab_size) if allowed is None else allowed
        follower, output = made.follower(), []
        for _ in range(12):
            expected = by_definition(output, may_come, bad, vocab_size)
            assert ids_of(follower.mask()) == expected
            if not expected:
                break
            drafts = rng.choices(letters, k=rng.randint(1, 4))
            valid = follower.valid_drafts(drafts)
            for count in range(valid + 1):
                behind = [*output, *drafts[:count]]
                left = by_definition(behind, may_come, bad, vocab_size)
                assert ids_of(follower.mask(drafts[:count])) == left
                assert count == len(drafts) or (drafts[count] in left) == (count < valid)
            token = rng.choice(expected)
            follower.accept([token])
            output.append(token)
            banned = [token for token in range(vocab_size) if token not in expected]
            if banned:
                with pytest.raises(GrammarError):
                    made.follower().accept([*output[:-1], rng.choice(banned)])


def filter_of(tokenizer=TOKENIZER, **params) -> TokenFilter:
    made = TokenFilter.of(SamplingParams(**params), tokenizer, tokenizer.vocab_size)
    assert made is not None
    return made


@pytest.mark.parametrize("text", ["girl", "garden", "Paris", "the"])
def test_word_is_banned_with_and_without_a_leading_space(text):
    tokenizer = Tokenizer.from_folder(FORGE_TINY)
    spellings = [tokenizer.encode(spelled, False) for spelled in (text, f" {text}")]
    assert spellings[0] != spellings[1]
    for word in (text, f" {text}"):
        for ids in spellings:
            follower = filter_of(tokenizer, bad_words=[word]).follower()
            assert follower.valid_drafts(ids) == len(ids) - 1
            follower.accept(ids[:-1])
            assert ids[-1] not in ids_of(follower.mask())
            with pytest.raises(GrammarError):
                follower.accept(ids[-1:])


def test_end_of_the_prompt_does_not_count_towards_a_bad_word():
    d, o = TOKENIZER.encode("do", False)
    follower = filter_of(bad_words=["do"]).follower()
    assert o in ids_of(follower.mask())
    follower.accept([d])
    assert o not in ids_of(follower.mask())


def test_empty_lists_make_no_filter():
    assert TokenFilter.of(SamplingParams(bad_words=[]), TOKENIZER, VOCAB) is None
    assert (
        not SamplingParams().masked and not SamplingParams(allowed_token_ids=[1]).needs_host_token
    )
    assert SamplingParams(bad_words=["a"]).needs_host_token


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * (128 * 1024 + 1)}, "allowed_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
        ({"bad_words": ["w"] * 129}, "bad_words"),
        ({"bad_words": ["w" * 257]}, "bad_words"),
        ({"bad_words": ["a"], "allowed_token_ids": TOKENIZER.encode("a")}, "bad_words"),
    ],
)
def test_invalid_lists_are_rejected_by_name(params, param):
    with pytest.raises(RequestError) as refused:
        check(TOKENIZER, **params)
    assert refused.value.param == param


def check(tokenizer, **params) -> None:
    params = SamplingParams(max_tokens=1, **params)
    request = Request(request_id="r", prompt_token_ids=[1], params=params)
    check_request(request, Limits(VOCAB, 100, 100), tokenizer)


def test_words_need_a_tokenizer_and_ids_do_not():
    check(None, allowed_token_ids=[3])
    with pytest.raises(RequestError, match="tokenizer"):
        check(None, bad_words=["a"])
