"""Stop strings in a stream of text, found across the boundaries of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from forge_jax.errors import RequestError


class StopStrings:
    """Watches a text for stop strings and holds back what may be the beginning of one.

    The text stops at the first moment at which it ends with a stop string. If several end there
    (one is then the end of another) the longest counts. So the outcome depends on the text alone,
    never on how it was cut into tokens or on the order of the strings, and nothing has to be
    generated beyond the match.

    `copy.copy` of a fresh one is another fresh one that shares the automaton.

    The automaton is Aho and Corasick's (Communications of the ACM 18(6), 1975): each character
    costs amortised constant time, and the depth of its state is how much may yet become a match.

    Raises `RequestError` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False):
        if not all(stops):
            raise RequestError("a stop string must not be empty", param="stop")
        self._include = include_stop_str_in_output
        self._next: list[dict[str, int]] = [{}]  # state 0: nothing of any stop string seen
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
        """Text that may be sent now, and the stop string if it was found.

        After a match the text ends before the stop string (after it, if it is to be included) and
        nothing more may be pushed. Without `may_stop` a stop string that ends in `text` does not
        count; one that only begins there does.
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
        # What will be sent in either case need not wait.
        safe = len(text) if self._include else len(text) - self._depth[state]
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
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
        """Gives each state its fallback: the longest proper suffix that begins a stop string."""
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
