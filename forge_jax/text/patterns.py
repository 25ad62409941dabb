"""A check that a tokenizer's regular expressions take about linear time.

The `tokenizers` library runs them on Oniguruma, which backtracks and cannot be interrupted.
Therefore each pattern is checked when the model is loaded:

- The patterns of common model families are known to take linear time.
- Other patterns must not repeat a group that itself repeats or has alternatives (`(a+)+`,
  `(a|ab)*`), because these cause exponential time. References, calls and conditions are rejected.
- They are also timed on short texts of growing length that make backtracking quadratic. A pattern
  like `a+b` fails at a few thousand characters.

The trial misses patterns whose time grows only after a prefix that none of the texts has. For
these, Oniguruma's limit of ten million steps per match ends the encoding with an error.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator

from tokenizers import PreTokenizedString, Regex, pre_tokenizers

from forge_jax.host.panics import is_panic

MAX_PATTERN = 4096  # characters
MAX_REPEAT = 1000  # limit of `x{n}`, or of the product of nested repetitions
MAX_UNBOUNDED = 4  # unbounded quantifiers in one alternative
MAX_GROUPS = 32  # nested

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTIONS
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTIONS
    + "?"
)
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_WITH_SLASH = _TAIL.replace(r"[\r\n]*|\s*", r"[\r\n/]*|\s*")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL  # also Llama 3
QWEN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL  # Qwen 2 and 3
# Qwen 3.5, with marks in words
QWEN_MARKS = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
GPT4O = _CASED + r"|\p{N}{1,3}|" + _TAIL_WITH_SLASH  # also gpt-oss
TEKKEN = _CASED.replace(_CONTRACTIONS + "?", "") + r"|\p{N}|" + _TAIL_WITH_SLASH  # Mistral Nemo
# DeepSeek V3's, applied one after the other: digits, Chinese and Japanese, and all else.
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CHINESE_JAPANESE_KOREAN = r"[一-龥\x{800}-一가-\x{D7FF}]+"
# Published patterns that take quadratic time, and patterns with the same matches that do not.
# Without the condition, a run of spaces before another character is tried from each space.
LINEAR = {r"\s+$": r"(?<!\s)\s+$"}  # DeepSeek V2's
# Letters with case in old versions of Unicode. Normalization would change those given as numbers.
_CASED_LETTERS = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    r"Ὀ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ"
    r"\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
# DeepSeek V2's and DeepSeek Coder's, applied one after the other. Single digits follow.
DEEPSEEK_V2 = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
    LINEAR[r"\s+$"],
    _CHINESE_JAPANESE_KOREAN,
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_JAPANESE_KOREAN)
# Kimi K2's: GPT-4o's with Chinese characters apart.
_NOT_HAN = r"\p{M}&&[^\p{Han}]]"
KIMI = r"[\p{Han}]+|" + _CASED.replace(r"\p{M}]", _NOT_HAN) + r"|\p{N}{1,3}|" + _TAIL
SEED = QWEN.replace(r"+[\r\n]*|", "+|")  # Seed-OSS
# The last two are parts of published tokenizers.
KNOWN = frozenset(
    {GPT2, GPT4, QWEN, QWEN_MARKS, GPT4O, TEKKEN, KIMI, SEED}
    | {*DEEPSEEK_V2, *DEEPSEEK_CODER, *DEEPSEEK_V3, r"\s+", r" {2,}"}
)


class PatternError(ValueError):
    """A rejected pattern; the message is the reason."""


def check_pattern(pattern: str) -> None:
    """Raise PatternError if the pattern may take more than linear time."""
    if pattern in KNOWN:
        return
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"it has {len(pattern)} characters; at most {MAX_PATTERN} are allowed")
    _Structure(pattern).check()
    _try(pattern)


class _Structure:
    """A parser of a pattern's groups and quantifiers, which treats all else as single atoms."""

    def __init__(self, pattern: str):
        self.text, self.at = pattern, 0

    def check(self) -> None:
        self._alternatives(0)
        if self.at < len(self.text):
            raise PatternError("it has an unmatched parenthesis")

    def _alternatives(self, depth: int) -> tuple[bool, int]:
        """Parse alternatives.

        Returns:
          True if a match may be empty or end at several places, and the product of repetitions.
        """
        if depth > MAX_GROUPS:
            raise PatternError(f"its groups are nested more than {MAX_GROUPS} levels deep")
        varies, empty, repeats, unbounded = False, True, 1, 0
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "|":
                self.at, varies, unbounded = self.at + 1, True, 0
                continue
            inner_varies, inner_repeats = self._atom(depth)
            low, high = self._quantifier()
            if high is None:
                unbounded += 1
                if unbounded > MAX_UNBOUNDED:
                    raise PatternError(f"it has more than {MAX_UNBOUNDED} unbounded quantifiers")
            if (high is None or high > 1) and inner_varies:
                raise PatternError("it repeats a group that itself repeats or has alternatives")
            empty = empty and low == 0
            repeats = max(repeats, inner_repeats * (low if high is None else high))
            if repeats > MAX_REPEAT:
                raise PatternError(f"it repeats a part more than {MAX_REPEAT} times")
            varies = (
                varies or (inner_varies and high != 0) or high is None or (low != high and high > 1)
            )
        return varies or empty, repeats

    def _atom(self, depth: int) -> tuple[bool, int]:
        char = self.text[self.at]
        if char == "(":
            return self._group(depth)
        if char == "[":
            self._class()
        elif char == "\\":
            self._escape()
        elif char in "*+?":
            raise PatternError("it has a quantifier with nothing to repeat")
        else:
            self.at += 1
        return False, 1

    def _group(self, depth: int) -> tuple[bool, int]:
        self.at += 1
        if self.text.startswith("*", self.at):
            raise PatternError("it has a callout, which is not allowed")
        if self.text.startswith("?", self.at):
            self.at += 1
            for opening in ("<=", "<!", ":", "=", "!", ">"):
                if self.text.startswith(opening, self.at):
                    self.at += len(opening)
                    break
            else:
                while self.text[self.at : self.at + 1] in ("i", "m", "x", "s", "-"):
                    self.at += 1
                if self.text.startswith(")", self.at):  # (?i) applies to the rest
                    self.at += 1
                    return False, 1
                if not self.text.startswith(":", self.at):
                    raise PatternError("it has a group of a type that is not allowed")
                self.at += 1
        found = self._alternatives(depth + 1)
        if not self.text.startswith(")", self.at):
            raise PatternError("it has an unclosed group")
        self.at += 1
        return found

    def _class(self) -> None:
        """Skip a character class `[...]`, which may contain nested classes."""
        depth = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 2 if char == "\\" else 1
            if char == "[":
                depth += 1
                if depth > MAX_GROUPS:
                    raise PatternError("its classes are nested too deeply")
                if self.text.startswith("^", self.at):
                    self.at += 1
                if self.text.startswith("]", self.at):  # a leading "]" is a literal
                    self.at += 1
            elif char == "]":
                depth -= 1
                if depth == 0:
                    return
        raise PatternError("it has an unclosed character class")

    def _escape(self) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        if not following or following in "123456789kgK":
            raise PatternError("it refers to a group, which is not allowed")
        self.at += 2
        if following in "pPxo" and self.text.startswith("{", self.at):
            end = self.text.find("}", self.at)
            if end < 0:
                raise PatternError("it has an unclosed escape")
            self.at = end + 1

    def _quantifier(self) -> tuple[int, int | None]:
        """Return the lowest and highest repeat count of the last atom; None if unbounded."""
        low, high = 1, 1
        char = self.text[self.at : self.at + 1]
        if char in ("*", "+", "?"):
            self.at += 1
            low, high = (1 if char == "+" else 0), (1 if char == "?" else None)
        elif char == "{":
            end = self.text.find("}", self.at)
            first, comma, last = self.text[self.at + 1 : max(end, 0)].partition(",")
            numbers = [part for part in (first, last) if part]
            if end < 0 or not numbers or not all(n.isdecimal() and len(n) < 6 for n in numbers):
                return low, high  # a literal brace, which is the next atom
            self.at = end + 1
            low = int(first) if first else 0
            high = int(last) if last else (None if comma else low)
        else:
            return low, high
        if self.text[self.at : self.at + 1] in ("?", "+"):  # lazy, possessive
            self.at += 1
        if self.text[self.at : self.at + 1] in ("*", "+", "?"):
            raise PatternError("it repeats a group that itself repeats or has alternatives")
        return low, high


# Small texts come first, to detect exponential patterns before they take long. Then the time of
# long runs of a unit is compared with the time of as many units in short runs. Both texts have one
# length and need as much memory, whose allocation is slow on some machines. With a linear pattern,
# long runs take up to 1.8 times as long (4.4 with Kimi's). With a quadratic one, they take 7 to 15
# times as long as 16 short runs, and 25 to 60 times as long as 64.
#
# A busy machine makes single texts slower. Therefore each text of long runs is timed between texts
# of short runs, and the fastest of these counts. A quadratic pattern passes only if all of them are
# slowed down and the text between them is not. A linear one is rejected only if no trial passes.
SMALL_SIZES, SMALL_SECONDS = (8, 16, 24, 32, 64, 128, 256), 0.02
SHORT, MAX_SHORT = 128, 256  # characters of a short run
# Number of short runs, limit of the growth, and number of trials. More runs if no trial passes.
TRIALS = ((16, 3, 8), (64, 7, 3))
SMALL_TRIALS = 5
DISTANCE_S = 0.005  # between the first two trials; it grows
MIN_SECONDS = 0.0002  # shorter times are dominated by the clock's noise


def _try(pattern: str) -> None:
    trial = _Trial(pattern)
    for unit in _units(pattern):
        for size in SMALL_SIZES:
            trial.check_small(unit, size)
        trial.check_growth(unit)


class _Trial:
    """A pattern that is timed on texts."""

    def __init__(self, pattern: str):
        self.split = pre_tokenizers.Split(compiled(pattern), "isolated")
        # The library skips texts that are shorter than a match or lack a required character. The
        # first character is one that patterns do not name, so that a match does not end before it.
        own = re.sub(r"\W", "", pattern) + re.sub(r"\w", "", pattern)
        self.end = "\ue000\n" + own + "~" * 64
        self.short = min(max(SHORT, len(self.end)), MAX_SHORT)  # A long end hides the growth.

    def seconds(self, text: str) -> float:
        """Return the CPU time of splitting `text`."""
        begin = time.thread_time()
        try:
            self.split.pre_tokenize(PreTokenizedString(text))  # no object per match
        except BaseException as error:
            if not is_panic(error):
                raise
            raise PatternError("it backtracks without end") from None
        return time.thread_time() - begin

    def check_small(self, unit: str, size: int) -> None:
        text = _repeated(unit, size) + self.end
        taken = math.inf
        for _ in _trials(SMALL_TRIALS):
            taken = min(taken, self.seconds(text))
            if taken < SMALL_SECONDS:
                return
        raise PatternError(f"it backtracks: {len(text)} characters take {taken:.2g} s")

    def check_growth(self, unit: str) -> None:
        for num_runs, limit, num_trials in TRIALS:
            growth = self.growth(unit, num_runs, limit, num_trials)
            if growth < limit:
                return
        raise PatternError(
            f"it backtracks: a run of {self.short * num_runs} characters takes {growth:.2g} times "
            f"as long as {num_runs} runs of {self.short}"
        )

    def growth(self, unit: str, num_runs: int, limit: float, num_trials: int) -> float:
        """Return the time of long runs divided by the time of short runs, the lowest of the trials.

        Trials end when one is below `limit`. If the time is too short to compare, return 0.
        """
        separator = self.end[:MAX_SHORT]
        long_runs = _repeated(unit, self.short * num_runs) + separator * num_runs + self.end
        short_runs = (_repeated(unit, self.short) + separator) * num_runs + self.end
        if self.seconds(long_runs) < MIN_SECONDS:
            return 0.0
        growth = math.inf
        for _ in _trials(num_trials):
            before = [self.seconds(short_runs) for _ in range(2)]
            seconds = self.seconds(long_runs)
            after = [self.seconds(short_runs) for _ in range(2)]
            growth = min(growth, seconds / min(before + after))
            if growth < limit:
                break
        return growth


def _repeated(unit: str, size: int) -> str:
    return (unit * size)[:size]


def _trials(num: int) -> Iterator[None]:
    """Wait before each trial but the first, longer each time."""
    for trial in range(num):
        time.sleep(trial * DISTANCE_S)
        yield


def _units(pattern: str) -> Iterator[str]:
    """Return the units that the trial's texts repeat: characters of all kinds and pairs."""
    own = dict.fromkeys(char for char in pattern if char.isprintable() and char not in "\\[](){}")
    chars = list(dict.fromkeys([*"aA0 \n'.é中\u0301", *own]))[:24]
    yield from chars
    for first in chars:
        for second in chars:
            if first < second:
                yield first + second


def compiled(pattern: str) -> Regex:
    try:
        return Regex(pattern)
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise PatternError(f"it is invalid: {str(error)[:200]}") from None
        raise
