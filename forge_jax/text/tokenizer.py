"""The tokenizer of a model folder: text to ids and back, on top of the `tokenizers` library.

It knows nothing of chats or of streaming. What it adds to the library: the special tokens that
`tokenizer_config.json` names, the bytes of each token, and an encoding in which chosen parts of the
text cannot turn into special tokens.
"""

from __future__ import annotations

import copy
import itertools
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from forge_jax.checkpoint.gguf import is_gguf
from forge_jax.errors import CheckpointError, ContextLengthError, RequestError
from forge_jax.host.files import read_json, short_repr
from forge_jax.host.panics import panics_as
from forge_jax.text.gguf import load_gguf_tokenizer
from forge_jax.text.token_bytes import ByteStream, TokenBytes
from forge_jax.text.tokenizer_file import MAX_TOKEN_CHARS, add_configured, load_backend

_NOTHING: frozenset[int] = frozenset()
_UNKNOWN_CHAR = "\U0010fff0"  # private use: in no vocabulary

# What models have in place of tokenizer.json: SentencePiece, tiktoken, GPT-2's and BERT's files.
OTHER_FORMS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)

LONG_TEXT = 4096  # characters: about a millisecond of encoding


class Tokenizer:
    """A `tokenizers.Tokenizer` with the special tokens of its model.

    backend         the library's tokenizer; truncation and padding are turned off
    special_tokens  the tokens that the model's configuration names: `{"bos_token": "<s>", ...}`
    more_special    further special tokens, without a name
    add_bos_token   `encode` must put the BOS token first, whether or not the backend does
    bos_in_chats    a rendered chat template that does not begin with the BOS token gets one, as
                    llama.cpp does where a GGUF file says that BOS comes first
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str] | None = None,
        *,
        more_special: Iterable[str] = (),
        add_bos_token: bool = False,
        bos_in_chats: bool = False,
    ):
        # Limits saved with a tokenizer come from training. They would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        self._register_special_tokens([*self.special_tokens.values(), *more_special])
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.table = TokenBytes.of(backend)  # None: the decoder does not work token by token
        self._added_text = {i: token.content for i, token in added.items()}
        self._prepends_bos = (
            add_bos_token
            and self.bos_token_id is not None
            and backend.encode("a").ids[:1] != [self.bos_token_id]
        )
        self._bos_in_chats = bos_in_chats and self.encode("a")[:1] == [self.bos_token_id]

    @classmethod
    def from_folder(cls, path: str | Path, vocab_size: int | None = None) -> Tokenizer | None:
        """The tokenizer of a model folder, or None if the folder has none.

        Of a GGUF file, the one that its metadata describe.

        Raises `CheckpointError`, naming file and field, if one of the tokenizer's files is broken,
        or has an id beyond the model's width, `vocab_size`, or is not `tokenizer.json`.
        """
        folder = Path(path)
        file = folder if is_gguf(folder) else folder / "tokenizer.json"

        def unusable(panic: str) -> CheckpointError:
            return CheckpointError(f"{file} is not a usable tokenizer: {panic}")

        with panics_as(unusable):
            return cls._of_folder(folder, vocab_size)

    @classmethod
    def _of_folder(cls, folder: Path, vocab_size: int | None) -> Tokenizer | None:
        if is_gguf(folder):
            found = load_gguf_tokenizer(folder, vocab_size)
            return None if found is None else cls(*found, bos_in_chats=True)
        try:
            backend = load_backend(folder / "tokenizer.json", vocab_size)
        except FileNotFoundError:
            _refuse_other_forms(folder)
            return None
        config_file, map_file = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
        config, mapped = read_json_object(config_file), read_json_object(map_file)
        add_configured(backend, config.get("added_tokens_decoder"), config_file)
        # A false add_bos_token is not acted on: checkpoints carry it next to a post-processor that
        # adds BOS, and the post-processor is what the model was trained with.
        return cls(
            backend,
            _named_tokens(mapped, map_file) | _named_tokens(config, config_file),
            more_special=[
                *_unnamed_tokens(mapped, map_file),
                *_unnamed_tokens(config, config_file),
            ],
            add_bos_token=config.get("add_bos_token") is True,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; special tokens written in it are recognised.

        Raises `RequestError` for text that is not Unicode (a lone surrogate).
        """
        ids = _encode(self.backend, text, add_special_tokens)
        if add_special_tokens and self._prepends_bos:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_template(
        self,
        text: str,
        plain_text: Mapping[str, str] | None = None,
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The ids of a rendered chat template, which writes its own special tokens.

        With `add_special_tokens` those that `encode` puts around a text come on top of these.

        Where `plain_text` is given, its keys are placeholders in `text` that stand for its values,
        and no special token is recognised except those that `text` spells out before the
        placeholders are replaced.
        """
        if plain_text is None:
            ids = _encode(self.backend, text, add_special_tokens=False)
        else:
            ids = self._guarded.encode(text, plain_text)
        if self._bos_in_chats and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids = [self.bos_token_id, *ids]
            if add_special_tokens:  # BOS is one of them
                return [*ids, *self._around[1]]
        if add_special_tokens:
            before, after = self._around
            return [*before, *ids, *after]
        return ids

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """What `encode` puts before and behind a text."""
        plain, whole = self.encode("a", False), self.encode("a")
        begin = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:begin], whole[begin + len(plain) :]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids; U+FFFD where their bytes are not UTF-8; unknown ids are skipped.

        It differs from the library in one case: after an invalid byte the byte-fallback decoder
        there turns the valid characters around it into U+FFFD as well. A stream cannot take back
        what it sent, so here they stay.
        """
        if self.table is None:
            with panics_as(_cannot_decode):
                return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        hidden = self.special_ids if skip_special_tokens else _NOTHING
        return ByteStream(self.table, hidden).push(ids).decode("utf-8", "replace")

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """Bytes of the longest token; None if tokens have no bytes of their own."""
        if self.table is None:
            return None
        return max((len(piece) for piece in self.table.pieces if piece), default=None)

    def check_fits(self, texts: Iterable[str], context: int, param: str) -> None:
        """Refuse texts that exceed the context even in the longest tokens, without encoding them.

        Args:
          context: in tokens.
          param: the field of the texts.

        Raises:
          ContextLengthError: the texts are too long.
        """
        longest = self.longest_token_bytes
        if longest is None:
            return
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > context * longest:
            raise ContextLengthError(
                f"{param}: {size} bytes of text have more tokens than the {context} that the "
                "context has room for",
                param=param,
            )

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, in bytes; empty for an id outside the vocabulary."""
        if self.table is not None:
            return self.table[token_id]
        if token_id < 0 or self.backend.id_to_token(token_id) is None:
            return b""
        with panics_as(_cannot_decode):
            return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """The token as a printable string: U+FFFD for a part of a character."""
        added = self._added_text.get(token_id)
        return self.token_bytes(token_id).decode("utf-8", "replace") if added is None else added

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds special tokens in a text, leftmost and longest first, as the library does."""
        return _alternatives(self._added_text[i] for i in self.special_ids)

    def spells_special_token(self, text: str) -> bool:
        """Whether encoding the text could give a special id, be it after normalisation."""
        if self.special_pattern.search(text):
            return True
        if self._normalized_pattern is None or self.backend.normalizer is None:
            return False
        with panics_as(_cannot_encode):
            normalized = self.backend.normalizer.normalize_str(text)
        return bool(self._normalized_pattern.search(normalized))

    @cached_property
    def _normalized_pattern(self) -> re.Pattern[str] | None:
        added = self.backend.get_added_tokens_decoder()
        contents = [added[i].content for i in self.special_ids if added[i].normalized]
        return _alternatives(contents) if contents else None

    @cached_property
    def _guarded(self) -> _GuardedEncoder:
        return _GuardedEncoder(self.backend, self.special_ids, self.special_pattern)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def _register_special_tokens(self, tokens: Iterable[str]) -> None:
        """A token that the configuration calls special is special, whatever tokenizer.json says."""
        special = {t.content for t in self.backend.get_added_tokens_decoder().values() if t.special}
        for token in tokens:
            # Unknown ones are left out: a new id would lie outside the model's embedding.
            if token not in special and self._id_of(token) is not None:
                self.backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])


class _GuardedEncoder:
    """Encodes text in which only chosen occurrences of special tokens count as such.

    It is a copy of the tokenizer that takes every special token for plain text, with one further
    token per special token under a name that nobody outside this process knows. The chosen
    occurrences are spelled by that name, and its id is translated back. So the text is encoded in
    one piece, and each boundary is treated as the ordinary tokenizer would treat it.
    """

    def __init__(self, backend: Backend, special_ids: frozenset[int], pattern: re.Pattern[str]):
        self._backend: Backend = copy.deepcopy(backend)
        self._backend.encode_special_tokens = True
        self._pattern = pattern
        self._name_of: dict[str, str] = {}
        self._id_of_name: dict[int, int | None] = {}
        secret = secrets.token_hex(16)
        added = backend.get_added_tokens_decoder()
        for i in special_ids:
            token = added[i]
            name = f"\U0010fffd{secret}:{i}\U0010fffd"
            self._add_name(name, i, token.lstrip, token.rstrip, token.single_word)
            self._name_of[token.content] = name
        self._separator = f"\U0010fffd{secret}:\U0010fffd"
        self._add_name(self._separator, None)
        # Unknown characters may have a special id of their own: it is no control token.
        self._forbidden = special_ids - set(self._ids(_UNKNOWN_CHAR))
        # A vocabulary may hold a special token as an ordinary piece too (Unigram models do).
        self._indivisible = {
            token for token in self._name_of if self._forbidden & set(self._ids(token))
        }

    def encode(self, text: str, plain_text: Mapping[str, str]) -> list[int]:
        text = self._pattern.sub(lambda match: self._name_of[match[0]], text)
        for placeholder, plain in plain_text.items():
            text = text.replace(placeholder, self._broken_up(plain))
        ids = self._ids(text)
        if not self._forbidden.isdisjoint(ids):
            raise RequestError(
                "the text of a message spells a special token that this tokenizer cannot encode "
                "as text; remove it from the message",
                param="messages",
            )
        translated = (self._id_of_name.get(i, i) for i in ids)
        return [i for i in translated if i is not None]

    def _add_name(
        self,
        name: str,
        token_id: int | None,
        lstrip: bool = False,
        rstrip: bool = False,
        single_word: bool = False,
    ) -> None:
        self._backend.add_tokens(
            [
                AddedToken(
                    name,
                    lstrip=lstrip,
                    rstrip=rstrip,
                    single_word=single_word,
                    normalized=False,
                    special=False,
                )
            ]
        )
        name_id = self._backend.token_to_id(name)
        assert name_id is not None
        self._id_of_name[name_id] = token_id

    def _broken_up(self, plain: str) -> str:
        if plain not in self._indivisible:
            return plain
        return plain[:1] + self._separator + plain[1:]

    def _ids(self, text: str) -> list[int]:
        return _encode(self._backend, text, add_special_tokens=False)


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file.

    Raises `CheckpointError` if the file cannot be read or holds anything else.
    """
    try:
        return read_json(file)
    except FileNotFoundError:
        return {}


def _refuse_other_forms(folder: Path) -> None:
    """A model whose tokenizer is in a form that is not read is not one without a tokenizer."""
    for name in OTHER_FORMS:
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder} has {name} but no tokenizer.json, which is the one form of a tokenizer "
                "that is read. Convert it once, in an environment with transformers, sentencepiece "
                'and protobuf: python -c "from transformers import AutoTokenizer as A; '
                "A.from_pretrained('FOLDER').save_pretrained('FOLDER')\""
            )


def _named_tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """`{"eos_token": "</s>", ...}`; a token may be written as a string or with its flags."""
    found = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        found |= extra
    named = {}
    for key, value in found.items():
        content = value.get("content") if isinstance(value, dict) else value
        if content is None or isinstance(content, bool):
            continue  # add_bos_token and its like are flags
        named[key] = _content(content, key, file)
    return named


def _unnamed_tokens(config: Mapping[str, Any], file: Path) -> list[str]:
    tokens = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key)
        if isinstance(listed, list):
            contents = (t.get("content") if isinstance(t, dict) else t for t in listed)
            tokens += [_content(content, key, file) for content in contents]
    return tokens


def _content(content: Any, key: str, file: Path) -> str:
    if isinstance(content, str) and len(content) <= MAX_TOKEN_CHARS:
        return content
    raise CheckpointError(
        f"{file}: {short_repr(key)} must be a text of at most {MAX_TOKEN_CHARS} characters, "
        f"not {short_repr(content)}"
    )


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    try:
        # A panic: Oniguruma's limit of steps, of a pattern that backtracks on this very text.
        with panics_as(_cannot_encode):
            if len(text) > LONG_TEXT:  # a batch of one lets other threads run meanwhile
                return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
    except (TypeError, UnicodeEncodeError) as error:
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestError("text must be valid Unicode: it has a lone surrogate") from error
        raise


def _cannot_encode(panic: str) -> RequestError:
    return RequestError("the model's tokenizer cannot encode this text")


def _cannot_decode(panic: str) -> RequestError:
    return RequestError("the model's tokenizer cannot decode these tokens")


def _alternatives(strings: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of the strings; strings that begin alike are read together.

    A flat list of alternatives would be tried one by one at each character of a text.
    """
    return re.compile(_tree(sorted({s for s in strings if s})) or r"(?!)")


def _tree(strings: list[str]) -> str:
    """`abc`, `abd`, `ab` as `ab(?:[c]...|d)?`: sorted, so what begins alike stands together."""
    branches = []
    for _, group in itertools.groupby(strings, key=lambda string: string[:1]):
        alike = list(group)
        first, last = alike[0], alike[-1]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
        common = first[: sum(1 for _ in same)]
        rest = [string[len(common) :] for string in alike]
        inner = _tree([string for string in rest if string])
        optional = "?" if "" in rest and inner else ""
        branches.append(re.escape(common) + (f"(?:{inner}){optional}" if inner else ""))
    return "|".join(branches)
