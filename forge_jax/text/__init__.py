"""Text in and out of the model: tokenizer, chat template, streaming text, stop strings.

Knows nothing of the engine or of HTTP, and imports no jax.
"""

from forge_jax.text.chat_template import ChatTemplate
from forge_jax.text.detokenizer import Detokenizer
from forge_jax.text.stop import StopStrings
from forge_jax.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer"]
