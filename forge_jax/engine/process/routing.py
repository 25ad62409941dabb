"""`Router`: chooses the engine of each request by cached prefix and load. It does no I/O.

Each request goes to the engine with the fewest prompt tokens to compute, including those of waiting
requests, plus `SAMPLE_TOKENS` per unfinished sample.

The router estimates which blocks an engine has cached from the requests that it has sent there.
Unlike KV events, this needs no message from an engine, and it includes prompts that are still being
computed. It does not observe evictions, so it stores only as many hashes as an engine has blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forge_jax.engine.streams import samples_of
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import Request, cache_name

SAMPLE_TOKENS = 128  # the cost of an unfinished sample, in prompt tokens
_WORD = array("q").itemsize


class PrefixIndex:
    """Hashes of the blocks that an engine has probably cached, the least recently used first.

    Args:
      capacity: maximum number of blocks.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Iterable[int]) -> int:
        """Return the number of leading blocks that are cached."""
        count = 0
        for each in hashes:
            if each not in self._hashes:
                break
            count += 1
        return count

    def add(self, hashes: Seq[int]) -> None:
        """Record that the blocks of a sequence, in token order, are in use now."""
        for each in reversed(hashes):  # a prefix must not be dropped before its continuation
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()


@dataclass(slots=True, eq=False, kw_only=True)
class Route:
    """An unfinished request on its engine.

    Attributes:
      engine: index of the engine.
      hashes: hashes of the prompt's full blocks.
      uncomputed: prompt tokens that the engine has to compute; 0 from the first token on.
      outputs: tokens of the unfinished samples, by index.
    """

    engine: int
    request: Request
    hashes: list[int]
    uncomputed: int
    outputs: dict[int, list[int]]


@dataclass(slots=True)
class _Engine:
    index: PrefixIndex
    num_samples: int = 0  # unfinished ones
    uncomputed: int = 0  # prompt tokens of requests without a first token


@dataclass(slots=True)
class Router:
    """The state of several equal engines, as far as their requests determine it.

    Engines have numbers, and need not be announced.

    Args:
      block_size: tokens per block of their KV caches.
      num_blocks: blocks of each KV cache; 0 without a prefix cache.
    """

    block_size: int
    num_blocks: int
    _engines: defaultdict[int, _Engine] = field(init=False)

    def __post_init__(self) -> None:
        self._engines = defaultdict(lambda: _Engine(PrefixIndex(self.num_blocks)))

    def route(self, request: Request, engines: Iterable[int]) -> Route:
        """Choose one of the engines for a request, and count the request there.

        At equal cost, the engine with fewer stored hashes is chosen, then the first one.
        """
        tokens, outputs = request.prompt_token_ids, request.outputs or {}
        hashes = self._hashes(hash(cache_name(request)), tokens)
        uncomputed = {
            each: len(tokens) - self.block_size * self._engines[each].index.match(hashes)
            for each in engines
        }

        def cost(each: int) -> tuple[int, int, int]:
            engine = self._engines[each]
            load = engine.uncomputed + SAMPLE_TOKENS * engine.num_samples
            return uncomputed[each] + load, len(engine.index), each

        chosen = min(uncomputed, key=cost)
        route = Route(
            engine=chosen,
            request=request,
            hashes=hashes,
            uncomputed=uncomputed[chosen],
            outputs={index: list(outputs.get(index, ())) for index in samples_of(request)},
        )
        engine = self._engines[chosen]
        engine.index.add(hashes)
        engine.num_samples += len(route.outputs)
        engine.uncomputed += route.uncomputed
        return route

    def take(self, route: Route, deltas: Iterable[Delta]) -> None:
        """Count the tokens and the finished samples of a request."""
        engine = self._engines[route.engine]
        self._computed(route)
        for delta in deltas:
            output = route.outputs.get(delta.index)
            if output is None:
                continue
            output += delta.token_ids
            if delta.finish_reason is not None:
                del route.outputs[delta.index]
                engine.num_samples -= 1
                engine.index.add(self._sequence_hashes(route, output))

    def discard(self, route: Route) -> None:
        """Stop counting a request, because its engine did not accept it or another one gets it."""
        self._computed(route)
        self._engines[route.engine].num_samples -= len(route.outputs)
        route.outputs.clear()

    def forget(self, engine: int) -> None:
        """Drop the hashes of an engine whose process has been replaced."""
        self._engines[engine].index.clear()

    def _computed(self, route: Route) -> None:
        self._engines[route.engine].uncomputed -= route.uncomputed
        route.uncomputed = 0

    def _sequence_hashes(self, route: Route, output: Seq[int]) -> list[int]:
        """Return the hashes of the full blocks of the prompt and a sample's output."""
        done = len(route.hashes) * self.block_size
        rest = (*route.request.prompt_token_ids[done:], *output)
        parent = route.hashes[-1] if route.hashes else hash(cache_name(route.request))
        return route.hashes + self._hashes(parent, rest)

    def _hashes(self, parent: int, tokens: Seq[int]) -> list[int]:
        """Return a hash for each full block: of its tokens, and of all before them.

        A collision only leads to a worse choice, so Python's hash suffices.
        """
        if not self.num_blocks:
            return []
        data, width = array("q", tokens).tobytes(), self.block_size * _WORD
        hashes = []
        for end in range(width, len(data) + 1, width):
            parent = hash((parent, data[end - width : end]))
            hashes.append(parent)
        return hashes
