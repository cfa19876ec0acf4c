"""What a person sees while a run goes on: a live panel in a terminal, a line per step elsewhere.

    with open_progress("auto", name="grpo", steps=100) as progress:
        progress.phase("rollout")
        progress.step(0, metrics, sample={"prompt": ..., "response": ..., "reward": ...})

Showing is never worth a run: whatever goes wrong here turns the view off and is said once, at the end.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

MODES = ("auto", "live", "plain", "off")
REFRESH_S = 0.2
"""Least time between two drawings of the panel; steps may be much quicker."""
HISTORY = 48
"""Steps in the sparkline."""
BARS = "▁▂▃▄▅▆▇█"
BAR_CHARS = 60
SAMPLE_CHARS = 600
"""Most characters of a prompt or response shown."""

SHOWN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward/mean",), "{:.3f}"),
    ("±", ("reward/std",), "{:.3f}"),
    ("loss", ("/loss",), "{:.4f}"),
    ("length", ("response_length/mean",), "{:.1f}"),
    ("kl", ("/kl",), "{:.4f}"),
    ("clip", ("/clip_fraction",), "{:.3f}"),
    ("entropy", ("/entropy",), "{:.3f}"),
    ("tok/s", ("tokens_per_s",), "{:.0f}"),
    ("s", ("time/step_s",), "{:.2f}"),
)
"""(label, name of the metric, or its ending when it starts with '/', format)."""


def open_progress(
    mode: str | bool = "auto",
    *,
    name: str,
    steps: int,
    path: Path | None = None,
    file: IO[str] | None = None,
    remark: str = "",
) -> Progress:
    """The view for a run: `live`, `plain`, `off`, or `auto` (live in a terminal, else plain). True means auto, False off.

    Args:
        remark: what whoever reads the numbers must know, shown with the name.
    """
    if isinstance(mode, bool):
        mode = "auto" if mode else "off"
    if mode not in MODES:
        raise ConfigError(f"progress is one of {', '.join(MODES)}; found {mode!r}; {nearest(str(mode), MODES)}")
    file = sys.stdout if file is None else file
    if mode == "auto":
        # under a debugger a panel would draw over its prompt
        mode = "live" if file is not None and file.isatty() and sys.gettrace() is None else "plain"
    if mode == "off" or file is None:
        return Progress(name, steps)
    return (LiveProgress if mode == "live" else PlainProgress)(name, steps, path, file, remark)


class Progress:
    """Shows nothing; the base of the views that do. A context manager."""

    def __init__(self, name: str, steps: int) -> None:
        self.name = name
        self.steps = steps
        self._failure = ""
        self._is_closed = False

    def phase(self, name: str) -> None:
        """Say what the run does now (a node's name)."""
        self._safely(self._phase, name)

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        sample: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Show a finished step (from 0), one of its rows, and what a person should know about it."""
        self._safely(self._step, step, metrics, sample, tuple(notes))

    def __enter__(self) -> Self:
        self._safely(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was, with the last state above the cursor. May be called twice."""
        failed = self._failure
        self._failure = ""
        if not self._is_closed:
            self._is_closed = True
            self._safely(self._close)
        if failed:
            try:
                print(f"(progress was turned off: {failed})", file=sys.stderr)
            except (OSError, ValueError):
                pass  # stderr is closed too; nobody is left to tell

    def _safely(self, show: Callable[..., None], *args: Any) -> None:
        if self._failure:
            return
        try:
            show(*args)
        except Exception as error:  # whatever a terminal or a strange metric brings: the run matters more than its view
            self._failure = f"{type(error).__name__}: {error}"

    def _start(self) -> None: ...

    def _phase(self, name: str) -> None: ...

    def _step(
        self, step: int, metrics: Mapping[str, float], sample: Mapping[str, Any] | None, notes: tuple[str, ...]
    ) -> None: ...

    def _close(self) -> None: ...


class PlainProgress(Progress):
    """One line per step, for logs and pipes."""

    def __init__(self, name: str, steps: int, path: Path | None, file: IO[str], remark: str = "") -> None:
        super().__init__(name, steps)
        self._remark = remark
        self._path = path
        self._file = file

    def _print(self, text: str) -> None:
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        self._file.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._file.flush()

    def _start(self) -> None:
        self._print(
            f"{self.name}: {self.steps} step{'s' if self.steps != 1 else ''}"
            + (f", in {self._path}" if self._path else "")
            + (f" ({self._remark})" if self._remark else "")
        )

    def _step(
        self, step: int, metrics: Mapping[str, float], sample: Mapping[str, Any] | None, notes: tuple[str, ...]
    ) -> None:
        numbers = "  ".join(f"{label} {value}" for label, value in shown(metrics))
        self._print(f"step {step + 1}/{self.steps}  {numbers}".rstrip())
        for note in notes:
            self._print(f"  {note}")


class _Lifting:
    """Stands for an output stream of the terminal: takes the panel away before anything is written below it.

    So a print in an operator, or a debugger's prompt, has the terminal for itself.
    """

    def __init__(self, stream: IO[str], lift: Callable[[], None]) -> None:
        self._stream = stream
        self._lift = lift
        self.ends_line = True
        """Whether the last thing written ended its line."""

    def write(self, text: str) -> int:
        if text:
            self._lift()
            self.ends_line = text.endswith("\n")
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LiveProgress(Progress):
    """A panel that is drawn again in place, at most five times a second and only when something happened: no thread."""

    def __init__(self, name: str, steps: int, path: Path | None, file: IO[str], remark: str = "") -> None:
        super().__init__(name, steps)
        self._remark = remark
        self._path = path
        self._file = file
        self._live: Live | None = None
        self._lock = threading.RLock()
        self._streams: dict[str, _Lifting] = {}
        self._drawn = float("-inf")
        self._done = 0
        self._now = ""
        self._metrics: Mapping[str, float] = {}
        self._sample: Mapping[str, Any] | None = None
        self._notes: tuple[str, ...] = ()
        self._rewards: list[float] = []
        self._started = time.perf_counter()

    def _start(self) -> None:
        self._started = time.perf_counter()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._streams[name] = _Lifting(stream, lambda: self._safely(self._lift))
                setattr(sys, name, self._streams[name])
        self._draw()

    def _phase(self, name: str) -> None:
        self._now = name
        self._draw()

    def _step(
        self, step: int, metrics: Mapping[str, float], sample: Mapping[str, Any] | None, notes: tuple[str, ...]
    ) -> None:
        self._done = step + 1
        self._metrics = metrics
        self._sample = sample if sample is not None else self._sample
        self._notes = notes or self._notes
        self._now = ""
        reward = metrics.get("reward/mean")
        if reward is not None and reward == reward:
            self._rewards = [*self._rewards[1 - HISTORY :], float(reward)]
        self._draw()

    def _draw(self) -> None:
        now = time.perf_counter()
        if now - self._drawn < REFRESH_S or sys.gettrace() is not None:  # someone steps through the code in a debugger
            return
        with self._lock:
            self._drawn = now
            if self._live is None:
                self._open()
            else:
                self._live.update(self._panel(), refresh=True)

    def _open(self) -> None:
        from rich.console import Console
        from rich.live import Live

        class Quiet(Console):
            def on_broken_pipe(self) -> None:
                raise  # rich would end the process; here it only ends the view

        if not all(stream.ends_line for stream in self._streams.values()):
            self._file.write("\n")
            for stream in self._streams.values():
                stream.ends_line = True
        console = Quiet(file=self._file)
        self._live = Live(
            self._panel(),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def _lift(self) -> None:
        """Take the panel away and give the cursor back; the next drawing opens it again below what was written."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                live.stop()

    def _close(self) -> None:
        try:
            with self._lock:
                if self._live is None:
                    self._open()  # what the run came to stays on the screen
                live, self._live = self._live, None
                if live is not None:
                    live.transient = False
                    live.update(self._panel())
                    live.stop()
        finally:
            for name, stream in self._streams.items():
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream._stream)
            self._streams = {}

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        spent = time.perf_counter() - self._started
        left = (
            f", about {_duration(spent / self._done * (self.steps - self._done))} left"
            if 0 < self._done < self.steps
            else ""
        )
        done = round(BAR_CHARS * min(self._done / max(self.steps, 1), 1.0))
        parts: list[RenderableType] = [
            Text(
                f"step {self._done}/{self.steps}  {_duration(spent)}{left}"
                + (f"  now: {self._now}" if self._now else "")
            ),
            Text("━" * done + "─" * (BAR_CHARS - done), style="cyan"),
        ]
        if self._remark:
            parts.append(Text(self._remark, style="yellow"))
        numbers = shown(self._metrics)
        if numbers:
            table = Table.grid(padding=(0, 2))
            for _ in numbers:
                table.add_column(justify="right")
            table.add_row(*(Text(label, style="dim") for label, _ in numbers))
            table.add_row(*(Text(value, style="bold") for _, value in numbers))
            parts.append(table)
        phases = "  ".join(f"{name} {value:.2f}" for name, value in phase_seconds(self._metrics))
        if phases:
            parts.append(Text(f"seconds: {phases}", style="dim"))
        if len(self._rewards) > 1:
            parts.append(
                Text(
                    f"reward {sparkline(self._rewards)}  {min(self._rewards):.3f} to {max(self._rewards):.3f}",
                    style="green",
                )
            )
        # Text, never markup: a response may hold "[/red]" or anything else
        parts += [Text(note, style="yellow") for note in self._notes[-3:]]
        for key, style in (("prompt", "dim"), ("response", "")):
            if self._sample is not None and self._sample.get(key) is not None:
                parts.append(Text(f"{key}: {_short(self._sample[key])}", style=style))
        rest = {k: v for k, v in (self._sample or {}).items() if k not in ("prompt", "response") and _is_small(v)}
        if rest:
            parts.append(
                Text(
                    "  ".join(f"{k}: {v:.3f}" if isinstance(v, float) else f"{k}: {v}" for k, v in rest.items()),
                    style="dim",
                )
            )
        return Panel(Group(*parts), title=Text(self.name), subtitle=Text(str(self._path)) if self._path else None)


def shown(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, number as text) of the metrics of general interest that are there."""
    found = []
    for label, names, form in SHOWN:
        for name in names:
            key = next((k for k in metrics if k.endswith(name)), None) if name.startswith("/") else name
            value = metrics.get(key) if key is not None else None
            if value is not None:
                found.append((label, form.format(value)))
                break
    return found


def phase_seconds(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(kind of node, seconds), longest first."""
    times = [
        (name.removeprefix("time/").removesuffix("_s"), float(value))
        for name, value in metrics.items()
        if name.startswith("time/") and name != "time/step_s"
    ]
    return sorted(times, key=lambda item: -item[1])[:6]


def sparkline(values: Sequence[float]) -> str:
    """A bar per value, lowest to highest."""
    finite = [v for v in values if abs(v) != float("inf") and v == v]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if v in finite else " " for v in values)


def _short(text: Any) -> str:
    text = "".join(c if c.isprintable() or c == "\n" else "�" for c in str(text))
    return text if len(text) <= SAMPLE_CHARS else text[:SAMPLE_CHARS] + " ..."


def _is_small(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 60)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
