"""Where contexts stand in a text that grows at its end and is forgotten from its beginning.

A context is the last few tokens before a position. An index holds contexts of a few lengths only,
in dictionaries of their hashes, and enters a position under a longer one only where the shorter one
inside it stands twice: text that does not repeat costs little more than one entry a token.
Positions with the same context are chained, latest first. Nothing is counted, so forgetting the
oldest positions takes no search and leaves nothing behind.

Why not a tree or an automaton, with figures: docs/log.md. A depth-limited trie needs 20 times the
memory and its insertions cost the depth; a suffix automaton is as fast and needs twice the memory,
but it can neither forget nor say where else a context stands.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable
from collections.abc import Sequence as Seq

# A dictionary is copied as it grows, and a large one would stop its caller for long.
_SHARDS = 16
_SHARD_SHIFT = 57  # by the hash's high bits: a dictionary looks at the low ones first

_FORGET = 128  # tokens at a time
_FREE = 1024  # entries at a time: all of a long text's at once would take tens of milliseconds
_COMPARED = 8  # tokens that tell whether a text is the one that was followed


class NgramIndex:
    """Finds where the longest context of `lengths` that ends a given text stands.

    How the tokens came, one by one or at once, makes no difference, and forgetting is exact: what
    is found is what would be found if the forgotten positions had never been entered.

    Token ids may be any integers. Contexts are told apart by a 64-bit hash, so whoever reads must
    compare the text itself.

    Attributes:
      text: the tokens from position `base` on. None stands where another text begins.
      start: the first position that is not forgotten. The text keeps `reach` tokens before it.
      mark, source: for the owner to note something.
    """

    def __init__(self, lengths: Seq[int], reach: int):
        assert lengths and list(lengths) == sorted(set(lengths)) and lengths[0] > 0
        assert lengths[-1] <= reach
        self._lengths = tuple(lengths)
        self._reach = reach
        # The latest position of each context: never a forgotten one.
        self._heads: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        # For position p and lengths[i], at (p - base) * len(lengths) + i: how far back the position
        # before p with the same context is, 0 if there is none.
        self._back = array("i")
        self._first = 0  # contexts of what comes next reach back to here
        self._waiting: deque[tuple[int, int, int]] = deque()  # first, and the range to enter
        self.text: list[int | None] = []
        self.base = 0
        self.start = 0
        self.mark = 0
        self.source: Hashable = None

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.base + len(self.text)

    def __len__(self) -> int:
        """Positions held."""
        return self.base + len(self.text) - self.start

    @property
    def num_waiting(self) -> int:
        """Positions that `enter` has not come to."""
        return self.end - max(self._waiting[0][1], self.start) if self._waiting else 0

    @property
    def num_entries(self) -> int:
        """Contexts held, each with its latest position."""
        return sum(map(len, self._heads))

    def begin(self, before: Seq[int] = ()) -> None:
        """Another text begins. `before` is not entered: contexts reach back into it."""
        self._grow((None,))
        self._first = self.end
        self._grow(before)

    def append(self, tokens: Seq[int]) -> None:
        """Goes on with the text. Nothing of it is found before `enter`."""
        waiting, end = self._waiting, self.end
        self._grow(tokens)
        if waiting and waiting[-1][2] == end:
            waiting.append((*waiting.pop()[:2], self.end))
        else:
            waiting.append((self._first, end, self.end))

    def extend(self, tokens: Seq[int]) -> None:
        """`append` and `enter`, for an index where nothing else waits."""
        begin = len(self.text)
        self._grow(tokens)
        self._enter(self._first - self.base, range(begin, len(self.text)))

    def _grow(self, tokens: Seq[int | None]) -> None:
        self.text.extend(tokens)
        self._back.frombytes(bytes(len(tokens) * len(self._lengths) * self._back.itemsize))

    def enter(self, limit: int) -> None:
        """Enters the first `limit` of the tokens that wait, under the contexts before each."""
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
                    break  # it stands here only, and so does every longer one
                back[at * width + i] = base + at - last
                if not back[(last - base) * width + i]:
                    self._lengthen(last - base, i + 1)

    def _lengthen(self, at: int, i: int) -> None:
        """Enters a position whose shorter context has stood there only, until now."""
        if i < len(self._lengths) and at >= self._lengths[i]:
            key = hash(tuple(self.text[at - self._lengths[i] : at]))
            self._heads[key >> _SHARD_SHIFT & _SHARDS - 1][key] = self.base + at

    def find(self, tail: Seq[int], limit: int) -> tuple[list[int], int]:
        """Where in `text` the tokens stand that follow the longest context that `tail` ends with.

        Returns the latest `limit` places, latest first, and the context's length. A collision of
        hashes may put wrong places among them.
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
        """Forgets everything. Returns the entries, which take long to free."""
        entries, self._heads = self._heads, [{} for _ in range(_SHARDS)]
        self._waiting.clear()
        self.base = self.start = self._first = self.end
        self.text = []
        self._back = array("i")
        return entries

    def forget(self, count: int) -> None:
        """Forgets the `count` oldest positions."""
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
    """Indexes by name that hold at most `max_tokens` altogether.

    Who holds most forgets first, its oldest tokens: nobody loses anything to another while it
    holds less than an equal share. Of more than `max_names`, the one used longest ago is dropped.
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
        """Entries of dropped indexes that are still to be freed, a few with each call."""
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
        """The index of one text, whose positions are those in `tokens`.

        It takes in at most `limit` tokens: what is beyond `index.end` is for the next call. A text
        that is not the one known by this name, grown, is begun anew.
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
        """More text under this name, for `NgramIndex.enter` to enter.

        It goes on with the last text if that is of the same source and `goes_on`. Otherwise it is
        another one, which stands after `before`.
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
    """How many tokens before `text[at]` are those that `tail` ends with; 0 if not even `least`."""
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
