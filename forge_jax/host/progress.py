"""Progress bars in one style: widgets in notebooks, text on terminals, nothing elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

from tqdm import tqdm


def progress_bar(*, unit: str, show: bool = True, **options: Any) -> tqdm[Any]:
    """Return a tqdm bar on stderr. Unless that is a terminal or a notebook, it shows nothing.

    Args:
      unit: plural noun for the things that are counted, or `"B"` for bytes.
      show: False to show nothing anywhere.
      options: more options of tqdm, such as `total` and `desc`.
    """
    of_unit = {"unit": "B", "unit_scale": True} if unit == "B" else {"unit": f" {unit}"}
    shared = {"dynamic_ncols": True, "disable": None if show else True}
    options = {**of_unit, **shared, **options}
    # Without ipywidgets, importing `tqdm.auto` in a notebook prints a warning.
    if find_spec("ipywidgets") is None:
        return tqdm(**options)
    from tqdm.auto import tqdm as auto

    return auto(**options)


def kernels_bar(total: int) -> tqdm[Any]:
    """Return the bar of a build of the CPU kernels, over the runs of the compiler."""
    return progress_bar(total=total, desc="building the CPU kernels", unit="parts")


def bar_of(progress: bool | tqdm[Any], **options: Any) -> AbstractContextManager[tqdm[Any]]:
    """Return the context of a new bar with these options, or of a given bar, left open."""
    if isinstance(progress, tqdm):
        return nullcontext(progress)
    return progress_bar(show=progress, **options)
