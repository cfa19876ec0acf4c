"""MLflow. Where it keeps runs is its own setting (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`)."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from flowrl.runtime.trackers import Session, plain

MOST_PARAMS = 100
"""Parameters that one call takes."""
MOST_PARAM_CHARS = 500
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_REFUSED = re.compile(r"[^\w\-./ :]")
"""Letters that a name may not have."""


def open_mlflow(session: Session) -> Mlflow:
    return Mlflow(session)


class Mlflow:
    """Speaks through a client of its own: a run that the user's code has open stays as it is."""

    def __init__(self, session: Session) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or session.flow
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {} if session.path is None else {"flowrl.folder": str(session.path.resolve())}
        self.run_id = self._client.create_run(experiment, run_name=session.name, tags=tags).info.run_id
        settings = [Param(_name(key), str(value)[:MOST_PARAM_CHARS]) for key, value in plain(session.info).items()]
        for first in range(0, len(settings), MOST_PARAMS):
            self._client.log_batch(self.run_id, params=settings[first : first + MOST_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        # it keeps no NaN under its name: a point that is not there says the same
        known = [(name, float(value)) for name, value in metrics.items() if not math.isnan(float(value))]
        self._client.log_batch(self.run_id, metrics=[self._metric(_name(n), v, now_ms, step) for n, v in known])

    def close(self, status: str) -> None:
        self._client.set_terminated(self.run_id, STATUS.get(status, "FAILED"))


def _name(name: str) -> str:
    return _REFUSED.sub("_", name)
