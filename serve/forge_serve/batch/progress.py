"""Progress of a run: a bar on terminals and a summary at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forge_jax.host.progress import progress_bar

REFRESH_S = 0.5


@dataclass
class Counts:
    """Lines and tokens of a run."""

    requests: int
    found: int  # lines that earlier runs completed
    answered: int = 0
    errors: int = 0  # failed lines, which are part of `answered`
    tokens: int = 0  # generated tokens
    begin_s: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(time.monotonic() - self.begin_s, 1e-3)

    def summary(self) -> str:
        parts = [f"{self.answered} of {self.requests} lines done"]
        if self.found:
            parts[0] += f" now, {self.found} before"
        if self.errors:
            parts.append(f"{self.errors} of them failed")
        seconds = time.monotonic() - self.begin_s
        parts.append(
            f"{self.tokens} tokens generated in {seconds:.1f} s ({self.tokens_per_s:,.0f} tokens/s)"
        )
        return "; ".join(parts)


class Progress:
    """Progress bar on stderr, if that is a terminal.

    Args:
      counts: the counts of the run.
      tokens: returns the number of tokens that the engine has generated.
      quiet: True to show no bar.
    """

    def __init__(self, counts: Counts, tokens: Callable[[], int], *, quiet: bool):
        self._counts, self._tokens, self._before = counts, tokens, tokens()
        self._bar = progress_bar(
            total=counts.requests, initial=counts.found, unit="lines", show=not quiet
        )

    async def keep_fresh(self) -> None:
        """Refresh the bar periodically, without end, if there is one."""
        while not self._bar.disable:
            self.refresh()
            await asyncio.sleep(REFRESH_S)

    def refresh(self) -> None:
        """Update the token counts, including lines in progress."""
        counts = self._counts
        counts.tokens = self._tokens() - self._before
        if not self._bar.disable:
            errors = f", {counts.errors} errors" if counts.errors else ""
            self._bar.set_postfix_str(f"{counts.tokens_per_s:,.0f} tokens/s{errors}")

    def line(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self.refresh()
        self._bar.close()
