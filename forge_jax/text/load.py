"""The tokenizer and the chat template of a model folder."""

from __future__ import annotations

from pathlib import Path

from forge_jax.errors import ConfigError
from forge_jax.text.chat_template import ChatTemplate
from forge_jax.text.tokenizer import Tokenizer


def load_text(
    folder: Path, chat_template: str | None, vocab_size: int
) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Return the tokenizer and the chat template of a folder, each None if it has none.

    Args:
      chat_template: a file or text that replaces the folder's template.
      vocab_size: the model's output width.

    Raises:
      ModelError: a file is invalid.
      ConfigError: a chat template is given, but the folder has no tokenizer.
    """
    tokenizer = Tokenizer.from_folder(folder, vocab_size)
    if tokenizer is None:
        if chat_template is not None:
            raise ConfigError("--chat-template needs a tokenizer, but the model folder has none")
        return None, None
    template = ChatTemplate.from_folder(folder, tokenizer, chat_template)
    return tokenizer, template if template.available else None
