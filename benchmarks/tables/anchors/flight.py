"""Arrow Flight over the loopback: the consumer serves, the producer writes one stream a round."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight

from benchmarks.tables.anchors.arrow_files import columns_of, record_batch
from benchmarks.tables.handoff import AHEAD, BATCH, WAIT_S, Channel
from benchmarks.tables.padding import Batch, Staging, flat_columns, pad_flat, pad_slices


class _Server(pyarrow.flight.FlightServerBase):
    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.chunks: queue.Queue[pa.RecordBatch] = queue.Queue(AHEAD)

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        for chunk in reader:
            self.chunks.put(chunk.data, timeout=WAIT_S)


class Flight(Channel):
    """Padded by `pad_sequence`, or by the kernel that also pads the other flat columns here."""

    name = "Arrow Flight loopback"

    def __init__(self, *, kernel: bool = False) -> None:
        super().__init__()
        self.kernel = kernel
        if kernel:
            self.name = f"{self.name}, kernel"
        self.server: Any = None
        self.client: Any = None
        self.writer: Any = None

    def put(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        batch = record_batch(flat_columns(rows, names), names)
        if self.client is None:
            self.client = pyarrow.flight.connect(f"grpc://127.0.0.1:{self.queue.get(timeout=WAIT_S)}")
        if self.writer is None:
            descriptor = pyarrow.flight.FlightDescriptor.for_path("rows")
            self.writer, _ = self.client.do_put(descriptor, batch.schema)
        self.writer.write_batch(batch)

    def finish(self) -> None:
        self.writer.close()
        self.writer = None

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        super().close()

    def batches(self, names: Sequence[str], num_rows: int) -> Iterator[Batch]:
        if self.server is None:
            self.server = _Server()
            threading.Thread(target=self.server.serve, daemon=True).start()
            self.queue.put(self.server.port)
        staging = Staging()
        got = 0
        while got < num_rows:
            columns = columns_of(self.server.chunks.get(timeout=WAIT_S), names)
            here = len(columns["reward"])
            for first in range(0, here, BATCH):
                stop = min(first + BATCH, here)
                if self.kernel:
                    yield pad_flat(columns, names, first, stop, staging)
                else:
                    yield pad_slices(columns, names, first, stop)
            got += here
