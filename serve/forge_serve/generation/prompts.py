"""Prompts as token ids: tokenization in threads, truncation, and limits on the amount of text."""

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

# A shorter text is tokenised on the event loop: in less time than handing it to a thread takes.
THREAD_FROM_CHARS = 4096
THREAD_FROM_IDS = 4096  # likewise of token ids that are checked, or read as text
BYTES_PER_ID = 4  # about, of the text of a token
MARGIN_TOKENS = 256  # beyond a cut: tokens that may differ from those of the whole text
CHARS_PER_TOKEN = 8  # a first guess at how much text holds the kept tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: Sequence[int]
    text: str | None = None  # as the client wrote it; None: it sent token ids, or a chat

    def checked(self) -> Prompt:
        """The same with `TokenIds`, which nothing has to go through again."""
        return Prompt(TokenIds.of(self.token_ids), self.text)


@dataclass(frozen=True, slots=True)
class Kept:
    """How much of each prompt is kept.

    The kept tokens are those of the whole text, unless its tokenizer looks further than
    `MARGIN_TOKENS` tokens beyond them: only so much of a long text is tokenized.
    """

    tokens: int
    first: bool  # the first tokens, not the last

    def cut(self, prompt: Prompt, bos: int | None) -> Prompt:
        """The prompt, truncated. A BOS that the tokenizer put before a text stays."""
        ids, keep = prompt.token_ids, self.tokens
        if len(ids) <= keep:
            return prompt
        if self.first:
            return Prompt(ids[:keep])
        has_bos = prompt.text is not None and keep > 1 and ids[0] == bos
        return Prompt([*ids[:1], *ids[1 - keep :]] if has_bos else ids[-keep:])

    @property
    def num_chars(self) -> int:
        """Characters that mostly hold the kept tokens."""
        return (self.tokens + MARGIN_TOKENS) * CHARS_PER_TOKEN

    def encode(
        self, text: str, encode: Callable[[str], list[int]], max_chars: int
    ) -> tuple[list[int], bool]:
        """The ids of the end of a text that is kept, and some more; True if that is the whole text.

        Args:
          max_chars: no more of the text than this is encoded, even if it has too few tokens.
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
            f"{param}: {num_bytes} bytes of text in one request; at most {work.max_bytes} "
            "(--max-text-bytes): send less text, or several requests",
            param=param,
        )


async def encode_texts(
    engine: AsyncEngine,
    given: Sequence[tuple[str, str | list[int]]],
    special: bool,
    kept: Kept | None,
    work: TextWork,
) -> list[Prompt]:
    """Texts as token ids, with special tokens about them or not; token ids as they are. All of
    them are `TokenIds`; what takes long is done in a thread.

    Args:
      given: each with the name of its field.

    Raises:
      ContextLengthError: a text is so long that no tokenization of it could fit.
      RequestError: there is no tokenizer, or there is more text than a request may have.
      OverloadedError: too much text waits to be tokenized.
    """
    tokenizer = engine.tokenizer
    texts = [(param, item) for param, item in given if isinstance(item, str)]
    _check_texts(engine, texts, kept)

    def size(item: str | list[int]) -> int:
        if not isinstance(item, str):
            return BYTES_PER_ID * len(item)
        if kept is not None and len(item) > kept.num_chars:
            item = item[: kept.num_chars]  # as long as what will be tokenized
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
                f"this model has no tokenizer: send the {param} as token ids", param=param
            )
        if kept is None:
            engine.tokenizer.check_fits([text], engine.max_model_len, param)


def _each[I, T](make: Callable[[I], T], items: Iterable[I]) -> list[T]:
    return [make(item) for item in items]
