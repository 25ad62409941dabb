"""Human-readable quantities."""

from __future__ import annotations


def bytes_text(number: int) -> str:
    """Return a size in decimal units: `"850 bytes"`, `"10 MB"`, `"1.5 GB"`, `"141 GB"`."""
    if number < 1000:
        return f"{number} bytes"
    units = ["kB", "MB", "GB", "TB"]
    size, unit = number / 1000, units.pop(0)
    while size >= 999.5 and units:
        size, unit = size / 1000, units.pop(0)
    return f"{size:.1f} {unit}" if size < 9.95 else f"{size:.0f} {unit}"
