"""Progress bars: widgets in notebooks, text elsewhere."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from tqdm import tqdm


def progress_bar(**options: Any) -> tqdm[Any]:
    """Return a tqdm bar, which is a widget in a notebook with ipywidgets.

    If ipywidgets is missing, importing `tqdm.auto` in a notebook prints a warning.
    """
    if find_spec("ipywidgets") is None:
        return tqdm(**options)
    from tqdm.auto import tqdm as auto

    return auto(**options)
