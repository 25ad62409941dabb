"""`ForgeTokenizer`: the engine's tokenizer, with the methods that Tunix expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.errors import ModelError
from forge_jax.llm import LLM


class ForgeTokenizer:
    """The tokenizer and the chat template of an `LLM`, for `RLCluster(tokenizer=...)`.

    Args:
      pad_id: the token of padding. It must not occur in prompts. Tunix ignores it in completions.

    Raises:
      ModelError: the model has no tokenizer or no EOS token.
    """

    def __init__(self, llm: LLM, *, pad_id: int = 0):
        if llm.tokenizer is None:
            raise ModelError("ForgeTokenizer requires a model with a tokenizer.json")
        if llm.tokenizer.eos_token_id is None:
            raise ModelError("ForgeTokenizer requires a tokenizer with an EOS token")
        self._tokenizer, self._template, self._pad_id = llm.tokenizer, llm.chat_template, pad_id

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a text, without a second BOS if the text begins with it."""
        bos = self._tokenizer.bos_token
        return self._tokenizer.encode(text, not (bos and text.startswith(bos)))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(each) for each in ids])

    def bos_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    def eos_id(self) -> int:
        return self._tokenizer.eos_token_id

    def pad_id(self) -> int:
        return self._pad_id

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        **options: Any,
    ) -> str | list[int]:
        """Return a conversation as text, or as token IDs with `tokenize`.

        Raises:
          ModelError: the model has no chat template.
          RequestError: the template rejects the conversation.
        """
        if self._template is None or not self._template.available:
            raise ModelError("this model has no chat template: pass chat_template=... to LLM")
        text = self._template.render(
            list(messages), add_generation_prompt=add_generation_prompt, **options
        )
        return self.encode(text) if tokenize else text
