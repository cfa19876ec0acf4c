"""Options of a local run: everything that is neither the algorithm, nor a model, nor data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.schedule import Schedule, Sync
from flowrl.runtime.trackers import check_names
from flowrl.schema.columns import nearest

PROGRESS = ("auto", "live", "plain", "off")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `run_local`."""

    batch: int = 32
    """Rows a step takes from each data set given without a batch size of its own."""
    max_tokens: int = 256
    """Most new tokens of a response where the flow does not say."""
    out: str | None = "runs"
    """Folder that gets a folder per run; None writes nothing."""
    name: str | None = None
    """Name of the run; None takes the flow's."""
    record: tuple[str, ...] = ()
    """Nodes whose rows are written to the run at every step (`("*",)`: all), to be looked at or replayed."""
    progress: str = "auto"
    """`live` (a panel), `plain` (a line per step), `off`; `auto` is live in a terminal, else plain."""
    log_samples: int = 2
    """Sampled responses written per step."""
    trackers: tuple[str, ...] = ()
    """Where metrics go besides the run's folder: `tensorboard`, `wandb`, `mlflow`, or the `module:function` that opens another
    (`flowrl.runtime.trackers`). One that fails never ends a run."""
    reward_workers: int | None = None
    """Worker processes for rewards. None: as many as there are processors (8 at most), for those that ask for them; 0: none, all
    run in this process, open to a breakpoint; otherwise so many, for all rewards of one row that can be imported by name."""
    checks: bool = True
    """Check the flow first; only tests of the runtime itself turn it off."""
    schedule: Schedule = field(default_factory=Sync)
    """What the checks assume; a local run is always synchronous."""
    allow_drift: bool = False
    """Run a graph's text although operators, losses or functions it names have changed since it was written; `run.json` then
    says which, under `drift`. False refuses it."""

    checkpoint_every: int | None = None
    """Steps from one checkpoint to the next, in the run's folder; one more after the last step. None writes none."""
    checkpoint_keep: int = 2
    """Newest checkpoints that stay."""
    resume: str | None = None
    """Folder of a run that goes on from its newest checkpoint, in the same folder; or of one of its checkpoints. `steps` counts
    from the beginning of the run."""
    command: tuple[str, ...] = ()
    """Arguments of the command that started the run, which `flowrl resume` gives again."""

    def __post_init__(self) -> None:
        for name in ("batch", "max_tokens", "checkpoint_keep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"option '{name}' is a whole number of at least 1; found {value!r}")
        if isinstance(self.log_samples, bool) or not isinstance(self.log_samples, int) or self.log_samples < 0:
            raise ConfigError(f"option 'log_samples' is a whole number of at least 0; found {self.log_samples!r}")
        workers = self.reward_workers
        if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
            raise ConfigError(f"option 'reward_workers' is a whole number of at least 0, or None; found {workers!r}")
        every = self.checkpoint_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError(f"option 'checkpoint_every' is a number of steps of at least 1, or None; found {every!r}")
        if every is not None and self.out is None and self.resume is None:
            raise ConfigError("checkpoints lie in the run's folder, and out=None writes none; give out= a folder")
        if self.resume is not None and not isinstance(self.resume, str | Path):
            raise ConfigError(f"option 'resume' is the folder of a run, or of a checkpoint; found {self.resume!r}")
        if self.out is not None and not isinstance(self.out, str | Path):
            raise ConfigError(f"option 'out' is a folder, or None to write nothing; found {self.out!r}")
        if self.name is not None and not isinstance(self.name, str):
            raise ConfigError(f"option 'name' is text; found {self.name!r}")
        if not isinstance(self.allow_drift, bool):
            raise ConfigError(f"option 'allow_drift' is true or false; found {self.allow_drift!r}")
        if not isinstance(self.schedule, Schedule):
            raise ConfigError(f"option 'schedule' is fr.Sync() or fr.Async(max_staleness=...); found {self.schedule!r}")
        if self.progress not in PROGRESS:
            hint = nearest(str(self.progress), PROGRESS)
            raise ConfigError(f"option 'progress' is one of {', '.join(PROGRESS)}; found {self.progress!r}; {hint}")
        record: object = self.record
        if isinstance(record, str):
            raise ConfigError(f"option 'record' is a tuple of node names; found a string: write ({self.record!r},)")
        if not isinstance(record, tuple | list | set | frozenset) or not all(isinstance(name, str) for name in record):
            raise ConfigError(f"option 'record' is a tuple of node names, () for none; found {record!r}")

        trackers: object = self.trackers
        if isinstance(trackers, str):
            raise ConfigError(f"option 'trackers' is a tuple of names; found a string: write ({self.trackers!r},)")
        if not isinstance(trackers, tuple | list) or not all(isinstance(name, str) for name in trackers):
            raise ConfigError(f"option 'trackers' is a tuple of names, () for none; found {trackers!r}")
        check_names(self.trackers)

    def updated(self, values: dict[str, Any]) -> Options:
        """The same options with some replaced; unknown names are refused with the nearest."""
        known = [f.name for f in fields(self)]
        for name in values:
            if name not in known:
                raise ConfigError(f"there is no option '{name}'; {nearest(name, known)}")
        return replace(self, **values)


OPTION_NAMES = tuple(f.name for f in fields(Options))
