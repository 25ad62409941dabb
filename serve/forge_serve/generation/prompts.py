"""Prompts as token IDs: tokenization in threads, truncation, and limits on the amount of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from forge_jax.errors import RequestError
from forge_jax.schedule.request import TokenIds
from forge_serve.generation.workers import in_pieces

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_serve.generation.workers import TextWork

# Shorter texts are tokenized on the event loop, which is faster than a handoff to a thread.
THREAD_FROM_CHARS = 4096
THREAD_FROM_IDS = 4096  # the same for token IDs
BYTES_PER_ID = 4  # approximate
MARGIN_TOKENS = 256  # tokens near a cut, which may differ from those of the whole text
CHARS_PER_TOKEN = 8  # first estimate for kept tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: Sequence[int]
    text: str | None = None  # the client's text; None: it sent token IDs or a chat

    def checked(self) -> Prompt:
        """Return the prompt with `TokenIds`, whose values need no further checks."""
        return Prompt(TokenIds.of(self.token_ids), self.text)


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of each prompt to keep.

    A long text is tokenized only at the kept end, plus a margin. The kept tokens equal those of the
    whole text, unless the tokenizer depends on more than `MARGIN_TOKENS` tokens of context.
    """

    tokens: int
    first: bool  # True: keep the first tokens; False: the last

    def cut(self, prompt: Prompt, bos: int | None) -> Prompt:
        """Return the truncated prompt. A BOS token that the tokenizer added is kept."""
        ids, keep = prompt.token_ids, self.tokens
        if len(ids) <= keep:
            return prompt
        if self.first:
            return Prompt(ids[:keep])
        has_bos = prompt.text is not None and keep > 1 and ids[0] == bos
        return Prompt([*ids[:1], *ids[1 - keep :]] if has_bos else ids[-keep:])

    @property
    def num_chars(self) -> int:
        """Characters that usually contain the kept tokens."""
        return (self.tokens + MARGIN_TOKENS) * CHARS_PER_TOKEN

    def encode(
        self, text: str, encode: Callable[[str], list[int]], max_chars: int
    ) -> tuple[list[int], bool]:
        """Tokenize the kept end of a text.

        Args:
          max_chars: the limit on the text to tokenize, even if it yields too few tokens.

        Returns:
          The token IDs, including the margin, and True if the whole text was tokenized.
        """
        num_chars = self.num_chars
        while num_chars < len(text):
            part = text[:num_chars] if self.first else text[-num_chars:]
            ids = encode(part)
            if len(ids) >= self.tokens + MARGIN_TOKENS // 2 or num_chars >= max_chars:
                return ids, False
            num_chars = min(2 * num_chars, max(max_chars, self.num_chars))
        return encode(text), True


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def check_total(num_bytes: int, work: TextWork, param: str) -> None:
    if num_bytes > work.max_bytes:
        raise RequestError(
            f"{param} has {num_bytes} bytes of text; at most {work.max_bytes} are allowed per "
            "request (--max-text-bytes)",
            param=param,
        )


async def encode_texts(
    engine: AsyncEngine,
    given: Sequence[tuple[str, str | list[int]]],
    special: bool,
    kept: Kept | None,
    work: TextWork,
) -> list[Prompt]:
    """Return prompts whose `token_ids` are `TokenIds`. Token IDs need no tokenization.

    Long work runs in a thread.

    Args:
      given: texts or token IDs, each with the path of its field.
      special: True if the tokenizer adds special tokens to texts.

    Raises:
      ContextLengthError: a text is too long to fit the context under any tokenization.
      RequestError: the model has no tokenizer, or the request has too much text.
      OverloadedError: too much text waits to be tokenized.
    """
    tokenizer = engine.tokenizer
    texts = [(param, item) for param, item in given if isinstance(item, str)]
    _check_texts(engine, texts, kept)

    def size(item: str | list[int]) -> int:
        if not isinstance(item, str):
            return BYTES_PER_ID * len(item)
        if kept is not None and len(item) > kept.num_chars:
            item = item[: kept.num_chars]  # the length of the part that is tokenized
        return _num_bytes(item)

    num_bytes = sum(size(text) for _, text in texts)
    if texts:
        check_total(num_bytes, work, texts[0][0].partition("[")[0])
    bos = None if tokenizer is None else tokenizer.bos_token_id
    max_chars = work.max_bytes // max(len(texts), 1)

    def prompt(item: str | list[int]) -> Prompt:
        return encoded(item).checked()

    def encoded(item: str | list[int]) -> Prompt:
        if not isinstance(item, str):
            made = Prompt(item)
        else:
            assert tokenizer is not None
            if kept is None:
                return Prompt(tokenizer.encode(item, special), item)
            encode = partial(tokenizer.encode, add_special_tokens=special)
            ids, whole = kept.encode(item, encode, max_chars)
            made = Prompt(ids, item)
            if not whole and len(ids) <= kept.tokens:
                made = Prompt(ids)
        return made if kept is None else kept.cut(made, bos)

    items = [item for _, item in given]
    num_ids = sum(len(item) for item in items if not isinstance(item, str))
    if sum(len(text) for _, text in texts) < THREAD_FROM_CHARS and num_ids < THREAD_FROM_IDS:
        return [prompt(item) for item in items]
    pieces = [partial(_each, prompt, piece) for piece in in_pieces(items, size)]
    found = await work.run(num_bytes + BYTES_PER_ID * num_ids, pieces)
    return [prompt for several in found for prompt in several]


def _check_texts(engine: AsyncEngine, texts: Sequence[tuple[str, str]], kept: Kept | None) -> None:
    """Raise for texts that cannot be tokenized, or cannot fit into the context."""
    for param, text in texts:
        if engine.tokenizer is None:
            raise RequestError(
                f"{param} must be token IDs, because this model has no tokenizer", param=param
            )
        if kept is None:
            engine.tokenizer.check_fits([text], engine.max_model_len, param)


def _each[I, T](make: Callable[[I], T], items: Iterable[I]) -> list[T]:
    return [make(item) for item in items]
