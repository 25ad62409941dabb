"""Checks of `tokenizer.json` before the library reads it: ids, merges, patterns and sizes.

The library accepts an id of four billion, a token of a million characters, or a pattern that
backtracks. A replacement may even make a text ten thousand times longer. Each of these would fail
later, in a table or on a request.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from forge_jax.errors import CheckpointError
from forge_jax.host.files import depth_exceeds, read_text, short_repr
from forge_jax.host.panics import is_panic
from forge_jax.text.patterns import LINEAR, PatternError, check_pattern

MAX_TOKEN_ID = 2**22
MAX_TOKEN_CHARS = 4096
MAX_PIECE_CHARS = 256  # limits Unigram pieces, because each is tried at each character
MAX_ADDED_TOKENS = 65_536
MAX_NESTED_TOKENS = 64  # special tokens that are prefixes of each other
MAX_COMPONENTS = 256  # normalizers, pre-tokenizers, decoders and their parts
MAX_COMPONENT_DEPTH = 32
MAX_COMPONENT_TEXT = 8192
MAX_CHARSMAP = 4 * 2**20  # The only long text in a component is SentencePiece's normalization.
MAX_GROWTH = 64  # All replacements together may make a text this many times longer.
MAX_DECODER_GROWTH = 4  # The same limit for tokens, which are all decoded at startup.
MAX_WORD_CHARS = 200  # WordPiece takes quadratic time in it.

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TEMPLATES = {"single": ("A",), "pair": ("A", "B")}  # templates with their sequences
COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def load_backend(file: Path, vocab_size: int | None = None) -> Backend:
    """Return the library's tokenizer for a file, after checking the file.

    Args:
      vocab_size: the model's output width, which ids of the vocabulary must not exceed. Ids of
        added tokens may, because some published models have more tokens than rows. Requests that
        use such tokens are rejected.

    Raises:
      CheckpointError: the file is invalid. The message names the file and the field.
    """
    text = read_text(file, "tokenizer.json")
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not a usable tokenizer: {short_repr(str(error))}"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is not a usable tokenizer: it is not a JSON object")
    return _checked(data, text, file, vocab_size)


def checked_backend(data: dict[str, Any], file: Path, vocab_size: int | None = None) -> Backend:
    """Return the tokenizer for the content of a `tokenizer.json`, derived from another file.

    Args:
      file: the source, for errors.
      vocab_size: as for `load_backend`.

    Raises:
      CheckpointError: as `load_backend`.
    """
    return _checked(data, json.dumps(data), file, vocab_size)


def _checked(data: dict[str, Any], text: str, file: Path, vocab_size: int | None) -> Backend:
    _File(file, data, vocab_size).check()
    cut = _in_linear_time(data.get("pre_tokenizer"))
    if cut != data.get("pre_tokenizer"):
        text = json.dumps(data | {"pre_tokenizer": cut})
    try:
        backend = Backend.from_str(text)
        backend.no_truncation()
        backend.no_padding()  # a fixed length could be gigabytes
        with contextlib.suppress(Exception):  # a panic here would occur for every text
            backend.decode(backend.encode("a").ids)
    except BaseException as error:  # the library raises bare Exception, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CheckpointError(f"{file} is not a usable tokenizer: {str(error)[:500]}") from error
    for token in data.get("added_tokens") or []:
        found = backend.token_to_id(token["content"])
        if found != token["id"]:
            raise CheckpointError(
                f"{file}: added_tokens gives {short_repr(token['content'])} the id {token['id']}, "
                f"but the vocabulary implies {found}: the ids have a gap or contradict each other"
            )
    return backend


def _in_linear_time(component: Any) -> Any:
    """Return the component with replacements for published patterns that take quadratic time."""
    match component:
        case {"Regex": str(pattern)} if pattern in LINEAR:
            return {"Regex": LINEAR[pattern]}
        case dict():
            return {key: _in_linear_time(value) for key, value in component.items()}
        case list():
            return [_in_linear_time(part) for part in component]
    return component


def add_configured(backend: Backend, tokens: Any, file: Path) -> None:
    """Add the `added_tokens_decoder` of `tokenizer_config.json`, `{"32000": {"content": ...}}`.

    Hugging Face's precedence applies: its flags override those of `tokenizer.json`, and tokens
    missing there are added. Here a token is added only if it gets the id that the file gives it.

    Raises:
      CheckpointError: the tokens are invalid. The message names the file and the field.
    """

    def refused(what: str, value: Any) -> CheckpointError:
        return CheckpointError(f"{file}: added_tokens_decoder {what} {short_repr(value)}")

    if tokens is None:
        return
    if not isinstance(tokens, dict) or len(tokens) > MAX_ADDED_TOKENS:
        raise refused("must be an object of tokens by id, at most", MAX_ADDED_TOKENS)
    wanted: dict[int, AddedToken] = {}
    for key, token in tokens.items():
        match token:
            case {"content": str(content)} if 0 < len(content) <= MAX_TOKEN_CHARS:
                flags = {name: token[name] for name in _FLAGS if name in token}
            case _:
                raise refused("must contain tokens with their content, not", token)
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise refused("has an invalid id:", key)
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise refused("has a flag that is neither true nor false:", token)
        wanted[int(key)] = AddedToken(content, **flags)
    added = backend.get_added_tokens_decoder()
    contents = {token.content for token in (*added.values(), *wanted.values())}
    if len({token.content for token in wanted.values()}) < len(wanted):
        raise refused("has a token twice, among", len(wanted))
    if _deepest(contents) > MAX_NESTED_TOKENS:
        raise refused("has more tokens that are prefixes of each other than", MAX_NESTED_TOKENS)
    changed = []  # added at once, because the library rebuilds all tables each time
    next_id = backend.get_vocab_size(with_added_tokens=True)
    for i, token in sorted(wanted.items()):
        known = backend.token_to_id(token.content)
        if known is None and i != next_id:
            continue  # it would get another id
        next_id += known is None
        before = None if known is None else added.get(known)
        token.special = token.special or (before is not None and before.special)
        if token != before:
            changed.append(token)
    backend.add_tokens(changed)


class _File:
    def __init__(self, file: Path, data: dict[str, Any], vocab_size: int | None):
        self.file, self.data = file, data
        self.limit = min(vocab_size or MAX_TOKEN_ID, MAX_TOKEN_ID)

    def check(self) -> None:
        model = self.data.get("model")
        if not isinstance(model, dict):
            self._fail("model", "must be an object")
        kind = model.get("type", "BPE" if "merges" in model else None)
        if kind == "Unigram":
            ids = self._pieces(model)
        elif kind in ("BPE", "WordPiece", "WordLevel"):
            ids = self._vocab(model)
        else:
            self._fail("model.type", "must be BPE, Unigram, WordPiece or WordLevel", kind)
        if kind == "BPE":
            self._merges(model, ids)
        if kind == "WordPiece":
            chars = model.get("max_input_chars_per_word", 100)
            if type(chars) is not int or not 0 < chars <= MAX_WORD_CHARS:
                self._fail(
                    "model.max_input_chars_per_word", f"must be at most {MAX_WORD_CHARS}", chars
                )
        self._added(ids)
        for name in COMPONENTS:
            self._component(name)

    def _vocab(self, model: dict[str, Any]) -> dict[str, int]:
        vocab = model.get("vocab")
        if not isinstance(vocab, dict):
            self._fail("model.vocab", "must be an object of tokens to ids")
        ids = vocab.values()
        # A check of all tokens at once is fast. Only if it fails, each token is checked.
        if ids and not (
            set(map(type, ids)) == {int}
            and 0 <= min(ids) <= max(ids) < self.limit
            and max(map(len, vocab)) <= MAX_TOKEN_CHARS
        ):
            for token, i in vocab.items():
                self._id("model.vocab", token, i, self.limit)
                self._token("model.vocab", token, least=0)
        if len(set(vocab.values())) != len(vocab):
            self._fail("model.vocab", f"gives {len(vocab)} tokens {len(set(vocab.values()))} ids")
        return vocab

    def _pieces(self, model: dict[str, Any]) -> dict[str, int]:
        vocab = model.get("vocab")
        if not isinstance(vocab, list) or len(vocab) > self.limit:
            self._fail("model.vocab", f"must be a list of at most {self.limit} pieces")
        ids: dict[str, int] = {}
        for i, entry in enumerate(vocab):
            match entry:
                case [str(piece), int() | float() as score] if math.isfinite(score):
                    self._token("model.vocab", piece, least=0, most=MAX_PIECE_CHARS)
                    if ids.setdefault(piece, i) != i:
                        self._fail("model.vocab", "has a piece twice:", piece)
                case _:
                    self._fail("model.vocab", "must contain pieces with finite scores, not", entry)
        unknown = model.get("unk_id")
        if unknown is not None and (type(unknown) is not int or not 0 <= unknown < len(vocab)):
            self._fail("model.unk_id", "must be the id of a piece, not", unknown)
        return ids

    def _merges(self, model: dict[str, Any], ids: dict[str, int]) -> None:
        """Check that both parts and the result of each merge are tokens."""
        merges = model.get("merges")
        prefix = model.get("continuing_subword_prefix") or ""
        if not isinstance(merges, list):
            self._fail("model.merges", "must be a list")
        if not isinstance(prefix, str):
            self._fail("model.continuing_subword_prefix", "must be a string, not", prefix)
        if not prefix and _makes_tokens(merges, ids):
            return
        for merge in merges:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            match pair:
                case [str(left), str(right)] if (
                    left
                    and right.startswith(prefix)
                    and len(right) > len(prefix)
                    and left in ids
                    and right in ids
                    and left + right[len(prefix) :] in ids
                ):
                    continue
            self._fail("model.merges", "must combine two tokens into a third, not", merge)

    def _added(self, ids: dict[str, int]) -> None:
        added = self.data.get("added_tokens") or []
        if not isinstance(added, list) or len(added) > MAX_ADDED_TOKENS:
            self._fail("added_tokens", f"must be a list of at most {MAX_ADDED_TOKENS}")
        seen: dict[str, int] = {}
        taken = set()
        for token in added:
            match token:
                case {"id": i, "content": str(content)}:
                    self._id("added_tokens", content, i, self.limit + len(added))
                    self._token("added_tokens", content)
                    if content in seen or i in taken:
                        self._fail("added_tokens", f"has the id {i} or this token twice:", content)
                    seen[content] = i
                    taken.add(i)
                case _:
                    self._fail(
                        "added_tokens", "must contain tokens with id and content, not", token
                    )
        taken_by = {i: token for token, i in ids.items() if i in taken}
        for content, i in seen.items():
            if taken_by.get(i, content) != content:
                self._fail("added_tokens", f"gives id {i} of {short_repr(taken_by[i])} to", content)
        if _deepest(seen) > MAX_NESTED_TOKENS:
            self._fail(
                "added_tokens",
                f"has more than {MAX_NESTED_TOKENS} that are prefixes of each other",
            )

    def _component(self, name: str) -> None:
        value = self.data.get(name)
        if value is None:
            return
        if not isinstance(value, dict):
            self._fail(name, "must be an object")
        if depth_exceeds(value, MAX_COMPONENT_DEPTH):
            self._fail(name, f"is nested deeper than {MAX_COMPONENT_DEPTH} levels")
        growth, count = 1.0, 0
        most = MAX_DECODER_GROWTH if name == "decoder" else MAX_GROWTH
        for parent in _objects(value):
            count += 1
            if count > 64 * MAX_COMPONENTS:
                self._fail(name, f"has more than {MAX_COMPONENTS} parts")
            for key, text in parent.items():
                self._component_text(f"{name}.{key}", key, text)
            if parent.get("type") == "Replace":
                growth *= self._growth(name, parent)
            elif parent.get("type") == "Prepend":
                self._short(f"{name}.prepend", parent.get("prepend"))
            if name == "post_processor" and not parent.keys().isdisjoint(_TEMPLATES):
                self._template(name, parent)
            if name == "post_processor":
                self._bounds(name, parent)
            if growth > most:
                self._fail(name, f"makes texts more than {most} times longer")
        # A post-processor may have more parts, because it lists special tokens.
        if count > MAX_COMPONENTS and name != "post_processor":
            self._fail(name, f"has more than {MAX_COMPONENTS} parts")

    def _bounds(self, name: str, parent: dict[str, Any]) -> None:
        """Check the tokens that BertProcessing and RobertaProcessing put around a text."""
        for key in ("sep", "cls"):
            match parent.get(key, ...):
                case builtins.Ellipsis:
                    pass
                case [str(token), i]:
                    self._id(f"{name}.{key}", token, i, self.limit)
                case other:
                    self._fail(f"{name}.{key}", "must be a token and its id, not", other)

    def _template(self, name: str, template: dict[str, Any]) -> None:
        """Check a template's tokens and sequences, because the library does not."""
        tokens = template.get("special_tokens")
        if not isinstance(tokens, dict):
            self._fail(f"{name}.special_tokens", "must be an object of special tokens")
        for token, entry in tokens.items():
            field = f"{name}.special_tokens[{short_repr(token)}]"
            match entry:
                case {"ids": [*ids], "tokens": [*texts]} if len(ids) == len(texts):
                    for i in ids:
                        self._id(field, token, i, self.limit)
                case _:
                    self._fail(field, "must have as many ids as tokens, not", entry)
        for key, sequences in _TEMPLATES.items():
            pieces = template.get(key)
            if not isinstance(pieces, list):
                self._fail(f"{name}.{key}", "must be a list, not", pieces)
            for i, piece in enumerate(pieces):
                match piece:
                    case {"SpecialToken": {"id": str(token)}} if token in tokens:
                        pass
                    case {"SpecialToken": {"id": token}}:
                        field = f"{name}.{key}[{i}].SpecialToken.id"
                        self._fail(field, "has no entry in special_tokens:", token)
                    case {"Sequence": {"id": sequence}} if sequence in sequences:
                        pass
                    case _:
                        field = f"{name}.{key}[{i}]"
                        self._fail(field, f"must be a special token or {sequences}, not", piece)

    def _component_text(self, field: str, key: str, text: Any) -> None:
        limit = MAX_CHARSMAP if key == "precompiled_charsmap" else MAX_COMPONENT_TEXT
        if isinstance(text, str) and len(text) > limit:
            self._fail(field, f"has {len(text)} characters; at most {limit} are read")
        if key == "Regex":
            if not isinstance(text, str):
                self._fail(field, "must be a string, not", text)
            try:
                check_pattern(LINEAR.get(text, text))
            except PatternError as error:
                self._fail(field, f"is an unsafe pattern, because {error}:", text)

    def _growth(self, name: str, replace: dict[str, Any]) -> float:
        content = self._short(f"{name}.content", replace.get("content"))
        match replace.get("pattern"):
            case {"String": str(old)} if old:
                return max(1.0, len(content) / len(old))
            case {"Regex": str()}:
                return max(1.0, len(content))
        self._fail(f"{name}.pattern", "must be a string or a pattern, not", replace.get("pattern"))

    def _short(self, field: str, text: Any) -> str:
        if not isinstance(text, str) or len(text) > MAX_GROWTH:
            self._fail(field, f"must be a string of at most {MAX_GROWTH} characters, not", text)
        return text

    def _id(self, field: str, token: str, i: Any, limit: int) -> None:
        if type(i) is not int or not 0 <= i < limit:
            self._fail(field, f"gives a token an id that is not from 0 to {limit - 1}:", (token, i))

    def _token(
        self, field: str, token: str, *, least: int = 1, most: int = MAX_TOKEN_CHARS
    ) -> None:
        if not least <= len(token) <= most:
            self._fail(field, f"has a token of {len(token)} characters, not 1 to {most}:", token)

    def _fail(self, field: str, what: str, value: Any = ...) -> NoReturn:
        tail = "" if value is ... else f" {short_repr(value)}"
        raise CheckpointError(f"{self.file} is not a usable tokenizer: {field} {what}{tail}")


def _deepest(contents: Iterable[str]) -> int:
    """Return the length of the longest chain of tokens in which each is a prefix of the next."""
    nested = deepest = 0
    before = ""
    for content in sorted(contents):
        nested = nested + 1 if before and content.startswith(before) else 0
        before, deepest = content, max(deepest, nested)
    return deepest


def _makes_tokens(merges: list[Any], ids: dict[str, int]) -> bool:
    """Return True if all merges are valid. A fast check, which may reject some valid merges."""
    try:
        for merge in merges:
            left, right = merge.split(" ") if type(merge) is str else merge
            if not (left and right and left in ids and right in ids and left + right in ids):
                return False
    except (TypeError, ValueError):
        return False
    return True


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON value. The caller has checked its depth."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _objects(inner)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has duplicate keys")
    return result
