"""The tokenizer, a byte-level BPE with single digits, and the chat template.

Every text round-trips, because all 256 bytes are in the alphabet. The post-processor puts `<|bos|>`
before raw text. The chat template writes it itself, so chats are encoded with
`add_special_tokens=False`.
"""

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .corpus.document import Document

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPARE = [f"<|spare_{i}|>" for i in range(10)]
SPECIAL_TOKENS = [PAD, BOS, END, *ROLES.values(), *SPARE]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def tokenizer_config(max_length: int) -> dict:
    """Return `tokenizer_config.json` in Hugging Face's format."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL_TOKENS)
        },
    }


PROMPT, LEARNT = 1, 2  # kinds of token weight, see `train.Rows`


def encode(
    tokenizer: Tokenizer, documents: Iterable[Document], batch: int = 4096
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (tokens, weights) of each document, with `<|bos|>`, role and end tokens in place."""
    held: list[Document] = []
    for document in documents:
        held.append(document)
        if len(held) == batch:
            yield from _encode_batch(tokenizer, held)
            held = []
    yield from _encode_batch(tokenizer, held)


def _encode_batch(
    tokenizer: Tokenizer, documents: list[Document]
) -> Iterator[tuple[list[int], list[int]]]:
    contents = [content for document in documents for _, content in document.turns]
    encoded = iter(tokenizer.encode_batch_fast(contents, add_special_tokens=False))
    bos, end = tokenizer.token_to_id(BOS), tokenizer.token_to_id(END)
    role_ids = {role: tokenizer.token_to_id(token) for role, token in ROLES.items()}
    for document in documents:
        tokens, weights = [bos], [PROMPT]
        for role, _ in document.turns:
            ids = [*next(encoded).ids, end]
            learnt = LEARNT if role in ("assistant", "text") else PROMPT
            if role in role_ids:
                tokens.append(role_ids[role])
                weights.append(PROMPT)
            tokens += ids
            weights += [learnt] * len(ids)
        yield tokens, weights
