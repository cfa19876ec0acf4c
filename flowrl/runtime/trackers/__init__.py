"""Metrics to where people already look at them, beside the run's own folder: TensorBoard, Weights & Biases, MLflow.

    fr.run_local(flow, trackers=("tensorboard",), ...)
    flowrl run flow.py --set trackers=tensorboard,mlflow

A tracker is anything with `log(step, metrics)` and `close(status)`. Another one is named by the function that opens it:
`trackers=("my_project.tracking:open_ours",)`; it is called with a `Session`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest


class Tracker(Protocol):
    """Where metrics go. Whatever it raises is noted once, and the run goes on without it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step. Called once for each, in order, never for two at a time."""

    def close(self, status: str) -> None:
        """The run has ended: `finished`, `interrupted` or `failed`. What was logged must be safe after it."""


@dataclass(frozen=True, slots=True)
class Session:
    """What a tracker may know of the run it follows.

    Example:
        Session("grpo-3", "grpo", Path("runs/grpo-3"), {"seed": 0, "options": {"batch": 32}})
    """

    name: str
    """Of the run."""
    flow: str
    path: Path | None
    """The run's folder; None for a run that writes nothing."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What run.json says."""


@dataclass(frozen=True, slots=True)
class Known:
    """A tracker that comes with FlowRL."""

    opener: str
    """`module:function`."""
    package: str
    """What it imports."""


TRACKERS = {
    "tensorboard": Known("flowrl.runtime.trackers.to_tensorboard:open_tensorboard", "tensorboard"),
    "wandb": Known("flowrl.runtime.trackers.to_wandb:open_wandb", "wandb"),
    "mlflow": Known("flowrl.runtime.trackers.to_mlflow:open_mlflow", "mlflow"),
}
"""Each is an extra of the same name: `pip install 'flowrl[tensorboard]'`."""


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are none. Errors: ConfigError with the nearest."""
    for name in names:
        if name not in TRACKERS and ":" not in name:
            raise ConfigError(
                f"option 'trackers' names '{name}', which is none of {', '.join(TRACKERS)}, nor the module:function that opens "
                f"one; {nearest(name, TRACKERS)}"
            )


def check_installed(names: Iterable[str]) -> None:
    """Refuse trackers whose package is not there, before anything runs. Errors: ConfigError with what to install."""
    for name in names:
        known = TRACKERS.get(name)
        if known is None:
            opener_of(name)
        if known is not None and importlib.util.find_spec(known.package) is None:
            raise ConfigError(
                f"tracker '{name}' needs the package {known.package}, which is not installed; pip install 'flowrl[{name}]', or "
                "leave it out of trackers="
            )


def opener_of(name: str) -> Any:
    """The function that opens a tracker. Errors: ConfigError where there is none."""
    module, _, function = (TRACKERS[name].opener if name in TRACKERS else name).partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"tracker '{name}' cannot be imported: {error}") from error


def plain(info: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Settings by dotted name, as trackers take them: `{"options.batch": 32}`."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in info.items():
        if isinstance(value, Mapping):
            found |= plain(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return found
