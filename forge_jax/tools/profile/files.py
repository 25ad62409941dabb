"""From two folders of traces to what `forge-jax profile diff` prints and writes."""

from __future__ import annotations

from pathlib import Path

from forge_jax.errors import ConfigError
from forge_jax.tools.profile.compare import Threshold, compare
from forge_jax.tools.profile.report import html, text, write_tensorboard
from forge_jax.tools.profile.trace import read_traces


def compare_files(
    before: Path,
    after: Path,
    *,
    percent: float = 5.0,
    us: float = 1.0,
    html_file: Path | None = None,
    logdir: Path | None = None,
    everything: bool = False,
) -> str:
    """Compares the traces of two places: the text for a terminal.

    Args:
      percent, us: what has changed, has by at least so much.
      html_file, logdir: where to write the same as a page, and for TensorBoard.
      everything: show what has not changed, too.

    Raises:
      ConfigError: there is nothing to compare, or a file cannot be read or written.
    """
    befores, afters = read_traces(before), read_traces(after)
    comparisons = compare(befores, afters, Threshold(percent, us))
    if not comparisons:
        names = [", ".join(trace.name for trace in traces) for traces in (befores, afters)]
        raise ConfigError(
            f"no trace of {before} ({names[0]}) has the name of one of {after} ({names[1]}): "
            "name one folder of each to compare these two"
        )
    try:
        if html_file is not None:
            title = f"Profile {before} against {after}"
            html_file.write_text(html(comparisons, title), encoding="utf-8")
        if logdir is not None:
            write_tensorboard(comparisons, logdir)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    return text(comparisons, everything=everything)
