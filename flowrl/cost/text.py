"""Numbers and tables as people read them. The same value always gives the same text."""

from __future__ import annotations

from collections.abc import Sequence

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def size_text(num_bytes: float) -> str:
    """`3.5 GiB`, `12.0 MiB`, `800 B`."""
    for unit, name in UNITS:
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} B"


def time_text(seconds: float) -> str:
    """`97.1 s`, `12.5 ms`; nothing takes `0 s`."""
    if not seconds:
        return "0 s"
    return f"{seconds:.1f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.1f} ms"


def change_text(found: float, base: float) -> str:
    """What is more or less than a base, in percent: `+3.2%`; `+0.0%` where there is no base."""
    return f"{found / base - 1 if base else 0.0:+.1%}"


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Lines with columns under each other; `sides` has l or r for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, sides, strict=True)
        lines.append("  ".join(t.ljust(width) if side == "l" else t.rjust(width) for t, width, side in cells).rstrip())
    return lines
