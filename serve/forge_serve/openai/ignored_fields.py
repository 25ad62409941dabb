"""Log entries for unknown request fields: one for each name."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from forge_jax.config.suggest import did_you_mean

MAX_NAMES = 100
MAX_NAME_CHARS = 64
_ODD = re.compile(r"[^A-Za-z0-9_.-]")

log = logging.getLogger(__name__)


class IgnoredFields:
    """The names logged so far. Their number and length are bounded, because clients choose them."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, names: Iterable[str], known: Iterable[str] = ()) -> None:
        """Log a line for each new name, up to `MAX_NAMES` in all.

        Args:
          known: the supported fields. The line suggests a similar one.
        """
        for name in names:
            shown = _ODD.sub("?", name[:MAX_NAME_CHARS])
            if len(self._told) >= MAX_NAMES:
                return
            if shown not in self._told:
                self._told.add(shown)
                similar = did_you_mean(shown, known)
                log.info("ignoring unknown request field %s%s (logged once)", shown, similar)
