"""Compiles one grammar: `build`."""

from __future__ import annotations

import llguidance
import numpy as np

from forge_jax.errors import GrammarError
from forge_jax.grammar.masks import mask_width
from forge_jax.grammar.matcher import Matcher
from forge_jax.grammar.spec import GrammarSpec, refused
from forge_jax.grammar.translate import MAX_STEP_FUEL, reason, to_llguidance

# What one mask may cost everybody, and what a matcher may hold: a state of the lexer is a kilobyte
# or two. With llguidance's own limit of fuel, 200,000, some schemas of the wild fail on large
# vocabularies.
_PARSER_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=MAX_STEP_FUEL,
    step_max_items=100_000,
    max_lexer_states=10_000,
    max_grammar_size=200_000,
    verbose_errors=False,  # they quote the grammar
)


class Grammar:
    """A compiled grammar; never changed."""

    __slots__ = ("_template", "num_bytes")

    def __init__(self, template: llguidance.LLMatcher, num_bytes: int):
        self._template = template
        self.num_bytes = num_bytes  # about

    def matcher(self) -> Matcher:
        """For one output, at its beginning."""
        return Matcher(self._template.deep_copy())


def build(spec: GrammarSpec, tokenizer: llguidance.LLTokenizer, vocab_size: int) -> Grammar:
    """Compiles in the calling thread, whatever it takes.

    Raises:
      RequestError: it is not valid, not supported, or too complex.
    """
    source = to_llguidance(spec)
    inner = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_PARSER_LIMITS)
    if not inner.is_error():
        first = Matcher(inner)
        try:  # some complaints come with the first mask only
            first.fill(np.zeros(mask_width(vocab_size), np.int32))
        except GrammarError as error:
            why = reason(inner.get_error()) if inner.is_error() else str(error)
            raise refused(f"the {spec.kind} cannot be used: {why}") from None
        # About what was measured: 63 kB of a small schema, 160 kB of one of 800 bytes.
        return Grammar(inner, 65_536 + 100 * len(source))
    raise refused(f"the {spec.kind} cannot be used: {reason(inner.get_error())}")
