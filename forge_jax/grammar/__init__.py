"""Structured outputs: constraints on the form and tokens of an output.

A `GrammarSpec` describes a constraint, `GrammarCompiler` compiles it for one vocabulary, and the
`Matcher` of a sequence computes which tokens may come next. They use llguidance, which only this
package imports, when the first grammar is compiled. `TokenFilter` handles lists of tokens and words
without llguidance. This module imports only `GrammarSpec`, so that the scheduler's imports stay
light.
"""

from typing import TYPE_CHECKING, Any

from forge_jax.grammar.spec import GrammarSpec

if TYPE_CHECKING:
    from forge_jax.grammar.build import Grammar as Grammar
    from forge_jax.grammar.compiler import GrammarCompiler as GrammarCompiler
    from forge_jax.grammar.matcher import Matcher as Matcher

__all__ = ["Grammar", "GrammarCompiler", "GrammarSpec", "Matcher"]


def __getattr__(name: str) -> Any:
    if name == "Grammar":
        from forge_jax.grammar.build import Grammar

        return Grammar
    if name == "GrammarCompiler":
        from forge_jax.grammar.compiler import GrammarCompiler

        return GrammarCompiler
    if name == "Matcher":
        from forge_jax.grammar.matcher import Matcher

        return Matcher
    raise AttributeError(f"module 'forge_jax.grammar' has no attribute {name!r}")
