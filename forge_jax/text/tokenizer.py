"""The tokenizer of a model folder, based on the `tokenizers` library.

It extends the library with the special tokens of `tokenizer_config.json` and the bytes of each
token. An additional encoding keeps chosen parts of a text from becoming special tokens.
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
_UNKNOWN_CHAR = "\U0010fff0"  # private use, so in no vocabulary

# Tokenizer files other than tokenizer.json, from SentencePiece, tiktoken, GPT-2 and BERT.
OTHER_FORMS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)

LONG_TEXT = 4096  # characters, which take about 1 ms to encode


class Tokenizer:
    """A `tokenizers.Tokenizer` with the special tokens of its model.

    Args:
      backend: the library's tokenizer; truncation and padding are turned off.
      special_tokens: the tokens that the model's configuration names: `{"bos_token": "<s>", ...}`.
      more_special: special tokens without a name.
      add_bos_token: makes `encode` put the BOS token first even if the backend does not.
      bos_in_chats: prepends the BOS token to rendered chat templates that lack it, if `encode`
        prepends it. llama.cpp does the same for GGUF files.
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
        # Limits saved with a tokenizer come from training. They would truncate prompts silently.
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
        """Return the tokenizer of a model folder or GGUF file, or None if it has none.

        Args:
          vocab_size: the model's output width, which ids must not exceed.

        Raises:
          CheckpointError: a tokenizer file is invalid, an id is too large, or the tokenizer has a
            format other than `tokenizer.json`. The message names the file and the field.
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
        # A false add_bos_token is ignored. Some checkpoints have it next to a post-processor that
        # adds BOS, and the model was trained with the post-processor.
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
        """Return the ids of a text, in which special tokens are recognized.

        Raises:
          RequestError: the text is not valid Unicode because it has a lone surrogate.
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
        """Return the ids of a rendered chat template, which contains its own special tokens.

        Args:
          text: the rendered template.
          plain_text: placeholders in `text` and the strings that replace them. Special tokens are
            recognized only in `text` before the replacement.
          add_special_tokens: also adds the special tokens that `encode` puts around a text.
        """
        if plain_text is None:
            ids = _encode(self.backend, text, add_special_tokens=False)
        else:
            ids = self._guarded.encode(text, plain_text)
        if self._bos_in_chats and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids = [self.bos_token_id, *ids]
            if add_special_tokens:  # `_around[0]` would add BOS again
                return [*ids, *self._around[1]]
        if add_special_tokens:
            before, after = self._around
            return [*before, *ids, *after]
        return ids

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that `encode` adds before and after a text."""
        plain, whole = self.encode("a", False), self.encode("a")
        begin = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:begin], whole[begin + len(plain) :]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids, with U+FFFD for invalid UTF-8 and without unknown ids.

        The library's byte-fallback decoder also replaces valid characters around an invalid byte.
        This method keeps them, because a stream cannot take back text that was sent.
        """
        if self.table is None:
            with panics_as(_cannot_decode):
                return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        hidden = self.special_ids if skip_special_tokens else _NOTHING
        return ByteStream(self.table, hidden).push(ids).decode("utf-8", "replace")

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """The number of bytes of the longest token; None if tokens have no bytes."""
        if self.table is None:
            return None
        return max((len(piece) for piece in self.table.pieces if piece), default=None)

    def check_fits(self, texts: Iterable[str], context: int, param: str) -> None:
        """Reject texts that exceed the context even if all tokens are long, without encoding.

        Args:
          context: the context length in tokens.
          param: the request's field that has the texts.

        Raises:
          ContextLengthError: the texts are too long.
        """
        longest = self.longest_token_bytes
        if longest is None:
            return
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > context * longest:
            raise ContextLengthError(
                f"{param}: {size} bytes of text exceed the context length of {context} tokens",
                param=param,
            )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; empty for an unknown id."""
        if self.table is not None:
            return self.table[token_id]
        if token_id < 0 or self.backend.id_to_token(token_id) is None:
            return b""
        with panics_as(_cannot_decode):
            return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return the token as a string, with U+FFFD for a part of a character."""
        added = self._added_text.get(token_id)
        return self.token_bytes(token_id).decode("utf-8", "replace") if added is None else added

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """A pattern for special tokens that matches leftmost and longest, as the library does."""
        return _alternatives(self._added_text[i] for i in self.special_ids)

    def spells_special_token(self, text: str) -> bool:
        """Return True if the text, or its normalized form, contains a special token."""
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
        """Make the configuration's special tokens special, even if tokenizer.json does not."""
        special = {t.content for t in self.backend.get_added_tokens_decoder().values() if t.special}
        for token in tokens:
            # Unknown tokens are skipped, because a new id would be outside the model's embedding.
            if token not in special and self._id_of(token) is not None:
                self.backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])


class _GuardedEncoder:
    """An encoder that recognizes only chosen occurrences of special tokens.

    This copy of the tokenizer encodes every special token as plain text. It has one extra token per
    special token, under a random secret name. Chosen occurrences are replaced by that name, and its
    id is translated back. The text is encoded in one piece, so token boundaries are treated as in
    the ordinary tokenizer.
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
        # The id of unknown characters may be special, but it is not a control token.
        self._forbidden = special_ids - set(self._ids(_UNKNOWN_CHAR))
        # A vocabulary may also hold a special token as an ordinary piece, as Unigram models do.
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
                "a message contains a special token that this tokenizer cannot encode as plain "
                "text; remove it from the message",
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
    """Return the object in a JSON file, or an empty one if the file does not exist.

    Raises:
      CheckpointError: the file cannot be read, or contains something else.
    """
    try:
        return read_json(file)
    except FileNotFoundError:
        return {}


def _refuse_other_forms(folder: Path) -> None:
    """Raise CheckpointError if the folder has a tokenizer of an unsupported format."""
    for name in OTHER_FORMS:
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder} has {name} but no tokenizer.json, the only supported tokenizer format. "
                "Convert it in an environment with transformers, sentencepiece and protobuf: "
                'python -c "from transformers import AutoTokenizer as A; '
                "A.from_pretrained('FOLDER').save_pretrained('FOLDER')\""
            )


def _named_tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Return named tokens: `{"eos_token": "</s>", ...}`.

    A token may be a string or an object with flags.
    """
    found = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        found |= extra
    named = {}
    for key, value in found.items():
        content = value.get("content") if isinstance(value, dict) else value
        if content is None or isinstance(content, bool):
            continue  # keys such as add_bos_token are flags
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
        f"{file}: {short_repr(key)} must be a string of at most {MAX_TOKEN_CHARS} characters, "
        f"not {short_repr(content)}"
    )


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    try:
        # The library panics if a pattern exceeds Oniguruma's step limit on this text.
        with panics_as(_cannot_encode):
            if len(text) > LONG_TEXT:  # encoding a batch of one releases the GIL
                return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
    except (TypeError, UnicodeEncodeError) as error:
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestError("text must be valid Unicode, but it has a lone surrogate") from error
        raise


def _cannot_encode(panic: str) -> RequestError:
    return RequestError("the model's tokenizer cannot encode this text")


def _cannot_decode(panic: str) -> RequestError:
    return RequestError("the model's tokenizer cannot decode these tokens")


def _alternatives(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of the strings, factored by common prefixes.

    A flat list of alternatives would be tried one by one at each character of a text.
    """
    return re.compile(_tree(sorted({s for s in strings if s})) or r"(?!)")


def _tree(strings: list[str]) -> str:
    """Return the pattern of sorted strings by prefix: `ab(?:c|d)?` for `ab`, `abc`, `abd`."""
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
