"""`compare`: both sides answer the same prompts, and both score A's answers.

Each scored token has the KL divergence of its two next-token distributions, over the full
vocabulary. One side is loaded at a time. Meanwhile, A's logits are in a temporary file.

Both engines are deterministic, so the batch composition changes nothing. If the sides are equal,
every divergence is exactly 0.
"""

# JAX's annotations are partially unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import codecs
import datetime
import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

import forge_jax
from forge_jax.errors import ConfigError, ModelError, RequestError
from forge_jax.host.progress import progress_bar
from forge_jax.llm import LLM
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.outputs import RequestOutput
from forge_jax.text.token_bytes import ByteStream
from forge_jax.text.tokenizer import Tokenizer
from forge_jax.tools.compare.distributions import Position, positions, summary

FORMAT = "forge-jax-comparison"
VERSION = 1
NAMES = ("A", "B")

type Report = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
      model: the model, as for `LLM`.
      options: options of `LLM`. `deterministic` is always on. An adapter in `lora` is used.
      label: the name in reports. Default: the model's name.
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    label: str = ""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a comparison and how they are answered.

    Attributes:
      texts: the prompts, at least one.
      chat: send each prompt as a user message, with the model's chat template.
      max_tokens: limit of an answer. With 0, the prompts themselves are scored.
      temperature: 0 is greedy. Both sides sample with the same seed.
      seed: the sampler's seed.
    """

    texts: tuple[str, ...]
    chat: bool = False
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0


def compare(a: Side, b: Side, prompts: Prompts, *, progress: bool = True) -> Report:
    """Answer the prompts with both sides and compare their distributions.

    Args:
      a: the reference. Both sides score its answers.
      b: the other side.
      prompts: the prompts and the sampling parameters.
      progress: show progress bars.

    Returns:
      A report that can be written as JSON. docs/evaluation.md lists its fields.

    Raises:
      ModelError: a model cannot be loaded, the tokenizers differ, or logits are not finite.
      RequestError: a prompt cannot be served or has no token to score.
      ConfigError: an option is wrong, or the temporary folder is full.
    """
    if not prompts.texts:
        raise RequestError("there is no prompt: pass at least one", param="prompts")
    with tempfile.TemporaryFile(prefix="forge-jax-logits-") as file:
        llm = _load(NAMES[0], a)
        first = _answer(NAMES[0], a, llm, prompts, progress)
        spans = [_span(output, prompts) for output in first.outputs]
        _write(file, _logits(NAMES[0], llm, spans, progress))
        llm.close()
        del llm
        gc.collect()  # the engine's parts refer to each other, and hold the weights
        llm = _load(NAMES[1], b)
        _check_tokenizers(first, llm)
        second = _answer(NAMES[1], b, llm, prompts, progress)
        _check_prompts(first, second)
        file.seek(0)
        logits = _logits(NAMES[1], llm, spans, progress)
        tokens = [token for span in spans for token in span.scored]
        found = list(_positions(file, first.vocab_size, logits, tokens))
        llm.close()
    entries: list[dict[str, Any]] = []
    at = 0
    for text, span, *outputs in zip(
        prompts.texts, spans, first.outputs, second.outputs, strict=True
    ):
        of_span = found[at : at + len(span.scored)]
        at += len(span.scored)
        entries.append(_entry(text, span, outputs, of_span, first.tokenizer))
    same = sum(entry["divergence"] is None for entry in entries)
    return {
        "format": FORMAT,
        "version": VERSION,
        "forge_jax": forge_jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "sides": [first.described, second.described],
        "settings": {
            "scored": "answers" if prompts.max_tokens else "prompts",
            "chat": prompts.chat,
            "max_tokens": prompts.max_tokens,
            "temperature": prompts.temperature,
            "seed": prompts.seed,
        },
        "summary": {**summary(found), "prompts": len(entries), "same_answers": same},
        "prompts": entries,
    }


@dataclass(frozen=True)
class _Span:
    """The scored tokens of one sequence: those from `start`. Row t - 1 predicts token t."""

    tokens: tuple[int, ...]
    start: int

    @property
    def scored(self) -> tuple[int, ...]:
        return self.tokens[self.start :]


@dataclass(frozen=True)
class _Answered:
    """One side's answers, without its weights."""

    outputs: list[RequestOutput]
    tokenizer: Tokenizer
    vocab_size: int
    described: dict[str, Any]


def _load(name: str, side: Side) -> LLM:
    llm = LLM(side.model, **{**side.options, "deterministic": True})
    if len(llm.loras) > 1:
        raise ConfigError(f"{name}: lora has {len(llm.loras)} adapters: set one")
    if llm.tokenizer is None:
        raise ModelError(
            f"{name}: {llm.name} has no tokenizer.json, so its text cannot be compared: add the "
            "tokenizer of the checkpoint"
        )
    return llm


def _answer(name: str, side: Side, llm: LLM, prompts: Prompts, progress: bool) -> _Answered:
    params = SamplingParams(
        max_tokens=prompts.max_tokens, temperature=prompts.temperature, seed=prompts.seed
    )
    if prompts.chat:
        chats = [[{"role": "user", "content": text}] for text in prompts.texts]
        outputs = llm.chat(chats, params, lora=_adapter(llm), progress=progress)
    else:
        texts = list(prompts.texts)
        outputs = llm.generate(texts, params, lora=_adapter(llm), progress=progress)
    for output in outputs:
        if output.outputs[0].error is not None:
            raise output.outputs[0].error
    vocab_size = llm.model.spec.vocab_size
    described = {
        "name": name,
        "label": side.label or short_name(llm.name),
        "model": short_name(llm.name),
        "options": {key: _plain(value) for key, value in side.options.items()},
        "weight_bytes": int(sum(leaf.nbytes for leaf in llm.leaves)),
        "vocab_size": vocab_size,
    }
    return _Answered(outputs, llm.tokenizer, vocab_size, described)


def _adapter(llm: LLM) -> str | None:
    """Return the name of a side's LoRA adapter."""
    return llm.loras[0].name if llm.loras else None


def short_name(model: str) -> str:
    """Return a model's name without the folders of a path."""
    return Path(model).resolve().name if Path(model).exists() else model


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _span(output: RequestOutput, prompts: Prompts) -> _Span:
    """Return the tokens to score: the answer, or the prompt if no answer is generated.

    Raises:
      RequestError: there are none.
    """
    start = len(output.prompt_token_ids) if prompts.max_tokens else 1
    tokens = (*output.prompt_token_ids, *output.outputs[0].token_ids)
    if start < 1 or len(tokens) <= start:
        raise RequestError(
            f"the prompt {output.prompt!r} has no token to score: use a longer prompt, or "
            "--max-tokens above 0",
            param="prompts",
        )
    return _Span(tokens, start)


def _check_tokenizers(first: _Answered, llm: LLM) -> None:
    """Raise `ModelError` unless both sides give the same meaning to each token ID."""
    size = min(first.vocab_size, llm.model.spec.vocab_size)
    one, two = (
        {i: text for text, i in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
        for tokenizer in (first.tokenizer, llm.tokenizer)
    )
    shared = sorted(i for i in one.keys() & two.keys() if i < size)
    other = next((i for i in shared if one[i] != two[i]), None)
    if other is None:
        return
    raise ModelError(
        f"the tokenizers of A ({first.described['model']}) and B ({short_name(llm.name)}) differ: "
        f"token {other} is {one[other]!r} and {two[other]!r}. A KL divergence needs one "
        "vocabulary: compare models that share a tokenizer, or two settings of one model"
    )


def _check_prompts(first: _Answered, second: _Answered) -> None:
    """Raise `ModelError` unless the prompts have the same tokens on both sides."""
    for one, two in zip(first.outputs, second.outputs, strict=True):
        if one.prompt_token_ids != two.prompt_token_ids:
            raise ModelError(
                f"A and B tokenize the prompt {one.prompt!r} differently: their tokenizers or chat "
                "templates differ. Set the same --chat-template, or omit --chat"
            )
        size = min(first.vocab_size, second.vocab_size)
        if any(token >= size for token in (*one.prompt_token_ids, *one.outputs[0].token_ids)):
            raise ModelError(f"A uses tokens that B lacks: B has a vocabulary of {size} tokens")


def _logits(name: str, llm: LLM, spans: Sequence[_Span], progress: bool) -> Iterator[np.ndarray]:
    """Yield the logits that predict the scored tokens of all spans, f32[<= chunk, V] each.

    Raises:
      ModelError: a logit is NaN or infinite.
    """
    counts = [len(span.tokens) - 1 for span in spans]
    chunks = llm.chunked_logits(max(counts), lora=_adapter(llm))
    bar: tqdm[Any]
    with progress_bar(
        unit="tokens", show=progress, total=sum(counts), desc=f"{name} scores"
    ) as bar:
        for span in spans:
            skipped = span.start - 1
            for rows in chunks(span.tokens[:-1]):
                bar.update(len(rows))
                scored = rows[skipped:]
                skipped = max(0, skipped - len(rows))
                if not np.isfinite(scored).all():
                    raise ModelError(
                        f"{name}: the logits of {short_name(llm.name)} are not finite: check its "
                        "weights, or use --dtype float32"
                    )
                if len(scored):
                    yield scored


def _write(file: IO[bytes], logits: Iterator[np.ndarray]) -> None:
    for rows in logits:
        try:
            file.write(np.ascontiguousarray(rows, np.float32).tobytes())
        except OSError as error:
            raise ConfigError(
                f"the logits of A do not fit into {tempfile.gettempdir()} ({error.strerror}): free "
                "space, set TMPDIR to another folder, or score fewer tokens"
            ) from error


def _positions(
    file: IO[bytes], vocab_size: int, logits: Iterator[np.ndarray], tokens: Sequence[int]
) -> Iterator[Position]:
    """Yield the differences of A's logits in the file and those of B."""
    at = 0
    for of_b in logits:
        size = len(of_b) * vocab_size * np.dtype(np.float32).itemsize
        of_a = np.frombuffer(file.read(size), np.float32).reshape(-1, vocab_size)
        yield from positions(of_a, of_b, tokens[at : at + len(of_b)])
        at += len(of_b)


def _entry(
    text: str,
    span: _Span,
    outputs: Sequence[RequestOutput],
    found: Sequence[Position],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    prompt = outputs[0].prompt_token_ids
    answers = [output.outputs[0] for output in outputs]
    pieces = _pieces(tokenizer, span.tokens[: span.start], span.scored)
    return {
        "prompt": text,
        "prompt_tokens": len(prompt),
        "answers": [
            {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "tokens": list(answer.token_ids),
                "pieces": _pieces(tokenizer, prompt, answer.token_ids),
            }
            for answer in answers
        ],
        "divergence": _divergence(answers[0].token_ids, answers[1].token_ids),
        "positions": [
            _described(each, piece, tokenizer) for each, piece in zip(found, pieces, strict=True)
        ],
    }


def _described(found: Position, piece: str, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": found.token,
        "piece": piece,
        "text": tokenizer.token_text(found.token),
        "kl": found.kl,
        "logprobs": list(found.logprobs),
        "ranks": list(found.ranks),
        "entropies": list(found.entropies),
        "same_top": found.same_top,
        "top": [[[i, tokenizer.token_text(i), logprob] for i, logprob in top] for top in found.top],
    }


def _divergence(one: Sequence[int], two: Sequence[int]) -> int | None:
    """Return the index of the first token that differs or exists on one side only."""
    if one == two:
        return None
    pairs = zip(one, two, strict=False)
    shorter = min(len(one), len(two))
    return next((i for i, (left, right) in enumerate(pairs) if left != right), shorter)


def _pieces(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds. The last token of a split character has all of it."""
    if tokenizer.table is None:
        return [tokenizer.token_text(token) for token in tokens]
    stream = ByteStream(tokenizer.table, tokenizer.special_ids)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(stream.skip(before))
    pieces = [
        tokenizer.token_text(token)
        if token in tokenizer.special_ids
        else decoder.decode(stream.push([token]))
        for token in tokens
    ]
    if pieces:
        pieces[-1] += decoder.decode(b"", final=True)
    return pieces
