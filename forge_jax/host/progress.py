"""Progress bars: widgets in notebooks, text elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

from tqdm import tqdm


def progress_bar(**options: Any) -> tqdm[Any]:
    """Return a tqdm bar, which is a widget in a notebook with ipywidgets."""
    # Without ipywidgets, importing `tqdm.auto` in a notebook prints a warning.
    if find_spec("ipywidgets") is None:
        return tqdm(**options)
    from tqdm.auto import tqdm as auto

    return auto(**options)


def bar_of(progress: bool | tqdm[Any], **options: Any) -> AbstractContextManager[tqdm[Any]]:
    """Return the context of a new bar with these options, or of a given bar, left open."""
    if isinstance(progress, tqdm):
        return nullcontext(progress)
    return progress_bar(disable=not progress, **options)
