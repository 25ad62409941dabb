"""Text in and out of the model: tokenizer, chat template, detokenizer, stop strings.

This package is independent of the engine and of HTTP, and does not import jax.
"""

from forge_jax.text.chat_template import ChatTemplate
from forge_jax.text.detokenizer import Detokenizer
from forge_jax.text.stop import StopStrings
from forge_jax.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer"]
