"""Ray's object store and TransferQueue (which runs on Ray): their consumer is an actor.

Ray is started here, on this machine alone, and stopped by `stop`.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT
from benchmarks.tables.handoff import AHEAD, BATCH, WAIT_S, Channel, Done, consume
from benchmarks.tables.padding import SCALARS, Batch, Staging, add, flat_columns, pad_flat, pad_list


def start() -> None:
    import ray

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        num_cpus=8,
        object_store_memory=1 << 30,
        logging_level="error",
        log_to_driver=False,
    )


def stop() -> None:
    import ray

    ray.shutdown()


class Reader:
    """The consumer; chunks are its calls."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.staging = Staging()
        self.client: Any = None

    def begin(self, names: Sequence[str], check: bool) -> None:
        self.names, self.check = tuple(names), check
        self.done = Done(0.0, 0, dict.fromkeys(names, 0))

    def rows(self, chunk: list[dict[str, Any]]) -> None:
        self._consume(pad_list(chunk[first : first + BATCH], self.names) for first in range(0, len(chunk), BATCH))

    def flat(self, chunk: dict[str, np.ndarray]) -> None:
        here = len(chunk["reward"])
        self._consume(
            pad_flat(chunk, self.names, first, min(first + BATCH, here), self.staging)
            for first in range(0, here, BATCH)
        )

    def keys(self, keys: list[str]) -> None:
        self._consume(self._fetched(keys[first : first + BATCH]) for first in range(0, len(keys), BATCH))

    def _fetched(self, keys: list[str]) -> Batch:
        import transfer_queue

        if self.client is None:
            transfer_queue.init()
            self.client = transfer_queue
        got = self.client.kv_batch_get(keys, "train", select_fields=[*self.names, *SCALARS])
        return {name: _padded(got[name]) for name in (*self.names, *SCALARS)}

    def _consume(self, batches: Iterator[Batch]) -> None:
        done = consume(batches, self.names, check=self.check)
        self.done = Done(done.at, self.done.rows + done.rows, add(self.done.digest, done.digest))

    def result(self) -> Done:
        return self.done


def _padded(values: torch.Tensor) -> torch.Tensor:
    if not values.is_nested:
        return values
    if values.dtype == torch.bool:  # torch pads no boolean nested tensors
        return torch.nn.utils.rnn.pad_sequence(list(values.unbind()), batch_first=True)
    return torch.nested.to_padded_tensor(values, 0)


class RayChannel(Channel):
    """At most four calls are under way."""

    method = ""

    def __init__(self) -> None:
        import ray

        self.ray = ray
        self.reader = ray.remote(Reader).options(num_cpus=1).remote()
        self.pending: collections.deque[Any] = collections.deque()

    def begin(self, names: Sequence[str], num_rows: int, *, check: bool) -> None:
        self.ray.get(self.reader.begin.remote(tuple(names), check), timeout=WAIT_S)

    def put(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        if len(self.pending) >= AHEAD:
            self.ray.get(self.pending.popleft(), timeout=WAIT_S)
        self.pending.append(getattr(self.reader, self.method).remote(self.packed(rows, names)))

    def finish(self) -> Done:
        self.ray.get(list(self.pending), timeout=WAIT_S)
        self.pending.clear()
        return self.ray.get(self.reader.result.remote(), timeout=WAIT_S)

    def close(self) -> None:
        self.ray.kill(self.reader)


class RayRows(RayChannel):
    name, method = "Ray put list[dict]", "rows"

    def packed(self, rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
        return self.ray.put(rows)


class RayColumns(RayChannel):
    name, method = "Ray put flat columns", "flat"

    def packed(self, rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
        return self.ray.put(flat_columns(rows, names))


class TransferQueue(RayChannel):
    """`kv_batch_put` of 256 rows, `kv_batch_get` of 32. What was read is cleared between rounds, off the clock."""

    name, method = "TransferQueue", "keys"

    def __init__(self) -> None:
        super().__init__()
        import transfer_queue

        self.client = transfer_queue
        transfer_queue.init()
        self.number = 0
        self.held: list[str] = []

    def begin(self, names: Sequence[str], num_rows: int, *, check: bool) -> None:
        if self.held:
            self.client.kv_clear(self.held, "train")
            self.held = []
        super().begin(names, num_rows, check=check)

    def packed(self, rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
        from tensordict import TensorDict

        fields = {
            name: torch.nested.as_nested_tensor([torch.from_numpy(row[name]) for row in rows], layout=torch.jagged)
            for name in names
        }
        fields |= {name: torch.from_numpy(np.array([row[name] for row in rows], d)) for name, d in SCALARS.items()}
        keys = [str(number) for number in range(self.number, self.number + len(rows))]
        self.number += len(rows)
        self.client.kv_batch_put(keys, "train", fields=TensorDict(fields, batch_size=[len(rows)]))
        self.held += keys
        return keys

    def close(self) -> None:
        super().close()
        self.client.close()
