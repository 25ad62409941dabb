"""An engine without a model: `forge-jax serve --fake`, and tests of everything above the device.

The scheduler, the block pool and the text side are real. `FakeDevice` replaces the model. The same
request gives the same text every time, at any configured speed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from forge_jax.config import EngineConfig
from forge_jax.engine.core import EngineCore, make_scheduler
from forge_jax.engine.parts import EngineParts
from forge_jax.grammar import GrammarCompiler
from forge_jax.schedule.scheduler import Scheduler
from forge_jax.schedule.token_budget import TokenBudget
from forge_jax.speculate import make_speculator
from forge_jax.testing import FakeDevice
from forge_jax.text import ChatTemplate, Tokenizer

WORDS = (
    "the a one this that every old new small big quick quiet bright warm cold kind brave dog "
    "cat bird river tree house road stone cloud garden window letter song city ship star ran "
    "sat saw found made heard opened carried followed painted remembered in on under over near "
    "beside behind after before and but so then because while slowly often always never again "
    "today café naïve 日本 мир"
).split()
NextToken = Callable[[Seq[int], int], int]
# A character whose bytes are two tokens. The second always follows the first.
SMILE = ("🙂".encode()[:2], "🙂".encode()[2:])
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def fake_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer: words, the halves of a smile, the bytes, then "</s>"."""
    alphabet = _byte_alphabet()

    def spell(data: bytes) -> str:
        return "".join(alphabet[byte] for byte in data)

    tokens = [spell(f" {word}".encode()) for word in WORDS] + [spell(half) for half in SMILE]
    tokens += [alphabet[byte] for byte in range(256)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"})


def fake_chat_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, fake_tokenizer().special_tokens)


def assemble_fake(
    config: EngineConfig,
    *,
    step_time_s: float,
    max_model_len: int,
    check: bool,
    tokenizer: Tokenizer | None = None,
    next_token: NextToken | None = None,
    has_text: bool = True,
    vocab_size: int | None = None,
) -> EngineParts:
    """Assemble a fake engine. The configuration's limits apply; its model is ignored.

    Args:
      tokenizer: replaces `fake_tokenizer`; it needs an EOS token.
      next_token: (tokens so far, seed) -> token; replaces random words.
      has_text: if False, the engine has no tokenizer and no template, as some model folders.
      vocab_size: the model's vocabulary size. Default: the tokenizer's.
    """
    tokenizer = tokenizer or fake_tokenizer()
    vocab_size = vocab_size or tokenizer.vocab_size
    eos = tokenizer.eos_token_id
    assert eos is not None
    max_model_len = config.model.max_model_len or max_model_len
    rng = random.Random(config.model.seed)
    scheduler = _make_scheduler(config, max_model_len, frozenset((eos,)), rng)
    device = FakeDevice(
        num_blocks=scheduler.pool.num_blocks,
        block_size=scheduler.pool.block_size,
        max_num_seqs=config.batch.max_num_seqs,
        vocab_size=vocab_size,
        next_token=next_token or _next_word,
        step_time_s=step_time_s,
        check=check,
        pool=scheduler.pool if check else None,
    )
    core = EngineCore(
        scheduler=scheduler,
        device=device,
        tokenizer=tokenizer if has_text else None,
        grammars=GrammarCompiler(tokenizer, vocab_size, (eos,)),
        vocab_size=vocab_size,
        one_step_ahead=config.batch.one_step_ahead,
        speculator=make_speculator(config),
        unrecoverable=(AssertionError,) if check else (),  # the device's checks
    )
    return EngineParts(
        name="forge-fake",
        core=core,
        max_model_len=max_model_len,
        tokenizer=tokenizer if has_text else None,
        chat_template=fake_chat_template() if has_text else None,
        rng=rng,
        pooling=config.model.pooling,
    )


def _make_scheduler(
    config: EngineConfig, max_model_len: int, eos_token_ids: frozenset[int], rng: random.Random
) -> Scheduler:
    """Return a scheduler with blocks of the configured size; by default there are 4,096."""
    block_size = config.cache.block_size or 16
    if config.cache.kv_cache == "contiguous":
        block_size = -(-max_model_len // 8) * 8
    target_ms = config.batch.itl_target_ms
    return make_scheduler(
        config,
        num_blocks=config.cache.num_blocks or max(-(-max_model_len // block_size), 4096),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.batch.max_num_batched_tokens or 2048,
        eos_token_ids=eos_token_ids,
        rng=rng,
        budget=TokenBudget(target_ms / 1e3) if target_ms else None,
    )


def _next_word(tokens: Seq[int], seed: int) -> int:
    """Return a word chosen by seed, position and the previous token.

    After the first half of a smile, return the second.
    """
    first_half = len(WORDS)
    if tokens[-1] == first_half:
        return first_half + 1
    noise = (seed ^ len(tokens) * 0x9E3779B97F4A7C15 ^ tokens[-1] << 32) * 0xBF58476D1CE4E5B9
    return (noise >> 40) % (first_half + 1)


def _byte_alphabet() -> list[str]:
    """Return GPT-2's printable stand-in for each byte, in the order of the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]
