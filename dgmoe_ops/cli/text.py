"""What the commands share to print: a console that does not fold, and units."""

from __future__ import annotations

from rich.console import Console

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def console() -> Console:
    """A console; a log file has no width of its own, and 80 columns would fold every cell."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(width=120, highlight=False)


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1: `12.5 MiB`."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.2f} {_UNITS[unit]}"


def share(part: float, whole: float) -> str:
    """A percentage; of nothing it is a dash."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def microseconds(seconds: float | None) -> str:
    """A time in microseconds, a dash where there is none."""
    return "-" if seconds is None else f"{seconds * 1e6:.1f} us"
