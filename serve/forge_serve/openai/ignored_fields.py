"""Fields of requests that this server does not know: each name is told once, in the log."""

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
    """What has been told: clients choose the names, so what is kept and logged is bounded."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, names: Iterable[str], known: Iterable[str] = ()) -> None:
        """Logs a line for each name that is new, until there have been `MAX_NAMES`.

        Args:
          known: the fields that there are, of which the nearest is suggested.
        """
        for name in names:
            shown = _ODD.sub("?", name[:MAX_NAME_CHARS])
            if len(self._told) >= MAX_NAMES:
                return
            if shown not in self._told:
                self._told.add(shown)
                similar = did_you_mean(shown, known)
                log.info("requests have a field %s, which is ignored%s (said once)", shown, similar)
