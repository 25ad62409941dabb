"""The compiler of grammars for one vocabulary, with its own threads and a cache.

llguidance is imported with the first grammar, because most servers never receive one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from forge_jax.errors import ForgeError, OverloadedError
from forge_jax.grammar.probe import DEFAULT_LIMITS, Probe, ProbeLimits
from forge_jax.grammar.spec import GrammarSpec, refused
from forge_jax.host import supervise

if TYPE_CHECKING:
    import llguidance

    from forge_jax.grammar.build import Grammar
    from forge_jax.grammar.vocabulary import Vocabulary
    from forge_jax.text import Tokenizer

MIB = 1 << 20
CACHE_BYTES = 64 * MIB
STACK_BYTES = 32 * MIB  # stack of compiling threads: more than a probe has, and rarely touched
NUM_THREADS = 2
QUEUE_S = 30.0  # longest wait of a grammar


class GrammarCompiler:
    """A thread-safe compiler of grammars with a cache of the most recently used ones.

    Args:
      tokenizer: the model's tokenizer. If it has none, every grammar is rejected.
      vocab_size: the model's output width.
      end_ids: the EOS tokens.
      limits: the limits of one compilation; None if the caller has already tried the grammars.
      cache_bytes: the size limit of the cache.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        end_ids: Iterable[int],
        *,
        limits: ProbeLimits | None = DEFAULT_LIMITS,
        cache_bytes: int = CACHE_BYTES,
    ):
        self.vocab_size = vocab_size
        self.limits = limits
        self._tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self._cache_bytes = cache_bytes
        self._held_bytes = 0
        self._verdicts: _Recent[str] = _Recent(cache_bytes // 8)  # "" for a usable grammar
        self._grammars: _Recent[Grammar] = _Recent(cache_bytes)
        self._lock = threading.Lock()  # guards the two caches and the threads' stack size
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="forge-grammar")
        self._own = threading.local()  # each thread's probe
        self._probes: list[Probe] = []

    # ---- for callers ---------------------------------------------------------------------------

    def check(self, spec: GrammarSpec) -> None:
        """Try a grammar in a separate process, and wait for the result.

        Raises:
          RequestError: the grammar cannot be compiled.
          OverloadedError: the grammar cannot be tried now.
        """
        if not self._known(spec):
            self._on_thread(self._check, spec).result()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Return the compiled grammar from the cache, or compile it and wait.

        Raises:
          RequestError: as `check`.
          OverloadedError: as `check`.
        """
        grammar = self.kept(spec)
        return self._on_thread(self._compile, spec).result() if grammar is None else grammar

    def kept(self, spec: GrammarSpec) -> Grammar | None:
        """Return the compiled grammar if it is in the cache, else None."""
        with self._lock:
            return self._grammars.get(spec)

    async def check_soon(self, spec: GrammarSpec) -> None:
        """Run `check` without blocking the event loop."""
        if not self._known(spec):
            await _patiently(self._on_thread(self._check, spec))

    async def compile_soon(self, spec: GrammarSpec) -> Grammar:
        """Run `compile` without blocking the event loop."""
        grammar = self.kept(spec)
        return (
            await _patiently(self._on_thread(self._compile, spec)) if grammar is None else grammar
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for probe in self._probes:
            probe.close()

    @property
    def num_bytes(self) -> int:
        """The approximate size of the cached grammars."""
        return self._grammars.num_bytes

    # ---- on its threads ------------------------------------------------------------------------

    def _check(self, spec: GrammarSpec) -> None:
        if self._known(spec):
            return
        complaint = self._probe().complaint(spec)
        with self._lock:
            self._verdicts.put(spec, complaint or "", len(spec.text) + 256)
        if complaint:
            raise refused(complaint)

    def _compile(self, spec: GrammarSpec) -> Grammar:
        if self.limits is not None:
            self._check(spec)
        grammar = self.kept(spec)
        if grammar is None:
            from forge_jax.grammar.build import build

            grammar = build(spec, self._llguidance_tokenizer, self.vocab_size)
            with self._lock:
                self._grammars.put(spec, grammar, grammar.num_bytes + len(spec.text))
        return grammar

    def _known(self, spec: GrammarSpec) -> bool:
        """Return True if a grammar is known to be usable.

        Raises:
          RequestError: the grammar is known to be unusable.
        """
        with self._lock:
            verdict = self._verdicts.get(spec)
        if verdict:
            raise refused(verdict)
        return verdict is not None

    def _probe(self) -> Probe:
        probe = getattr(self._own, "probe", None)
        if probe is None:
            probe = self._own.probe = Probe(self._vocabulary, self.limits or DEFAULT_LIMITS)
            self._probes.append(probe)
        return probe

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        from forge_jax.grammar.vocabulary import Vocabulary

        assert self._tokenizer is not None
        return Vocabulary.of(self._tokenizer, self.vocab_size, self.end_ids)

    @cached_property
    def _llguidance_tokenizer(self) -> llguidance.LLTokenizer:
        from forge_jax.grammar.vocabulary import canonical_tokenizer, llguidance_tokenizer

        assert self._tokenizer is not None
        made = canonical_tokenizer(self._tokenizer, self._vocabulary)
        return llguidance_tokenizer(self._vocabulary) if made is None else made

    def _on_thread[T](self, work: Callable[[GrammarSpec], T], spec: GrammarSpec) -> Future[T]:
        if self._tokenizer is None:
            raise refused("the model has no tokenizer")
        if not self.end_ids:
            raise refused("the model has no EOS token")
        with self._lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                return self._threads.submit(work, spec)  # may start a thread
            finally:
                threading.stack_size(before)


class _Recent[T]:
    """A cache of the most recently used values, bounded in bytes."""

    def __init__(self, most: int):
        self.num_bytes = 0
        self._most = most
        self._kept: OrderedDict[GrammarSpec, tuple[T, int]] = OrderedDict()

    def get(self, spec: GrammarSpec) -> T | None:
        found = self._kept.get(spec)
        if found is None:
            return None
        self._kept.move_to_end(spec)
        return found[0]

    def put(self, spec: GrammarSpec, value: T, size: int) -> None:
        if spec in self._kept:
            self.num_bytes -= self._kept.pop(spec)[1]
        self._kept[spec] = value, size
        self.num_bytes += size
        while self.num_bytes > self._most and len(self._kept) > 1:
            _, (_, freed) = self._kept.popitem(last=False)
            self.num_bytes -= freed


async def _patiently[T](future: Future[T]) -> T:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), QUEUE_S)
    except asyncio.CancelledError:
        supervise.watch(future, "compiling an abandoned grammar", expected=(ForgeError,))
        raise
    except TimeoutError:
        supervise.watch(future, "compiling an abandoned grammar", expected=(ForgeError,))
        raise OverloadedError("too many grammars wait to be compiled: try again later") from None
