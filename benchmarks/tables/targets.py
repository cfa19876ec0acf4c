"""What the table promises, and whether a run kept it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """One figure.

    Example:
        Target("1", "W1 handed over, against TransferQueue", "w1/TransferQueue", ">=", 100, 170, "103 / 172")
    """

    number: str
    metric: str
    figure: str
    """Key of the figure among those of a run."""
    sign: str
    """">=" or "<=": which side of the bound is kept."""
    must: float
    stretch: float | None
    prototype: str
    """What the throwaway prototype reached, which the bounds were made from."""
    is_speed: bool = True
    """Without compiled kernels half of it is enough; bytes are the same with and without."""
    unit: str = "x"

    def keeps(self, value: float, bound: float) -> bool:
        return value >= bound if self.sign == ">=" else value <= bound

    def bound(self, *, compiled: bool) -> float:
        if compiled or not self.is_speed:
            return self.must
        return self.must / 2 if self.sign == ">=" else self.must * 2

    def row(self, figures: Mapping[str, float], *, compiled: bool) -> list[str]:
        """number, metric, must, stretch, prototype, measured, ok"""
        must = self.bound(compiled=compiled)
        stretch = "" if self.stretch is None else f"{self.sign}{_number(self.stretch)}"
        value = figures.get(self.figure)
        cells = [self.number, self.metric, f"{self.sign}{_number(must)}{self.unit}", stretch, self.prototype]
        if value is None:
            return [*cells, "", "not measured"]
        verdict = "ok" if self.keeps(value, must) else "MISSED"
        if verdict == "ok" and self.stretch is not None and self.keeps(value, self.stretch):
            verdict = "ok, stretch"
        return [*cells, f"{_number(value)}{self.unit}", verdict]


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


HEADER = ("#", "metric", "must", "stretch", "prototype", "measured", "")

TARGETS = (
    Target("1", "W1 handed over, against TransferQueue", "w1/TransferQueue", ">=", 100, 170, "103-172"),
    Target("2", "  against Ray, list of dicts", "w1/Ray put list[dict]", ">=", 10, 17, "11.5-17.5"),
    Target("2", "  against Ray, flat columns", "w1/Ray put flat columns", ">=", 3, 6, "3.5-6.5"),
    Target("3", "  against DataProto-style bytes", "w1/DataProto-style bytes", ">=", 15, 25, "17.6-27"),
    Target("3", "  against Arrow Flight", "w1/Arrow Flight loopback", ">=", 4, 7, "4.0-6.9"),
    Target("3", "  against Arrow IPC files in memory", "w1/Arrow IPC file", ">=", 2, 3, "2.2-3.4"),
    Target("4", "W2 handed over, against TransferQueue", "w2/TransferQueue", ">=", 25, None, "31"),
    Target("4", "  against DataProto-style bytes", "w2/DataProto-style bytes", ">=", 30, None, "36"),
    Target("4", "  against Ray, flat columns", "w2/Ray put flat columns", ">=", 2, None, "2.3"),
    Target("5", "read in order, against list + pad_sequence", "seq/list", ">=", 4.5, 5.5, "5.0-5.8"),
    Target("5", "  against the best store of fixed shapes", "seq/fixed", ">=", 2, 2.4, "2.4"),
    Target("5", "  the same, loader with reuse=True", "reuse seq/fixed", ">=", 2, 2.4, "2.4"),
    Target("5", "  against HF datasets, NumPy", "seq/HF", ">=", 18, None, "20"),
    Target("6", "read at random, against list + pad_sequence", "rand/list", ">=", 4, None, "4.6"),
    Target("6", "  against cpprb", "rand/cpprb", ">=", 1.7, None, "1.9"),
    Target("6", "  the same, loader with reuse=True", "reuse rand/cpprb", ">=", 1.7, None, "1.9"),
    Target("6", "  against HF datasets, NumPy", "rand/HF", ">=", 22, None, "26-30"),
    Target("6", "  against Arrow LZ4 files, a row at a time", "rand/LZ4", ">=", 500, None, "600"),
    Target("7", "part of what memory allows, padded", "limit/padded", ">=", 0.65, 0.8, ".73", unit=""),
    Target("7", "  the same, of two buffers in turn", "limit/padded, two", ">=", 0.65, 0.8, "", unit=""),
    Target("7", "  the same, loader with reuse=True", "limit/padded, reuse", ">=", 0.65, 0.8, ".73", unit=""),
    Target("7", "  packed", "limit/packed", ">=", 0.5, 0.8, ".54", unit=""),
    Target("8", "resident bytes of W1, of the padded ones", "bytes/padded", "<=", 0.27, None, ".26", False),
    Target("8", "  of the ragged ones", "bytes/ragged", "<=", 0.86, None, ".85", False),
    Target("9", "cold W1 with text, LZ4 class", "cold/w1", "<=", 0.65, None, ".62", False),
    Target("9", "  the 64 logits, LZ4 class", "cold/logits", "<=", 0.45, None, ".44", False),
    Target("9", "  the 64 logits, zstd", "cold/logits zstd", "<=", 0.45, 0.33, ".30", False),
    Target("10", "8 rows padded in another process, p50", "group/p50", "<=", 0.5, 0.3, ".22-.33", unit=" ms"),
    Target("10", "  p99", "group/p99", "<=", 2, 1, ".65-1.3", unit=" ms"),
    Target("10", "  consumer that spins, p50", "group spinning/p50", "<=", 0.5, 0.3, ".22", unit=" ms"),
    Target("10", "  consumer that spins, p99", "group spinning/p99", "<=", 2, 1, ".65", unit=" ms"),
    Target("11", "a float for each of 4096 rows, later", "column/ms", "<=", 5, 3, "2.8-3.5", unit=" ms"),
    Target("11", "  old bytes rewritten for it", "column/rewritten", "<=", 0, None, "0", False, " B"),
    Target("12", "wait of a trainer that works 3 ms, p50", "stall/p50", "<=", 150, 75, "73", unit=" us"),
    Target("13", "kill -9: committed rows that are not whole", "kill/corrupt", "<=", 0, None, "0 of 8", False, " rows"),
    Target("13", "  rows lost in any kill", "kill/lost", "<=", 255, 0, "1 slot", False, " rows"),
)
