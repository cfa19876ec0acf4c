"""Draw metrics of runs as one SVG with a panel per metric, without any plotting library.

python -m benchmarks curve RUN_OR_METRICS.jsonl [...] --metrics reward/mean log/pass@1 --out curve.svg
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, GAP = 720, 200, 56, 28, 18
STROKES = (("#0072b2", ""), ("#d55e00", "6 3"), ("#009e73", "2 3"), ("#cc79a7", "8 2 2 2"))
"""Colour (colour-blind safe) and dash of each run: never colour alone."""


def read(path: Path) -> list[dict[str, float]]:
    """Steps of a run's folder or of a metrics file."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def points(steps: list[dict[str, float]], metric: str) -> list[tuple[float, float]]:
    return [(step["step"] + 1, step[metric]) for step in steps if isinstance(step.get(metric), int | float)]


def panel(series: list[list[tuple[float, float]]], title: str, top: float) -> list[str]:
    """SVG of one metric for all runs."""
    every = [point for line in series for point in line]
    if not every:
        return []
    most_x, most_y = max(x for x, _ in every), max(max(y for _, y in every), 1e-9)
    scale_y = 1.0 if most_y <= 1.0 else most_y
    drawn = [f'<text x="{LEFT}" y="{top + 12}" font-weight="bold">{escape(title)}</text>']
    low, high = top + HEIGHT - BOTTOM, top + 20
    for tick in (0.0, 0.5, 1.0):
        y = low - tick * (low - high)
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ccc"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick * scale_y:.3g}</text>')
    drawn.append(f'<text x="{WIDTH - 8}" y="{low + 16}" text-anchor="end">step {most_x:.0f}</text>')
    for number, line in enumerate(series):
        color, dash = STROKES[number % len(STROKES)]
        at = " ".join(
            f"{LEFT + x / most_x * (WIDTH - 8 - LEFT):.1f},{low - min(y / scale_y, 1) * (low - high):.1f}"
            for x, y in line
        )
        drawn.append(
            f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
    return drawn


def draw(runs: dict[str, list[dict[str, float]]], metrics: list[str]) -> str:
    """The whole picture; `runs` maps a label to its steps."""
    body: list[str] = []
    for number, label in enumerate(runs):
        color, dash = STROKES[number % len(STROKES)]
        x = LEFT + number * 220
        body.append(
            f'<line x1="{x}" x2="{x + 30}" y1="12" y2="12" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        body.append(f'<text x="{x + 36}" y="16">{escape(label)}</text>')
    for number, metric in enumerate(metrics):
        body += panel([points(steps, metric) for steps in runs.values()], metric, 26 + number * (HEIGHT + GAP))
    height = 26 + len(metrics) * (HEIGHT + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">'
        f"<title>{escape(', '.join(metrics))}</title>" + "".join(body) + "</svg>\n"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="LABEL=PATH or PATH: a run's folder or a metrics file")
    parser.add_argument("--metrics", nargs="+", default=["reward/mean"])
    parser.add_argument("--out", required=True)
    a = parser.parse_args(argv)
    runs = {}
    for item in a.runs:
        label, _, path = item.rpartition("=")
        runs[label or Path(path).stem] = read(Path(path))
    Path(a.out).write_text(draw(runs, a.metrics))
    return 0


if __name__ == "__main__":
    main()
