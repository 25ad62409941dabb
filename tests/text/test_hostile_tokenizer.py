"""Malicious tokenizer.json files: an error that names file and field, or bounded encoding."""

from __future__ import annotations

import concurrent.futures
import gc
import json
import re
import shutil
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from forge_jax.checkpoint.folder import open_checkpoint
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.errors import CheckpointError, ModelError, RequestError
from forge_jax.text import ChatTemplate, Tokenizer, patterns, tokenizer_file
from forge_jax.text.patterns import PatternError, check_pattern
from forge_jax.text.token_bytes import TokenBytes
from forge_jax.text.tokenizer import _alternatives

MIB = 2**20
FIXTURES = Path(__file__).parent.parent / "fixtures"
BPE = {
    "type": "BPE",
    "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4},
    "merges": [["a", "b"], ["ab", "c"]],
}


def added(i, content: str, **flags) -> dict:
    return {"id": i, "content": content, "special": True, "normalized": False, "lstrip": False,
            "rstrip": False, "single_word": False} | flags  # fmt: skip


def replace(old: str, new: str) -> dict:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def split(pattern) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def nested(component: dict, depth: int) -> dict:
    for _ in range(depth):
        component = {"type": "Sequence", "normalizers": [component]}
    return component


@pytest.fixture
def folder(tmp_path):
    """Return a writer of a small BPE with the given changes; a string replaces the text."""

    def write(changes=None, model=None, name="tokenizer.json"):
        if not isinstance(changes, str):
            data = {"version": "1.0", "added_tokens": [], "model": BPE | (model or {})}
            changes = json.dumps(data | (changes or {}))
        (tmp_path / name).write_text(changes)
        return tmp_path

    return write


def test_small_tokenizer_itself_is_valid(folder):
    tokenizer = Tokenizer.from_folder(folder({"added_tokens": [added(5, "<s>")]}), 6)
    assert tokenizer is not None and tokenizer.encode("abcab<s>") == [4, 3, 5]


REFUSED = {
    "id beyond the width": ({}, {"vocab": BPE["vocab"] | {"d": 6}}, "model.vocab gives a token an"),
    "huge id": ({}, {"vocab": BPE["vocab"] | {"d": 2**32 - 1}}, "model.vocab gives a token an id"),
    "huger id": ({}, {"vocab": BPE["vocab"] | {"d": 10**40}}, "model.vocab gives a token an id"),
    "negative id": ({}, {"vocab": BPE["vocab"] | {"d": -1}}, "model.vocab gives a token an id"),
    "id of a wrong type": ({}, {"vocab": BPE["vocab"] | {"d": "1"}}, "model.vocab gives a token"),
    "id that is a float": ({}, {"vocab": BPE["vocab"] | {"d": 1.0}}, "model.vocab gives a token"),
    "one id twice": ({}, {"vocab": BPE["vocab"] | {"d": 1}}, "model.vocab gives 6 tokens 5 ids"),
    "a vocabulary that is none": ({}, {"vocab": [1]}, "model.vocab must be an object"),
    "a long token": ({}, {"vocab": BPE["vocab"] | {"x" * 10**6: 5}}, "of 1000000 characters"),
    "a merge of nothing": ({}, {"merges": [["", "a"]]}, "model.merges must combine two tokens"),
    "a merge with itself": ({}, {"merges": [["ab", ""]]}, "model.merges must combine two tokens"),
    "a merge of unknown": ({}, {"merges": [["a", "x"]]}, "model.merges must combine two tokens"),
    "a merge to unknown": ({}, {"merges": [["c", "c"]]}, "model.merges must combine two tokens"),
    "a merge of three": ({}, {"merges": ["a b c"]}, "model.merges must combine two tokens"),
    "a merge of numbers": ({}, {"merges": [[0, 1]]}, "model.merges must combine two tokens"),
    "a short part": (
        {},
        {"continuing_subword_prefix": "####"},
        "model.merges must combine two tokens",
    ),
    "merges that are none": ({}, {"merges": {"a": "b"}}, "model.merges must be a list"),
    "an unknown model": ({}, {"type": "Python"}, "model.type must be BPE"),
    "no model": ({"model": None}, {}, "model must be an object"),
    "added beyond": ({"added_tokens": [added(10**6, "<s>")]}, {}, "added_tokens gives a token an"),
    "added behind a gap": ({"added_tokens": [added(6, "<s>")]}, {}, "the ids have a gap"),
    "added over another": ({"added_tokens": [added(0, "<s>")]}, {}, "gives id 0 of 'a'"),
    "added twice": (
        {"added_tokens": [added(5, "<s>"), added(5, "<t>")]}, {}, "added_tokens has the id 5",
    ),
    "added again": (
        {"added_tokens": [added(5, "<s>"), added(6, "<s>")]}, {}, "added_tokens has the id 6",
    ),
    "added nothing": ({"added_tokens": [added(5, "")]}, {}, "has a token of 0 characters"),
    "added a long one": ({"added_tokens": [added(5, "x" * 10**6)]}, {}, "of 1000000 characters"),
    "added a number": ({"added_tokens": [5]}, {}, "added_tokens must contain tokens with id"),
    "added as an object": ({"added_tokens": {"id": 5}}, {}, "added_tokens must be a list"),
    "added in each other": (
        {"added_tokens": [added(5 + i, "<" * (i + 1)) for i in range(100)]},
        {},
        "are prefixes of each other",
    ),
    "exponential": ({"pre_tokenizer": split("(a+)+b")}, {}, "pre_tokenizer.Regex is an unsafe pat"),
    "quadratic": ({"pre_tokenizer": split("a+b")}, {}, "pre_tokenizer.Regex is an unsafe pattern"),
    "in a normalizer": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": ""}},
        {},
        "normalizer.Regex is an unsafe pattern",
    ),
    "in a decoder": (
        {"decoder": {"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": ""}},
        {},
        "decoder.Regex is an unsafe pattern",
    ),
    "not a pattern": ({"pre_tokenizer": split(["a"])}, {}, "pre_tokenizer.Regex must be a string"),
    "invalid": ({"pre_tokenizer": split(r"\p{Nonsense}")}, {}, "it is invalid"),
    "growth": ({"normalizer": replace("a", "b" * 1000)}, {}, "must be a string of at most 64"),
    "growth by steps": (
        {"normalizer": {"type": "Sequence", "normalizers": [replace("a", "aa")] * 30}},
        {},
        "normalizer makes texts more than 64 times longer",
    ),
    "growth of tokens": ({"decoder": replace("a", "b" * 60)}, {}, "decoder makes texts more than"),
    "a long piece": (
        {"model": {"type": "Unigram", "vocab": [["a" * 300, 0.0]], "unk_id": 0}},
        {},
        "model.vocab has a token of 300 characters, not 1 to 256",
    ),
    "a replacement of nothing": ({"normalizer": replace("", "a")}, {}, "must be a string or a"),
    "a long prefix": (
        {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, {}, "has 1000000 characters",
    ),
    "deep components": ({"normalizer": nested(replace("a", "b"), 60)}, {}, "normalizer is nested"),
    "many components": (
        {"normalizer": {"type": "Sequence", "normalizers": [replace("a", "b")] * 5000}},
        {},
        "normalizer has more than 256 parts",
    ),
    "a component that is none": ({"decoder": 1}, {}, "decoder must be an object"),
    "an unknown component": ({"decoder": {"type": "Python"}}, {}, "is not a usable tokenizer"),
    "long words": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
        {},
        "model.max_input_chars_per_word must be at most 200",
    ),
    "infinite scores": (
        {"model": {"type": "Unigram", "vocab": [["a", float("nan")]], "unk_id": 0}},
        {},
        "model.vocab must contain pieces with finite scores",
    ),
    "an unknown piece": (
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}}, {}, "model.unk_id must",
    ),
    "a bound beyond the width": (
        {"post_processor": {"type": "BertProcessing", "sep": ["a", 10**8], "cls": ["a", 0]}},
        {},
        "post_processor.sep gives a token an id",
    ),
    "a bound that is none": (
        {"post_processor": {"type": "RobertaProcessing", "sep": ["a", 0], "cls": None}},
        {},
        "post_processor.cls must be a token and its id",
    ),
    "a piece twice": (
        {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["a", 0.0]], "unk_id": 0}},
        {},
        "model.vocab has a piece twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_each_malicious_field_is_named_in_the_error(folder, name):
    changes, model, message = REFUSED[name]
    path = folder(changes, model)
    begin = time.thread_time()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_folder(path, 6)
    assert message in str(caught.value) and len(str(caught.value)) < 1000
    assert time.thread_time() - begin < 10  # under a second on an idle machine


def test_padding_is_disabled_before_encoding(folder, monkeypatch):
    """A fixed length of 10**9 took 15 GB."""
    calls: list[str] = []

    class Recorded:
        @staticmethod
        def from_str(text):
            backend = Backend.from_str(text)
            return types.SimpleNamespace(
                no_padding=lambda: calls.append("no_padding") or backend.no_padding(),
                no_truncation=backend.no_truncation,
                encode=lambda text: calls.append("encode") or backend.encode(text),
                decode=backend.decode,
            )

    monkeypatch.setattr(tokenizer_file, "Backend", Recorded)
    padding = {"strategy": {"Fixed": 1000}, "direction": "Right", "pad_id": 0}
    path = folder({"padding": padding | {"pad_type_id": 0, "pad_token": "a"}})
    tokenizer_file.load_backend(path / "tokenizer.json")
    assert calls == ["no_padding", "encode"]


def test_duplicate_token_is_rejected(folder):
    text = '{"model": {"type": "BPE", "vocab": {"a": 0, "a": 1}, "merges": []}}'
    with pytest.raises(CheckpointError, match="an object has duplicate keys"):
        Tokenizer.from_folder(folder(text))


def test_added_tokens_may_exceed_the_models_rows(folder):
    """Llama 2 was published like that. The engine rejects requests with such an id."""
    tokenizer = Tokenizer.from_folder(folder({"added_tokens": [added(5, "<pad>")]}), 5)
    assert tokenizer is not None and tokenizer.encode("<pad>") == [5]


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"],
)
def test_too_large_files_are_not_read(folder, name):
    path = folder()
    with (path / name).open("wb") as stream:
        stream.truncate(2**40)  # a sparse file, which takes no disk space
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} has 1099511627776 bytes"):
        load(path)


def load(path) -> None:
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer is not None
    ChatTemplate.from_folder(path, tokenizer)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**5 + "1" + "}" * 10**5, "\xff", '{"a": ' + "9" * 10**5 + "}"]
)
def test_invalid_json_files_are_rejected(folder, name, text):
    path = folder()
    (path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": 1}, "'bos_token' must be a string"),
        ({"eos_token": ["</s>"]}, "'eos_token' must be a string"),
        ({"eos_token": {"content": {}}}, "'eos_token' must be a string"),
        ({"eos_token": "x" * 10**6}, "'eos_token' must be a string of at most"),
        ({"chat_template": 1}, "chat_template must be a string"),
        ({"chat_template": "x" * MIB}, "chat template cannot be compiled.*characters"),
        ({"chat_template": "{{ x }}" * 10**4}, "chat template cannot be compiled.*4096 tags"),
        ({"chat_template": {"a": {"b": 1}}}, "chat_template must be a string"),
    ],
)
def test_wrong_types_in_the_configuration_are_named_in_the_error(folder, config, message):
    with pytest.raises(CheckpointError, match=message):
        load(folder(json.dumps(config), name="tokenizer_config.json") and folder())


def test_library_panic_is_an_ordinary_error(folder, monkeypatch):
    class PanicException(BaseException):
        pass

    def panics(*_, **__):
        raise PanicException("index out of range")

    monkeypatch.setattr(tokenizer_file, "Backend", types.SimpleNamespace(from_str=panics))
    with pytest.raises(CheckpointError, match="index out of range"):
        Tokenizer.from_folder(folder())
    tokenizer = Tokenizer(Backend(models.BPE(vocab={"a": 0}, merges=[])))
    monkeypatch.setattr(tokenizer, "backend", types.SimpleNamespace(encode=panics))
    with pytest.raises(RequestError, match="cannot encode this text"):
        tokenizer.encode("a")


def test_panic_while_loading_the_tokenizer_names_the_file(folder, monkeypatch):
    class PanicException(BaseException):
        pass

    def panics(*_, **__):
        raise PanicException("no entry found for key")

    monkeypatch.setattr(TokenBytes, "of", panics)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a usable.*no entry found"):
        Tokenizer.from_folder(folder())
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer.table, tokenizer.backend = None, types.SimpleNamespace(decode=panics)
    with pytest.raises(RequestError, match="cannot decode these tokens"):
        tokenizer.decode([1])


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"SpecialToken": {"id": "a", "type_id": 0}}


def template(single=(SEQUENCE,), pair=(SEQUENCE,), **tokens) -> dict:
    return {"type": "TemplateProcessing", "single": list(single), "pair": list(pair),
            "special_tokens": {k: {"id": k, **entry} for k, entry in tokens.items()}}  # fmt: skip


ONE = {"ids": [0], "tokens": ["a"]}


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (template([SPECIAL, SEQUENCE]), r"single\[0\]\.SpecialToken\.id has no entry"),
        (template([SPECIAL], b=ONE), r"post_processor\.single\[0\]\.SpecialToken\.id has no entry"),
        (template(pair=[SEQUENCE, SPECIAL]), r"pair\[1\]\.SpecialToken\.id has no entry"),
        (template([{"Sequence": {"id": "B", "type_id": 0}}]), r"single\[0\] must be"),
        (template(a={"ids": [0, 1], "tokens": ["a"]}), "must have as many ids as tokens"),
        (template(a={"ids": [2**32 - 1], "tokens": ["a"]}), "an id that is not from 0 to"),
        (template(a={"ids": [None], "tokens": ["a"]}), "an id that is not from 0 to"),
        ({"type": "TemplateProcessing", "single": [SPECIAL], "pair": []}, "special_tokens must be"),
        (template(["a"]), r"single\[0\] must be a special token"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wrapped", [False, True])
def test_template_with_unknown_tokens_is_rejected(folder, processor, message, wrapped):
    """The library panics only at the first text."""
    if wrapped:
        processor = {"type": "Sequence", "processors": [processor]}
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.*{message}"):
        Tokenizer.from_folder(folder({"post_processor": processor}))


def test_template_with_known_tokens_is_accepted(folder):
    path = folder({"post_processor": template([SPECIAL, SEQUENCE], a=ONE)})
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer is not None and tokenizer.encode("b") == [0, 1]


# Patterns

EXPLODING = [
    r"(a+)+b", r"(a|a)*b", r"(a|ab)*c", r"(\w*)*", r"(?:\s+)*", r"(?:ab|cd)+x", r"(a?){50}a{50}",
    r"(a?a)*b", "a**", r"((a{1,100}){1,100}){1,100}", "a{100000}", r"a+b", r"\s*\s*\s*x",
    r"\p{L}+\d", r"[^x]*xy", r"(?:ab)+c", r"(?=(\d{3})+(?!\d))", r"(a)\1", "(?<n>a)\\k<n>",
    r"\s+$", r"(?~ab)", r"(?(1)a|b)", r"(*FAIL)", r"\g<0>", "(((a", "a)", "[a", "\\", "a" * 5000,
    "(" * 100 + "a" + ")" * 100, r"(?{code})",
]  # fmt: skip


@pytest.mark.parametrize("pattern", EXPLODING, ids=range(len(EXPLODING)))
@pytest.mark.quick_cases(10)
def test_exploding_pattern_is_rejected_soon(pattern):
    begin = time.thread_time()
    with pytest.raises(PatternError):
        check_pattern(pattern)
    assert time.thread_time() - begin < 15  # two seconds on an idle machine


def test_published_pattern_of_quadratic_time_is_replaced(folder):
    """DeepSeek V2's; 100,000 spaces would take 25 seconds."""
    tokenizer = Tokenizer.from_folder(folder({"pre_tokenizer": split(r"\s+$")}))
    assert tokenizer is not None
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str
    original = pre_tokenizers.Split(Regex(r"\s+$"), "isolated").pre_tokenize_str
    for text in (" a  ", "   ", "a \n\n b \r\n", "\n", "", "a  b", "\u3000\t \nx\u00a0"):
        assert cut(text) == original(text), repr(text)
    spaces = " " * 100_000 + "a"
    begin = time.thread_time()
    assert len(cut(spaces)) == 1
    assert time.thread_time() - begin < 5  # milliseconds on an idle machine


ORDINARY = [
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r"[一-龥぀-ゟ゠-ヿ]+", r"\d{1,3}", r"[0-9][0-9][0-9]",
    r"\w+|[^\w\s]+", r"(?:\r?\n)+(?!\r?\n)", r"\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+", r"[[a-z]&&[^aeiou]]+|\s", r"(?i)abc|[]x]+", r"x{,3}|{|}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", ORDINARY)
@pytest.mark.quick_cases(4)
def test_ordinary_patterns_run(pattern):
    check_pattern(pattern)


def test_trial_does_not_start_the_garbage_collector():
    """In a large process, a collection takes longer than a text, so it looks like growth."""
    gc.collect()
    before = sum(generation["collections"] for generation in gc.get_stats())
    check_pattern(".")
    assert sum(generation["collections"] for generation in gc.get_stats()) - before < 10


class Machine:
    """A simulated machine with a clock, whose work takes longer at random times.

    Args:
      seconds: the time of a text on an idle machine.
      disturbance: "pauses" are 20 ms long, in one of twenty texts. In "slow periods", 5 of each
        10 ms, work takes ten times as long. With "cold caches", the first text after a sleep takes
        up to three times as long, and the others up to 1.3 times.
    """

    def __init__(self, seconds: Callable[[str], float], disturbance: str, seed: int):
        self.seconds, self.disturbance, self.random = seconds, disturbance, Random(seed)
        self.now = self.random.random()
        self.disturbed_s = 0.0
        self.cold = True

    def thread_time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.cold = True

    def pre_tokenize(self, text: str) -> None:
        """Pass the time of a text."""
        begin, work = self.now, self.seconds(text)
        if self.disturbance == "pauses":
            self.now += work + 0.02 * (self.random.random() < 0.05)
        elif self.disturbance == "cold caches":
            self.now += work * self.random.uniform(1, 3 if self.cold else 1.3)
        else:
            for _ in range(1000):  # equal parts of the work
                self.now += work / 1000 * (10 if self.now % 0.01 < 0.005 else 1)
        self.cold = False
        self.disturbed_s += self.now - begin - work


def linear(text: str) -> float:
    """Long runs take 1.8 times as long as short ones, the most that was measured."""
    return 1e-7 * len(text) * (1.8 if longest_run(text) > 1000 else 1)


def quadratic(text: str) -> float:
    """Growths are 6.3 and 25, the lowest that were measured."""
    return 1e-7 * len(text) * (1 + longest_run(text) / 275)


def longest_run(text: str) -> int:
    return max(map(len, re.findall("a+", text)))


@pytest.mark.parametrize("disturbance", ["pauses", "slow periods", "cold caches"])
def test_disturbances_do_not_change_the_verdict(disturbance, monkeypatch):
    monkeypatch.setattr(patterns, "PreTokenizedString", str)
    disturbed_s = 0.0
    for seed in range(200):
        for seconds in (linear, quadratic):
            machine = Machine(seconds, disturbance, seed)
            monkeypatch.setattr(patterns, "time", machine)
            trial = patterns._Trial("b")
            trial.split = machine
            with nullcontext() if seconds is linear else pytest.raises(PatternError, match="times"):
                trial.check_growth("a")
            disturbed_s += machine.disturbed_s
    assert disturbed_s > 1


@pytest.mark.soak
@pytest.mark.parametrize("pattern", sorted(patterns.KNOWN))
def test_known_patterns_would_pass_the_trial(pattern):
    patterns._Structure(pattern).check()
    patterns._try(pattern)


UNITS = ["a", " ", "\n", "ab", "a ", "é", "中", "👍", "'", "a1", "<s>", "\u0301", "0", "\t \n"]


@pytest.mark.soak
@pytest.mark.parametrize("pattern", [None, *sorted(patterns.KNOWN)])
def test_mebibyte_is_encoded_in_bounded_time_off_the_loop(folder, pattern):
    """Encodes in a thread like the server, while this thread runs."""
    component = {} if pattern is None else {"pre_tokenizer": split(pattern)}
    tokenizer = Tokenizer.from_folder(folder(component))
    assert tokenizer is not None
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for unit in UNITS:
            text = unit * (MIB // len(unit.encode()))
            begin = time.monotonic()
            future = pool.submit(tokenizer.encode, text)
            beats = 0
            while not future.done():
                time.sleep(0.001)
                beats += 1
            assert time.monotonic() - begin < 20  # one or two on an idle machine
            assert beats > 5


def test_long_text_is_encoded_in_linear_time(folder):
    tokenizer = Tokenizer.from_folder(folder())
    assert tokenizer is not None

    def seconds(size: int, count: int) -> float:
        begin = time.process_time()
        for _ in range(count):
            tokenizer.encode("ab" * size)
        return time.process_time() - begin

    whole, parts = [min(seconds(64_000 // n, n) for _ in range(3)) for n in (1, 32)]
    assert whole < 8 * parts  # quadratic time would be 32 times as long


@given(strings=st.lists(st.text("ab<|", min_size=1, max_size=6), max_size=8), text=st.text("ab<|"))
def test_longest_special_token_is_found(strings, text):
    flat = sorted(strings, key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, flat)) or r"(?!)")
    assert _alternatives(strings).findall(text) == plain.findall(text)


def test_many_special_tokens_are_not_tried_one_by_one():
    pattern = _alternatives(f"<|reserved_special_token_{i}|>" for i in range(20_000))
    begin = time.thread_time()
    assert pattern.findall("<|reserved_" * 20_000) == []
    assert time.thread_time() - begin < 5  # a hundredth of it; matching one by one takes minutes


# Code in a folder is never executed


def test_code_in_a_folder_is_not_imported(tmp_path):
    """`auto_map` and similar fields name modules in the folder, which are not even read."""
    source = FIXTURES / "stories260k-hf"
    touched = tmp_path / "touched"
    code = f"open({str(touched)!r}, 'w').close()\nclass Evil: pass\n"
    for module in ("modeling_evil", "tokenization_evil", "configuration_evil", "tokenizer"):
        (tmp_path / f"{module}.py").write_text(code)
    auto_map = {
        "auto_map": {
            "AutoConfig": "configuration_evil.Evil",
            "AutoModelForCausalLM": "modeling_evil.Evil",
            "AutoTokenizer": ["tokenization_evil.Evil", None],
        },
        "custom_pipelines": {"x": {"impl": "modeling_evil.Evil"}},
        "trust_remote_code": True,
    }
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        values = json.loads((source / name).read_text()) if (source / name).exists() else {}
        (tmp_path / name).write_text(json.dumps(values | auto_map))
    for name in ("tokenizer.json", "model.safetensors"):
        shutil.copyfile(source / name, tmp_path / name)
    read_spec(tmp_path)
    open_checkpoint(tmp_path)
    load(tmp_path)
    assert not touched.exists()
    assert not [name for name in sys.modules if "evil" in name]


def test_every_error_is_a_model_error():
    assert issubclass(CheckpointError, ModelError)
