"""TensorBoard: event files in the run's folder, `tensorboard --logdir runs` shows all runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flowrl.errors import ConfigError
from flowrl.runtime.trackers import Session


def open_tensorboard(session: Session) -> TensorBoard:
    """Errors: ConfigError for a run without a folder."""
    if session.path is None:
        raise ConfigError("TensorBoard's files lie in the run's folder, and out=None writes none; give out=")
    return TensorBoard(session)


class TensorBoard:
    def __init__(self, session: Session) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._files = EventFileWriter(str(session.path))
        self._text("settings", "```json\n" + json.dumps(dict(session.info), indent=1, default=str) + "\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        import time

        values = [self._summaries.Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        summary = self._summaries.Summary(value=values)
        self._files.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._files.flush()

    def close(self, status: str) -> None:
        self._text("status", status)
        self._files.close()

    def _text(self, name: str, words: str) -> None:
        from tensorboard.compat.proto import tensor_pb2, types_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, string_val=[words.encode("utf-8", "backslashreplace")]
        )
        value = self._summaries.Summary.Value(tag=name, metadata=create_summary_metadata(name, ""), tensor=tensor)
        self._files.add_event(self._events.Event(step=0, summary=self._summaries.Summary(value=[value])))
