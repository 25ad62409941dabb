"""Detection of stop strings in streamed text, across token boundaries."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from forge_jax.errors import RequestError


class StopStrings:
    """A filter that finds stop strings, and holds back text that may be the beginning of one.

    The text stops as soon as it ends with a stop string. If it ends with several, the longest
    counts. The result depends only on the text, not on token boundaries or the order of the
    strings. No text after the match is needed.

    `copy.copy` of an unused object is another one that shares the automaton.

    The automaton is that of Aho and Corasick (Communications of the ACM 18(6), 1975). Each
    character takes amortized constant time. The depth of a state is the number of characters that
    may still become a match.

    Raises:
      RequestError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False):
        if not all(stops):
            raise RequestError("a stop string must not be empty", param="stop")
        self._include = include_stop_str_in_output
        self._next: list[dict[str, int]] = [{}]  # in state 0 no stop string has begun
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._fail = [0] * len(self._next)
        self._link()
        self._state = 0
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that may be sent now, and the stop string if it was found.

        If a stop string is found, the text ends before it, or after it if it is included. No more
        text may be pushed then.

        Args:
          may_stop: if False, a stop string that ends in `text` does not count. One that only begins
            in `text` still counts.
        """
        assert not self._stopped, "push after a stop string was found"
        held, state = self._held, self._state
        for n, char in enumerate(text, start=1):
            while state and char not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(char, 0)
            stop = self._match[state]
            if stop is not None and may_stop:
                self._stopped = True
                self._held = ""
                end = len(held) + n
                return (held + text)[: end if self._include else end - len(stop)], stop
        self._state = state
        text = held + text
        # An included stop string is sent in either case, so nothing has to wait.
        safe = len(text) if self._include else len(text) - self._depth[state]
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """Return the text that was held back, after a text without a stop string has ended."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][char]
        self._match[state] = stop

    def _link(self) -> None:
        """Link each state to its fallback: the longest proper suffix that begins a stop string."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                fallback = self._fail[state]
                while fallback and char not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(char, 0)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)
