"""How many bytes a table saves on each column of the workload, without loss.

    python -m benchmarks.tables.stored            # a Markdown table, for docs/tables/speed.md

Raw bytes are ragged, with prompts once for each group and masks in bits: what a table without compression holds. The last two
lines are LZ4 alone: on the logits as they are, and padded with zeros to the longest response.
"""

from __future__ import annotations

import sys

import numpy as np

import flowrl as fr
from benchmarks.common import table as markdown
from benchmarks.tables.workload import FULL, LOGITS, QUICK, W2, Workload, load
from flowrl.store.codecs import encode_buffer

ROWS = 512
TEXT = "response"


def stored(workload: Workload, compression: str) -> dict[str, tuple[int, float, str]]:
    """Raw bytes, the share that is saved, and the codec, by column."""
    rows = min(ROWS, workload.size.logit_rows)
    with fr.ExperienceTable(compression=compression, hot_bytes=0, chunk_rows=min(256, rows)) as table:
        for first in range(0, rows, 256):
            part = workload.rows(W2, first, min(first + 256, rows))
            texts = workload.texts[first : first + len(part)]
            named = [{**row, TEXT: text} for row, text in zip(part, texts, strict=True)]
            table.append(named, {LOGITS: fr.TOKEN.f16[64]})
        table.compress()
        return {
            name: (column.raw_bytes, 1 - 1 / column.ratio, " ".join(column.codecs))
            for name, column in table.stats().columns.items()
            if name in (*W2, TEXT)
        }


def lz4(values: np.ndarray) -> float:
    """The share that LZ4 alone saves."""
    encoded = encode_buffer(values.reshape(-1).view(np.uint8), "lz4", itemsize=values.itemsize, inner=1)
    return 1 - len(encoded) / values.nbytes


def logits(workload: Workload, rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Those of the first rows: end to end, and padded with zeros [rows, longest, 64]."""
    parts = [workload.one(LOGITS, row) for row in range(min(rows, workload.size.logit_rows))]
    padded = np.zeros((len(parts), max(map(len, parts)), parts[0].shape[1]), np.float16)
    for row, part in enumerate(parts):
        padded[row, : len(part)] = part
    return np.concatenate(parts), padded


def main(size: str = "full") -> str:
    workload = load(QUICK if size == "quick" else FULL)
    fast, small = stored(workload, "lz4"), stored(workload, "zstd")
    lines = [
        [f"`{name}`", f"{raw / 1e6:.2f} MB", f"{saved:.0%}", codec, f"{small[name][1]:.0%}", small[name][2]]
        for name, (raw, saved, codec) in fast.items()
    ]
    ragged, padded = logits(workload)
    lines.append([f"`{LOGITS}` without `codecs`", "", f"{lz4(ragged):.0%}", "lz4", "", ""])
    lines.append(
        [
            f"`{LOGITS}`, padded",
            f"{padded.nbytes / ragged.nbytes:.1f} times as much",
            f"{lz4(padded):.0%}",
            "lz4",
            "",
            "",
        ]
    )
    return markdown(["column", "raw", '`"lz4"` saves', "codec", '`"zstd"` saves', "codec"], lines)


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
