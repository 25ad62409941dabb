"""GGUF tokenizers: the ids of the tokenizer from which the file was made."""

import json
import random
import unicodedata
from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from forge_jax.errors import CheckpointError, ModelError, UnsupportedModelError
from forge_jax.text import Tokenizer
from forge_jax.text.chat_template import ChatTemplate
from forge_jax.text.gguf import PRE_TOKENIZERS
from forge_jax.text.load import load_text

FIXTURES = Path(__file__).parent.parent / "fixtures"
STORIES_GGUF = FIXTURES / "stories260k-gguf" / "tinyllamas-stories-260k-f32.gguf"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]

CORPUS = [
    "Once upon a time there was a little girl. She didn't like 12 cats, but she'LL love 1234 dogs!",
    "user assistant system: What is it? It is <|a tag|> in the text.\n\n\n  Twice   indented\r\n",
    "naïve café — 日本語のテキスト、你好 👩‍👩‍👧‍👦 é Ünïcode МОСКВА camelCaseWord /a/b\n/x",
]


def torture(chars: str) -> list[str]:
    rng = random.Random(0)
    words = [
        *chars,
        *SPECIAL,
        " ",
        "  ",
        "\n",
        "</s>",
        "<s>",
        "<unk>",
        "<0x0A>",
        "▁",
        "e\u0301",
        "\t",
    ]
    made = ["".join(rng.choices(words, k=rng.randrange(1, 40))) for _ in range(150)]
    return [*CORPUS, "", " ", "\n\n\n\n", "a" * 300, "\u3000x\u00a0y", "١٢٣ ½ Ⅷ", *made]


TEXTS = torture("abcdehtnilorsuy.,!?'12é日👩AT")


def write(file: Path, arch="llama", *, model=None, **keys) -> Path:
    """Write a file that contains only a tokenizer; `keys` are below tokenizer.ggml."""
    writer = gguf.GGUFWriter(file, arch)
    if model is not None:
        writer.add_tokenizer_model(model)
    for key, value in keys.items():
        name = f"tokenizer.ggml.{key}" if not key.startswith("chat") else f"tokenizer.{key}"
        name = name.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def tokenizer_of(file: Path, vocab_size: int | None = None) -> Tokenizer:
    found = Tokenizer.from_folder(file, vocab_size)
    assert found is not None
    return found


def assert_equal(got: Tokenizer, expected: Tokenizer, texts=TEXTS):
    for text in texts:
        ids = expected.encode(text)
        assert got.encode(text) == ids, repr(text)
        assert got.decode(ids) == expected.decode(ids), repr(text)
    assert got.special_ids == expected.special_ids
    assert got.vocab_size == expected.vocab_size


# ---- SentencePiece -------------------------------------------------------------------------------


def test_trained_models_gguf_tokenizer_is_identical():
    got = tokenizer_of(STORIES_GGUF, 512)
    expected = tokenizer_of(FIXTURES / "stories260k-hf", 512)
    assert_equal(got, expected)
    assert got.bos_token == "<s>" and got.eos_token == "</s>"
    guarded = {"X": "</s> and <s>"}
    assert got.encode_template("<s>X</s>", guarded) == expected.encode_template("<s>X</s>", guarded)


def spm_pieces() -> tuple[list[str], list[list[str]]]:
    """Return the pieces after the bytes, in the order of training, and the merges."""
    data = json.loads((FIXTURES / "stories260k-hf" / "tokenizer.json").read_text())["model"]
    vocab = data["vocab"]
    return sorted(vocab, key=vocab.__getitem__)[259:], data["merges"]


def test_gemma_splits_runs_of_spaces_with_placeholder_scores(tmp_path):
    """There is no prefix; runs of spaces come first, spelled as spaces, with a score of -1000."""
    pieces, merges = spm_pieces()
    head = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "\n\n", "▁▁", "▁▁▁"]
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    tokens = [*head, *byte_tokens, *pieces]
    types = [CONTROL] * 3 + [UNKNOWN, CONTROL] + [USER_DEFINED] * 3 + [BYTE] * 256
    types += [NORMAL] * len(pieces)
    runs = [("▁", "▁"), ("▁", "▁▁"), ("▁▁", "▁")]
    original = Backend(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [*runs, *map(tuple, merges)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    original.normalizer = normalizers.Replace(" ", "▁")
    original.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    original.add_special_tokens([AddedToken(t, normalized=False) for t in head[:5]])
    original.add_tokens([AddedToken("\n\n", normalized=False)])
    file = write(
        tmp_path / "m.gguf",
        "gemma2",
        model="llama",
        tokens=[token.replace("▁", " ") if token in head else token for token in tokens],
        scores=[-1000.0] * 8 + [0.0] * 256 + [-float(i) for i in range(len(pieces))],
        token_type=types,
        **{"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0},
        **{"add_bos_token": True, "add_space_prefix": False},
    )
    got = tokenizer_of(file, len(tokens))
    expected = Tokenizer(original, {"bos_token": "<bos>"}, add_bos_token=True)
    assert_equal(got, expected, [*TEXTS, "a  b   c    d\n\n\n  e", "<start_of_turn>  user\n\nx"])


def test_gemma_4_lists_its_merges(tmp_path):
    """Its pieces are those of SentencePiece, without scores. There is no prefix."""
    pieces, merges = spm_pieces()
    head = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<|tool_call>"]
    tokens = [*head, *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    types = [CONTROL] * 3 + [UNKNOWN, CONTROL, USER_DEFINED] + [BYTE] * 256
    types += [NORMAL] * len(pieces)
    original = Backend(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [*map(tuple, reversed(merges))],  # an order that no score gives
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    original.normalizer = normalizers.Replace(" ", "▁")
    original.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    original.add_special_tokens([AddedToken(t, normalized=False) for t in head[:5]])
    original.add_tokens([AddedToken(head[5], normalized=False)])
    file = write(
        tmp_path / "m.gguf",
        "gemma4",
        model="gemma4",
        tokens=tokens,
        scores=[-1000.0] * len(tokens),
        token_type=types,
        merges=[" ".join(pair) for pair in reversed(merges)],
        **{"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0},
        add_bos_token=True,
    )
    expected = Tokenizer(original, {"bos_token": "<bos>"}, add_bos_token=True)
    texts = [*TEXTS, "a  b   c\n\n\n  e", "<|turn>user\n<|tool_call>  x"]
    assert_equal(tokenizer_of(file, len(tokens)), expected, texts)


def spm(file, arch="llama", extra=(), **keys):
    pieces, _ = spm_pieces()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    tokens += [token for token, _ in extra]
    count = len(pieces)
    return write(
        file,
        arch,
        model="llama",
        tokens=tokens,
        scores=[0.0] * 259 + [-float(i) for i in range(count)] + [-1000.0] * len(extra),
        token_type=[2, 3, 3] + [6] * 256 + [1] * count + [kind for _, kind in extra],
        **keys,
    )


def test_phi_strips_spaces_after_its_own_tokens(tmp_path):
    extra = [("<|endoftext|>", CONTROL), ("<|user|>", CONTROL), ("<pad0>", UNUSED)]
    keys = {"add_bos_token": False}
    got = tokenizer_of(spm(tmp_path / "m.gguf", "phi3", extra, **keys))
    plain = tokenizer_of(spm(tmp_path / "n.gguf", "llama", extra, **keys))
    assert got.vocab_size == 514  # padding to the model's width adds no tokens
    assert got.encode("<|user|> \n on")[0] == 513
    assert (
        got.encode("<|user|> \n on") == got.encode("<|user|>on") != plain.encode("<|user|> \n on")
    )
    assert got.encode("<|endoftext|> on") == plain.encode("<|endoftext|> on")


def test_bos_and_eos_are_added_as_the_file_states(tmp_path):
    text = tokenizer_of(spm(tmp_path / "0.gguf", add_bos_token=False)).encode("hello")
    assert tokenizer_of(spm(tmp_path / "1.gguf")).encode("hello") == [1, *text]
    both = spm(tmp_path / "2.gguf", add_bos_token=True, add_eos_token=True, eos_token_id=2)
    assert tokenizer_of(both).encode("hello") == [1, *text, 2]


# ---- byte-level BPE ------------------------------------------------------------------------------

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_V2 = (
    "[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "ὙὛὝ\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_V2[-1])
KIMI = (
    r"[\p{Han}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def split(*patterns, then=()):
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            *then,
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
ORIGINALS = {  # from the `tokenizer.json` of a model of that kind
    "llama-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
    "qwen35": split(QWEN35),
    "tekken": split(TEKKEN),
    "gpt-4o": split(O200K),
    "deepseek-v3": split(*DEEPSEEK),
    "deepseek-llm": split(*DEEPSEEK_V2, then=[DIGITS]),
    "deepseek-coder": split(*DEEPSEEK_CODER, then=[DIGITS]),
    "kimi-k2": split(KIMI),
    "seed-coder": split(SEED),
    "stablelm2": split(QWEN2),
    "command-r": pre_tokenizers.Sequence([DIGITS, BYTE_LEVEL]),
    "exaone4": BYTE_LEVEL,
    "glm4": split(LLAMA3),
    "gpt-2": BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([DIGITS, BYTE_LEVEL]),
}


def trained(pre: str) -> Backend:
    """Return a byte-level BPE like that of such a model, with special tokens at the end."""
    backend = Backend(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    backend.pre_tokenizer = ORIGINALS[pre]
    normalized = pre in ("qwen2", "qwen35", "stablelm2", "command-r")
    backend.normalizer = normalizers.NFC() if normalized else None
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def write_bpe(file: Path, backend: Backend, kind: str, **keys) -> Path:
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [NORMAL] * len(tokens)
    for i, token in added.items():
        types[i] = CONTROL if token.special else USER_DEFINED
    merges = json.loads(backend.to_str())["model"]["merges"]
    defaults = {
        "model": "gpt2",
        "pre": kind,
        "tokens": [*tokens, "[PAD0]", "[PAD1]"],
        "token_type": [*types, UNUSED, UNUSED],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": vocab["<|bos|>"],
        "eos_token_id": vocab["<|im_end|>"],
    }
    return write(file, "qwen2", **{**defaults, **keys})


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_gguf_tokenizer_is_identical(pre, tmp_path):
    backend = trained(pre)
    file = write_bpe(tmp_path / "m.gguf", backend, pre)
    got = tokenizer_of(file, backend.get_vocab_size() + 2)
    names = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    # Llama 3's and Mistral's put BOS first if the file has no setting.
    adds = pre in ("llama-bpe", "tekken")
    assert_equal(got, Tokenizer(backend, names, add_bos_token=adds))
    cut, original = got.backend.pre_tokenizer, ORIGINALS[pre]
    for text in TEXTS:  # includes texts on which the few merges above make no difference
        assert cut.pre_tokenize_str(text) == original.pre_tokenize_str(text), repr(text)


def test_pre_tokenizers_differ_on_the_test_texts():
    cuts = {pre: [str(p.pre_tokenize_str(text)) for text in TEXTS] for pre, p in ORIGINALS.items()}
    same = {"glm4": "llama-bpe", "stablelm2": "qwen2", "command-r": "smollm", "exaone4": "gpt-2"}
    for pre, other in same.items():
        assert cuts.pop(pre) == cuts[other]
    assert len({json.dumps(cut) for cut in cuts.values()}) == len(cuts)
    assert set(ORIGINALS) <= set(PRE_TOKENIZERS)


@pytest.mark.parametrize("pre", ["deepseek-llm", "kimi-k2"])
def test_pre_tokenizer_cuts_every_character_as_the_original(pre, tmp_path):
    got = tokenizer_of(write_bpe(tmp_path / "m.gguf", trained(pre), pre)).backend.pre_tokenizer
    chars = [chr(i) for i in range(0x20000) if not 0xD800 <= i < 0xE000]
    for between in ("", "1"):
        for at in range(0, len(chars), 512):
            text = between.join(chars[at : at + 512])
            assert got.pre_tokenize_str(text) == ORIGINALS[pre].pre_tokenize_str(text), (pre, at)


def test_letters_of_deepseek_have_case():
    """Normalization of its pattern would move the ends of ranges."""
    pattern = Regex(PRE_TOKENIZERS["deepseek-llm"]["pretokenizers"][1]["pattern"]["Regex"])
    cut = pre_tokenizers.Split(pattern, "removed")
    chars = [chr(i) for i in range(0x20000) if unicodedata.category(chr(i)) not in ("Cs", "Cn")]
    letters = [char for char in chars if not cut.pre_tokenize_str(char)]
    assert {unicodedata.category(char) for char in letters} == {"Lu", "Ll", "Lt"}
    assert len(letters) > 1800


def test_special_tokens_may_come_first(tmp_path):
    folder = FIXTURES.parent.parent / "forge_jax" / "checkpoint" / "bundled" / "forge-tiny"
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    special = {token["id"] for token in data["added_tokens"]}
    file = write(
        tmp_path / "m.gguf",
        model="gpt2",
        pre="smollm",
        tokens=sorted(vocab, key=vocab.__getitem__),
        token_type=[CONTROL if i in special else NORMAL for i in range(len(vocab))],
        merges=[" ".join(pair) for pair in data["model"]["merges"]],
        **{"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True},
    )
    assert_equal(tokenizer_of(file, len(vocab)), tokenizer_of(folder, len(vocab)))


# ---- chat templates ------------------------------------------------------------------------------


def test_chat_templates_come_with_the_file(tmp_path):
    templates = {
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "chat_template__tool_use": "tools",
    }
    file = write_bpe(tmp_path / "m.gguf", trained("gpt-2"), "gpt-2", **templates)
    tokenizer, template = load_text(file, None, 1000)
    assert tokenizer is not None and template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<|bos|>hi"
    assert set(template.sources) == {"default", "tool_use"}
    assert not ChatTemplate.from_folder(STORIES_GGUF, tokenizer).available


def test_file_without_a_tokenizer_has_none(tmp_path):
    assert load_text(write(tmp_path / "m.gguf"), None, 5) == (None, None)


# ---- rejections ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "error", "match"),
    [
        ({"pre": "viking"}, UnsupportedModelError, "tokenizer.ggml.pre 'viking' is not supported"),
        ({"model": "t5"}, UnsupportedModelError, "tokenizer.ggml.model 't5' is not supported"),
        ({"tokens": ["a", "b"]}, CheckpointError, "token_type must be an array of 2 numbers"),
        ({"merges": ["a"]}, CheckpointError, "merges must contain two tokens with a space"),
        ({"merges": ["a nosuch"]}, CheckpointError, "merges must combine two tokens into a third"),
        ({"eos_token_id": 5000}, CheckpointError, "eos_token_id must be a token ID below"),
        ({"eos_token_id": "x"}, CheckpointError, "eos_token_id must be an integer"),
        ({"add_bos_token": 7}, CheckpointError, "add_bos_token must be true or false"),
        ({"chat_template": 7}, ModelError, "tokenizer.chat_template must be a string"),
        ({"chat_template": "{% if %}"}, CheckpointError, "is not valid Jinja"),
    ],
)
def test_broken_tokenizer_is_rejected_by_key(keys, error, match, tmp_path):
    file = write_bpe(tmp_path / "m.gguf", trained("gpt-2"), "gpt-2", **keys)
    with pytest.raises(error, match=match) as raised:
        load_text(file, None, 1000)
    assert str(file) in str(raised.value) or "Jinja" in match


def test_vocabulary_beyond_the_models_width_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="from 0 to 99"):
        tokenizer_of(write_bpe(tmp_path / "m.gguf", trained("gpt-2"), "gpt-2"), 100)


@pytest.mark.parametrize(
    ("tokens", "scores", "match"),
    [
        (["<unk>", "a", "a"], [0.0] * 3, "has a token twice: 'a'"),
        (["<unk>", "a", "b"], [0.0] * 2, "scores must be an array of 3 numbers"),
        (["<unk>", "a", "b"], [0.0, 0.0, float("nan")], "scores must be finite"),
        (["<unk>", "a", "b" * 300], [0.0] * 3, "or a token of more than 256"),
    ],
)
def test_broken_pieces_are_rejected(tokens, scores, match, tmp_path):
    keys = {"tokens": tokens, "scores": scores, "add_bos_token": False}
    with pytest.raises(CheckpointError, match=match):
        tokenizer_of(write(tmp_path / "m.gguf", model="llama", **keys))


def test_chat_starts_with_the_files_bos_if_the_template_has_none(tmp_path):
    """BOS occurs exactly once, with or without BOS in the template, as in llama.cpp."""
    adds = tokenizer_of(spm(tmp_path / "a.gguf", add_bos_token=True))
    plain = tokenizer_of(spm(tmp_path / "b.gguf", add_bos_token=False))
    assert adds.encode_template("hello")[0] == adds.bos_token_id
    assert adds.encode_template("hello")[1:] == plain.encode_template("hello")
    assert adds.encode_template("<s>hello").count(1) == 1
    assert plain.bos_token_id not in plain.encode_template("hello")
    hidden = {"\ue000": "</s>"}
    assert adds.encode_template("hello \ue000", hidden)[0] == adds.bos_token_id


def test_special_tokens_are_added_to_a_template_on_request(tmp_path):
    keys = {"add_bos_token": True, "add_eos_token": True, "eos_token_id": 2}
    tokenizer = tokenizer_of(spm(tmp_path / "a.gguf", **keys))
    ids = tokenizer.encode_template("hello", add_special_tokens=True)
    assert (ids[0], ids[-1]) == (1, 2) and ids.count(1) == ids.count(2) == 1
    ids = tokenizer.encode_template("<s>hello", add_special_tokens=True)
    assert ids[:2] == [1, 1], "the template's and the tokenizer's, as in vLLM"
