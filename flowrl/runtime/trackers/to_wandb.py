"""Weights & Biases. Account, project and whether it is offline are its own settings (`WANDB_PROJECT`, `WANDB_MODE=offline`)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from flowrl.runtime.trackers import Session

FAILED = 1
"""Exit code of a run that did not finish."""


def open_wandb(session: Session) -> Wandb:
    return Wandb(session)


class Wandb:
    def __init__(self, session: Session) -> None:
        import wandb

        folder = None if session.path is None else str(session.path)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "flowrl",
            name=session.name,
            group=session.flow,
            dir=folder,
            config=dict(session.info),
            reinit="create_new",  # several runs in one process are several runs
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "finished" else FAILED)
