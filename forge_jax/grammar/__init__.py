"""What a client may demand of an output's form or tokens, and what holds it to that.

`GrammarSpec` is the demand, `GrammarCompiler` reads it for one vocabulary, and each sequence has a
`Matcher` that says which tokens may come next. The work is llguidance's; nothing outside this
folder knows it, and it is imported with the first grammar. `TokenFilter` does the same for lists of
tokens and words, without it. Here only `GrammarSpec` is, so that the
scheduler can know of it and stay light.
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
