"""The process of a `Probe`: compiles and tries grammars, and answers with a verdict.

    python -m forge_jax.grammar.probe_worker

It ends when its standard input is closed. The stack is smaller than that of `GrammarCompiler`.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from functools import partial

import psutil

from forge_jax.errors import RequestError
from forge_jax.grammar.build import build
from forge_jax.grammar.probe import Hello, Verdict, read, write
from forge_jax.grammar.spec import PARAM, GrammarSpec
from forge_jax.grammar.trial import try_out
from forge_jax.grammar.vocabulary import llguidance_tokenizer
from forge_jax.host import supervise

STACK_BYTES = 4 << 20


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps printed text out of the answers
    hello = read(sys.stdin.buffer, Hello)
    vocabulary = hello.vocabulary
    tokenizer = llguidance_tokenizer(vocabulary)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = psutil.Process().memory_info().vms + STACK_BYTES + hello.memory_bytes
    threading.stack_size(STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    write(answers, Verdict())

    def answer(spec: GrammarSpec) -> None:
        try:
            grammar = build(spec, tokenizer, len(vocabulary.tokens))
            why = try_out(grammar, len(vocabulary.tokens), vocabulary.end_ids)
        except RequestError as error:
            write(answers, Verdict(str(error).removeprefix(f"{PARAM}: ")))
        except MemoryError:
            os._exit(1)
        else:
            write(answers, Verdict(why and f"the {spec.kind} cannot be used: {why}"))

    def end(error: BaseException) -> None:
        os._exit(1)  # without a verdict, the peer starts another process

    while True:
        try:
            spec = read(sys.stdin.buffer, GrammarSpec)
        except EOFError:
            return
        supervise.start_thread(partial(answer, spec), "trying a grammar", end).join()


if __name__ == "__main__":
    main()
