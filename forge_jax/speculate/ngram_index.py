"""An index of contexts in a text that grows at its end and is dropped from its beginning.

A context is the last few tokens before a position. An index has contexts of a few lengths, in
dictionaries of their hashes. A position is entered under a longer context only if the shorter one
inside it occurs twice. Text without repetition therefore costs little more than one entry per
token. Positions with the same context are chained, latest first. There are no counts, so the oldest
positions can be dropped without a search.

docs/log.md compares this with trees and automata. A depth-limited trie needs 20 times the memory,
and an insertion costs its depth. A suffix automaton is as fast and needs twice the memory. It can
neither drop positions nor list the occurrences of a context.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable
from collections.abc import Sequence as Seq

# A growing dictionary is copied, which blocks the caller. Shards keep each one small.
_SHARDS = 16
_SHARD_SHIFT = 57  # selects the hash's high bits, because dictionaries use the low bits

_FORGET = 128  # Tokens to drop at a time.
_FREE = 1024  # Entries to free at a time. All entries of a long text would take tens of ms.
_COMPARED = 8  # Tokens that identify the text of an earlier call.


class NgramIndex:
    """An index of the positions of contexts, which finds the longest one that ends a given text.

    The result does not depend on how many tokens were added at a time. Dropped positions affect it
    as little as if they had never been entered.

    Token ids may be any integers. Contexts are compared by a 64-bit hash, so callers must compare
    the text itself.

    Args:
      lengths: the context lengths to index, in ascending order.
      reach: the number of tokens before `start` that the text keeps.

    Attributes:
      text: the tokens from position `base` on. None marks the beginning of another text.
      start: the first position that is not dropped.
      mark: free for use by the owner.
      source: free for use by the owner.
    """

    def __init__(self, lengths: Seq[int], reach: int):
        assert lengths and list(lengths) == sorted(set(lengths)) and lengths[0] > 0
        assert lengths[-1] <= reach
        self._lengths = tuple(lengths)
        self._reach = reach
        # The latest position of each context, which is never a dropped one.
        self._heads: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        # The distance to the previous position with the same context, or 0 if there is none. The
        # index for position p and lengths[i] is (p - base) * len(lengths) + i.
        self._back = array("i")
        self._first = 0  # start of the current text, which limits contexts
        self._waiting: deque[tuple[int, int, int]] = deque()  # (`_first`, begin, end) to enter
        self.text: list[int | None] = []
        self.base = 0
        self.start = 0
        self.mark = 0
        self.source: Hashable = None

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.base + len(self.text)

    def __len__(self) -> int:
        """Return the number of positions, without dropped ones."""
        return self.base + len(self.text) - self.start

    @property
    def num_waiting(self) -> int:
        """The number of positions that `enter` has not entered yet."""
        return self.end - max(self._waiting[0][1], self.start) if self._waiting else 0

    @property
    def num_entries(self) -> int:
        """The number of contexts, each with its latest position."""
        return sum(map(len, self._heads))

    def begin(self, before: Seq[int] = ()) -> None:
        """Begin another text. `before` is not entered, but contexts may include its tokens."""
        self._grow((None,))
        self._first = self.end
        self._grow(before)

    def append(self, tokens: Seq[int]) -> None:
        """Append tokens to the text. `find` ignores them until `enter`."""
        waiting, end = self._waiting, self.end
        self._grow(tokens)
        if waiting and waiting[-1][2] == end:
            waiting.append((*waiting.pop()[:2], self.end))
        else:
            waiting.append((self._first, end, self.end))

    def extend(self, tokens: Seq[int]) -> None:
        """Append and enter tokens, in an index where no other tokens wait."""
        begin = len(self.text)
        self._grow(tokens)
        self._enter(self._first - self.base, range(begin, len(self.text)))

    def _grow(self, tokens: Seq[int | None]) -> None:
        self.text.extend(tokens)
        self._back.frombytes(bytes(len(tokens) * len(self._lengths) * self._back.itemsize))

    def enter(self, limit: int) -> None:
        """Enter the first `limit` of the waiting tokens, under the contexts before each."""
        while self._waiting and limit > 0:
            first, begin, end = self._waiting.popleft()
            begin = max(begin, self.start)
            stop = min(end, begin + limit)
            if stop < end:
                self._waiting.appendleft((first, stop, end))
            self._enter(first - self.base, range(begin - self.base, stop - self.base))
            limit -= max(stop - begin, 0)

    def _enter(self, first: int, places: range) -> None:
        text, base, lengths = self.text, self.base, self._lengths
        heads, back, width = self._heads, self._back, len(lengths)
        for at in places:
            for i, length in enumerate(lengths):
                if at - length < first:
                    break
                key = hash(tuple(text[at - length : at]))
                shard = heads[key >> _SHARD_SHIFT & _SHARDS - 1]
                last = shard.get(key, -1)
                shard[key] = base + at
                if last < 0:
                    break  # the context occurs only here, and so do all longer ones
                back[at * width + i] = base + at - last
                if not back[(last - base) * width + i]:
                    self._lengthen(last - base, i + 1)

    def _lengthen(self, at: int, i: int) -> None:
        """Enter a position under the next context, after its shorter one has occurred again."""
        if i < len(self._lengths) and at >= self._lengths[i]:
            key = hash(tuple(self.text[at - self._lengths[i] : at]))
            self._heads[key >> _SHARD_SHIFT & _SHARDS - 1][key] = self.base + at

    def find(self, tail: Seq[int], limit: int) -> tuple[list[int], int]:
        """Find the longest indexed context that ends `tail`.

        Returns:
          The indexes in `text` after its latest `limit` occurrences, latest first, and its length.
          Some indexes may be wrong because of hash collisions.
        """
        n, found, level = len(tail), -1, 0
        heads, start, base = self._heads, self.start, self.base
        for i, length in enumerate(self._lengths):
            if length > n:
                break
            key = hash(tuple(tail[n - length :]))
            last = heads[key >> _SHARD_SHIFT & _SHARDS - 1].get(key, -1)
            if last < 0:
                break
            found, level = last, i
        if found < 0:
            return [], 0
        places = [found - base]
        back, width = self._back, len(self._lengths)
        while len(places) < limit:
            step = back[(found - base) * width + level]
            found -= step
            if not step or found < start:
                break
            places.append(found - base)
        return places, self._lengths[level]

    def clear(self) -> list[dict[int, int]]:
        """Drop everything, and return the entries, which are slow to free."""
        entries, self._heads = self._heads, [{} for _ in range(_SHARDS)]
        self._waiting.clear()
        self.base = self.start = self._first = self.end
        self.text = []
        self._back = array("i")
        return entries

    def forget(self, count: int) -> None:
        """Drop the `count` oldest positions."""
        text, base, heads = self.text, self.base, self._heads
        count = min(count, len(self))
        for at in range(self.start - base, self.start - base + count):
            for length in self._lengths:
                if length > at:
                    break
                key = hash(tuple(text[at - length : at]))
                shard = heads[key >> _SHARD_SHIFT & _SHARDS - 1]
                last = shard.get(key)
                if last is None:
                    break
                if last == base + at:
                    del shard[key]
        self.start += count
        unused = self.start - base - self._reach
        if unused > 1024 + len(self) // 8:
            del text[:unused]
            del self._back[: unused * len(self._lengths)]
            self.base += unused


class IndexPool:
    """Named indexes with at most `max_tokens` tokens in total.

    At the limit, the largest index drops its oldest tokens, so an index with less than an equal
    share loses none. If there are more than `max_names`, the least recently used one is dropped.
    """

    def __init__(self, lengths: Seq[int], reach: int, max_tokens: int, max_names: int):
        assert max_tokens > 0 and max_names > 0
        self._lengths = tuple(lengths)
        self._reach = reach
        self._max_tokens = max_tokens
        self._max_names = max_names
        self._indexes: OrderedDict[Hashable, NgramIndex] = OrderedDict()
        self._dropped: list[dict[int, int]] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._indexes)

    @property
    def num_dropped(self) -> int:
        """The number of entries of dropped indexes, which later calls free in small batches."""
        return sum(map(len, self._dropped))

    def get(self, name: Hashable) -> NgramIndex | None:
        if self._dropped:
            self._free()
        index = self._indexes.get(name)
        if index is not None:
            self._indexes.move_to_end(name)
        return index

    def drop(self, name: Hashable) -> None:
        index = self._indexes.pop(name, None)
        if index is not None:
            self.num_tokens -= len(index)
            self._dropped += filter(None, index.clear())
            self._free()

    def _free(self) -> None:
        left = _FREE
        while self._dropped and left > 0:
            entries = self._dropped[-1]
            if len(entries) > left:
                for _ in range(left):
                    entries.popitem()
                return
            left -= len(entries)
            self._dropped.pop()

    def follow(self, name: Hashable, tokens: Seq[int], limit: int) -> NgramIndex:
        """Return the index of one text, with the positions of `tokens`.

        A call adds at most `limit` tokens, and later calls add the rest. If `tokens` does not
        continue the text of this name, the index is rebuilt.
        """
        index = self.get(name)
        end = 0
        if index is not None:
            end = index.end
            known = index.text[-_COMPARED:]
            if known != list(tokens[end - len(known) : end]):
                self.drop(name)
                index, end = None, 0
        if index is None:
            index = self._open(name)
        if end < len(tokens):
            new = tokens[end : end + limit]
            index.extend(new)
            self._count(len(new))
        return index

    def add(
        self, name: Hashable, source: Hashable, before: Seq[int], tokens: Seq[int], goes_on: bool
    ) -> None:
        """Append text to the index of this name, for `NgramIndex.enter` to enter.

        It continues the last text if `goes_on` and the source is the same. Otherwise it begins
        another text, which follows `before`.
        """
        index = self.get(name) or self._open(name)
        held = len(index)
        if not goes_on or index.source != source:
            index.begin(before)
            index.source = source
        index.append(tokens)
        self._count(len(index) - held)

    def _open(self, name: Hashable) -> NgramIndex:
        while len(self._indexes) >= self._max_names:
            self.drop(next(iter(self._indexes)))
        index = self._indexes[name] = NgramIndex(self._lengths, self._reach)
        return index

    def _count(self, grown: int) -> None:
        self.num_tokens += grown
        while self.num_tokens > self._max_tokens:
            largest = max(self._indexes.values(), key=len)
            held = len(largest)
            largest.forget(_FORGET)
            self.num_tokens -= held - len(largest)


def agreement(text: Seq[int | None], at: int, tail: Seq[int], least: int) -> int:
    """Return how many tokens before `text[at]` match the end of `tail`; 0 if below `least`."""
    end = len(tail)
    if least > at or text[at - least : at] != tail[end - least :]:
        return 0
    most = min(at, end)
    while least + 8 <= most:
        if text[at - least - 8 : at - least] != tail[end - least - 8 : end - least]:
            break
        least += 8
    while least < most and text[at - least - 1] == tail[end - least - 1]:
        least += 1
    return least
