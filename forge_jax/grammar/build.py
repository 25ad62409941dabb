"""Compilation of a grammar."""

from __future__ import annotations

import llguidance
import numpy as np

from forge_jax.errors import GrammarError
from forge_jax.grammar.masks import mask_width
from forge_jax.grammar.matcher import Matcher
from forge_jax.grammar.spec import GrammarSpec, refused
from forge_jax.grammar.translate import MAX_STEP_FUEL, reason, to_llguidance

# These bound the time of a mask, for which all sequences wait, and the memory of a matcher. A lexer
# state takes 1 to 2 kB. With llguidance's default fuel of 200,000, some real schemas fail with
# large vocabularies.
_PARSER_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=MAX_STEP_FUEL,
    step_max_items=100_000,
    max_lexer_states=10_000,
    max_grammar_size=200_000,
    verbose_errors=False,  # verbose errors quote the grammar
)


class Grammar:
    """An immutable compiled grammar."""

    __slots__ = ("_template", "num_bytes")

    def __init__(self, template: llguidance.LLMatcher, num_bytes: int):
        self._template = template
        self.num_bytes = num_bytes  # approximate

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an output."""
        return Matcher(self._template.deep_copy())


def build(spec: GrammarSpec, tokenizer: llguidance.LLTokenizer, vocab_size: int) -> Grammar:
    """Compile a grammar in the calling thread, without a limit on time.

    Raises:
      RequestError: the grammar is invalid, not supported, or too complex.
    """
    source = to_llguidance(spec)
    inner = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_PARSER_LIMITS)
    if not inner.is_error():
        first = Matcher(inner)
        try:  # some errors occur only with the first mask
            first.fill(np.zeros(mask_width(vocab_size), np.int32))
        except GrammarError as error:
            why = reason(inner.get_error()) if inner.is_error() else str(error)
            raise refused(f"the {spec.kind} cannot be used: {why}") from None
        # Measured: 63 kB for a small schema, 160 kB for one of 800 bytes.
        return Grammar(inner, 65_536 + 100 * len(source))
    raise refused(f"the {spec.kind} cannot be used: {reason(inner.get_error())}")
