"""The text side of a model folder: its tokenizer and its chat template."""

from __future__ import annotations

from pathlib import Path

from forge_jax.errors import ConfigError
from forge_jax.text.chat_template import ChatTemplate
from forge_jax.text.tokenizer import Tokenizer


def load_text(
    folder: Path, chat_template: str | None, vocab_size: int
) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Both, or None for what the folder has not got.

    Args:
      chat_template: a file or a text that takes the place of the folder's own.
      vocab_size: the model's output width.

    Raises:
      ModelError: a file is broken.
      ConfigError: a chat template is given, and there is no tokenizer to go with it.
    """
    tokenizer = Tokenizer.from_folder(folder, vocab_size)
    if tokenizer is None:
        if chat_template is not None:
            raise ConfigError("--chat-template needs a tokenizer, and the model folder has none")
        return None, None
    template = ChatTemplate.from_folder(folder, tokenizer, chat_template)
    return tokenizer, template if template.available else None
