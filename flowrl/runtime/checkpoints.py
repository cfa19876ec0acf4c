"""Checkpoints of a run: everything that a run needs to go on as if it had never stopped.

    runs/grpo-3/checkpoints/
      step_000020/               after 20 steps; complete, or it would not have this name
        checkpoint.json          of which run it is: graph, seed, engine; where the data sets are; the size of each file
        models/policy/           what the engine writes: weights, optimizer, schedule, version
        memory.0                 what nodes remember, of process 0: operators with a state, buffers
      .step_000030.tmp           was being written when the run was killed

A checkpoint is written under another name, flushed to the disk, and renamed: whenever a run is killed, the newest complete one
stays.

[Note: What is not in it] Numbers are drawn from streams named by seed, step, prompt and sample, so there is no generator whose
state would have to be kept. There are no rows in flight: a checkpoint is taken between two steps.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from flowrl.errors import ConfigError, RunError
from flowrl.graph.code import digest
from flowrl.graph.drift import code_in
from flowrl.graph.nodes import Graph
from flowrl.graph.operators import State
from flowrl.runtime import plain
from flowrl.runtime.context import Memory
from flowrl.runtime.data import Data
from flowrl.runtime.rundir import RunDir
from flowrl.runtime.tables import open_buffer

FOLDER, ABOUT = "checkpoints", "checkpoint.json"
FORMAT = 1
NAME = re.compile(r"step_(\d+)")
MODELS = "models"


class Saves(Protocol):
    """What a checkpoint asks of a model of the run; see `flowrl.engines.protocol.Host`."""

    def write_state(self, path: str, *, is_first: bool = True) -> None: ...

    def read_state(self, path: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Live:
    """What of a run changes from step to step, as one process has it."""

    graph: Graph
    models: Mapping[str, Saves]
    data: Mapping[str, Data]
    memory: Memory
    owns: Callable[[str], bool] = lambda path: True
    """Whether what a node remembers is this process's to keep, by the path of the node."""


class Together(Protocol):
    """The processes of a run that write one checkpoint."""

    @property
    def rank(self) -> int: ...

    def tell(self, what: str, value: str) -> str:
        """What rank 0 gives, on all ranks."""
        ...

    def meet(self, what: str) -> None:
        """Wait for all ranks. Errors: those of a rank that failed."""
        ...


class Alone:
    """One process."""

    rank = 0

    def tell(self, what: str, value: str) -> str:
        return value

    def meet(self, what: str) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class Saver:
    """Writes the checkpoints of a run.

    Args:
        run: folder of the run, on rank 0.
        every: steps from one to the next; None writes none.
        keep: newest ones that stay.
        about: what `checkpoint.json` says of the run besides.
    """

    run: Path | None
    every: int | None
    keep: int
    about: Mapping[str, Any]
    together: Together

    def is_due(self, done: int, steps: int) -> bool:
        """Whether one is written when so many of the run's steps are done: each `every` steps, and after the last one."""
        return self.every is not None and (done % self.every == 0 or done == steps)

    def write(self, done: int, live: Live) -> int:
        """Write a checkpoint; bytes of its files, 0 on other ranks. Every rank calls it.

        Errors: RunError, EngineError when it cannot be written; the checkpoints before it stay as they are.
        """
        told = self.together.tell("folder", "" if self.run is None else str(self._begun(done)))
        folder = Path(told)
        try:
            with self._writing(folder, done):
                self._write(folder, live)
            self.together.meet("parts")
            if self.together.rank != 0:
                return 0
            with self._writing(folder, done):
                return self._finish(folder, done, live)
        except BaseException:
            if self.together.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _begun(self, done: int) -> Path:
        """An empty folder; what killed runs have left is removed."""
        assert self.run is not None
        root = self.run / FOLDER
        with self._writing(root, done):
            root.mkdir(exist_ok=True)
            for old in root.glob(".*"):
                shutil.rmtree(old, ignore_errors=True)
            path = (root / f".{_name(done)}.tmp").absolute()
            path.mkdir()
        return path

    def _write(self, folder: Path, live: Live) -> None:
        """This process's parts."""
        if not folder.is_dir():
            raise RunError(
                f"rank {self.together.rank} does not see '{folder}', into which rank 0 writes; give out= a folder that all "
                "hosts of the run share"
            )
        for name, model in live.models.items():
            model.write_state(str(folder / MODELS / quote(name, safe="")))
        states = {path: dict(state) for path, state in live.memory.states.items() if live.owns(path)}
        buffers = {path: table.state() for path, table in live.memory.buffers.items() if live.owns(path)}
        if states or buffers:
            remembered = {"states": states, "buffers": buffers}
            plain.write(folder / f"memory.{self.together.rank}", remembered, "what nodes remember (fr.State)")

    def _finish(self, folder: Path, done: int, live: Live) -> int:
        files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(_files(folder))}
        about = {
            "format": FORMAT,
            "step": done,
            "graph_hash": live.graph.hash,
            "operators": dict(code_in(live.graph)),
            "models": sorted(live.models),
            "data": {name: data.state() for name, data in live.data.items()},
            **self.about,
            "files": files,
        }
        (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        for path in (*_files(folder), *(one for one in folder.rglob("*") if one.is_dir()), folder):
            _flush(path)
        final = folder.parent / _name(done)
        if final.exists():  # a run that was resumed from an older one comes here again
            aside = folder.parent / f".{_name(done)}.old"
            final.rename(aside)
            folder.rename(final)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            folder.rename(final)
        _flush(final.parent)
        self._prune(final.parent, done)
        return sum(files.values())

    def _prune(self, root: Path, done: int) -> None:
        """Remove what `keep` does not keep, and what the run had written before it was resumed from an older one."""
        found = sorted(_steps(root))
        kept = [step for step in found if step <= done][-self.keep :]
        for step in found:
            if step not in kept:
                shutil.rmtree(root / _name(step), ignore_errors=True)

    @contextmanager
    def _writing(self, folder: Path, done: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"the checkpoint after step {done - 1} cannot be written to '{folder}': {error}; the one before is complete: "
                "make room on the disk and resume the run from it"
            ) from error


def _name(done: int) -> str:
    return f"step_{done:06d}"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _steps(root: Path) -> Iterator[int]:
    for path in root.iterdir() if root.is_dir() else ():
        found = NAME.fullmatch(path.name)
        if found:
            yield int(found[1])


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one."""

    path: Path
    step: int
    """Steps done: the run goes on with this one."""
    about: Mapping[str, Any]

    @property
    def run(self) -> Path:
        """Folder of its run."""
        return self.path.parent.parent

    @classmethod
    def find(cls, place: str | Path) -> Checkpoint:
        """The newest one of a run's folder, or the one in a folder of its own.

        Errors: RunError when there is none, or it is damaged.
        """
        path = Path(place)
        if not NAME.fullmatch(path.name) or path.parent.name != FOLDER:
            RunDir.open(path)  # says what is beside it, if there is no run
            steps = sorted(_steps(path / FOLDER))
            if not steps:
                raise RunError(
                    f"run '{path}' has no checkpoint to resume from: it was run without checkpoint_every=, or ended before its "
                    "first one; run it again, with checkpoint_every="
                )
            path = path / FOLDER / _name(steps[-1])
        return cls._open(path)

    @classmethod
    def _open(cls, path: Path) -> Checkpoint:
        try:
            about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
            form, step, files = about["format"], int(about["step"]), dict(about["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, f"its {ABOUT} cannot be read ({type(error).__name__}: {error})") from error
        if form != FORMAT:
            raise RunError(
                f"checkpoint '{path}' has format {form}, and this version reads {FORMAT}; resume it with its own"
            )
        for name, size in files.items():
            file = path / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
                raise _damaged(path, f"its file '{name}' {what}")
        return cls(path, step, about)

    def check(self, graph: Graph, *, steps: int, seed: int, engine: str, allow_drift: bool) -> None:
        """Errors: ConfigError where a run with these cannot go on from it."""
        found = self.about
        now = dict(code_in(graph))
        drifted = sorted(name for name, then in found["operators"].items() if now.get(name, then) != then)
        text = str(graph)
        for name in drifted:
            text = text.replace(f'"{now[name]}"', f'"{found["operators"][name]}"')
        if found["graph_hash"] not in (graph.hash, digest(text)):
            raise ConfigError(
                f"checkpoint '{self.path}' is of another graph: its hash is {found['graph_hash']}, and that of flow "
                f"'{graph.name}' {graph.hash} after pruning and merging; resume with the flow and the configuration that the run "
                f"was started with ('{self.run / 'graph.txt'}' is its graph)"
            )
        if drifted and not allow_drift:
            raise ConfigError(
                f"{', '.join(drifted)} {'has' if len(drifted) == 1 else 'have'} changed since checkpoint '{self.path}' was "
                "written; resume with the code of then, or with allow_drift=True, which run.json then says"
            )
        for name, value in (("seed", seed), ("engine", engine)):
            if found[name] != value:
                raise ConfigError(
                    f"checkpoint '{self.path}' is of a run with {name}={found[name]!r}, and this one has {name}={value!r}; "
                    "resume with the same"
                )
        if self.step > steps:
            raise ConfigError(
                f"checkpoint '{self.path}' has done {self.step} steps, and the run is to have {steps} in all; ask for more "
                f"(steps={self.step + 1} does one more)"
            )

    def read(self, live: Live) -> None:
        """Put a run where it was. Every rank calls it. Errors: EngineError for another model; DataError for other data."""
        for name, data in live.data.items():
            if name in self.about["data"]:
                data.restore(self.about["data"][name])
        for name, model in live.models.items():
            model.read_state(str(self.path / MODELS / quote(name, safe="")))
        for path in sorted(self.path.glob("memory.*")):
            try:
                remembered = plain.read(path)
                states, buffers = remembered["states"], remembered["buffers"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise _damaged(self.path, f"its file '{path.name}' cannot be read: {error}") from error
            for node, state in states.items():
                if live.owns(node):
                    live.memory.states[node] = State(state)
            for node, saved in buffers.items():
                if live.owns(node):
                    live.memory.buffers[node] = open_buffer(_capacity(live.graph, node))
                    live.memory.buffers[node].restore(saved)


def _capacity(graph: Graph, path: str) -> int:
    """Of the buffer at a path."""
    *outer, name = path.split("/")
    for holder in outer:
        body = graph[holder].body
        assert body is not None
        graph = body
    return int(graph[name]["capacity"])


def _damaged(path: Path, why: str) -> RunError:
    others = [_name(step) for step in sorted(_steps(path.parent)) if _name(step) != path.name]
    hint = f"resume from another one: {', '.join(str(path.parent / one) for one in others)}" if others else (
        "there is no other one; run again from the start"
    )  # fmt: skip
    return RunError(f"checkpoint '{path}' is damaged: {why}; {hint}")
