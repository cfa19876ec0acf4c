"""What this machine really does: efficiencies, links and copies, measured in about a minute, as a `Cluster`.

    cluster = calibrate()
    cluster.to_toml("cluster.toml")

    effort      how much is measured: shapes, sizes, rounds
    worker      one process for each device; all measure at the same time
    compute     products, layers, a loss, a decode step
    host        copies between device and host, Adam on the CPU
    links       collectives between devices
    processes   starts the workers and ends them, whatever happens
    fit         two unknowns from several measured times
    assemble    from measured numbers to a cluster

Processes start anew with the interpreter's `-m`, so a caller needs no `__main__` guard, and keeps no memory of a device.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime

from flowrl.errors import ConfigError
from flowrl.mesh import Cluster


def calibrate(*, devices: int | None = None, quick: bool = False, deadline_s: float = 300.0) -> Cluster:
    """Measure this machine. Imports torch in processes of its own.

    Args:
        devices: the first so many GPUs; left out, all. Without a GPU: processes that share the CPU's cores; left out, one.
        quick: fewer and smaller sizes; rougher.
        deadline_s: after this long everything ends, and what was not measured keeps its published figure.

    What fails is in `notes` with its reason, and keeps the published or assumed figure. Raises `ConfigError` when there are not
    so many devices, and `EngineError` when nothing could be measured.
    """
    import torch

    from flowrl.engines.calibrate.assemble import assemble, rounded
    from flowrl.engines.calibrate.processes import run_workers

    found = torch.cuda.device_count()
    count = devices if devices is not None else max(1, found)
    cores = os.cpu_count() or 1
    most, what = (found, "GPUs") if found else (cores, "cores for one process each")
    if not 1 <= count <= most:
        raise ConfigError(f"calibrate needs 1 to {most} devices, as this machine has {most} {what}; found {count}")
    load = os.getloadavg()[0]
    results = run_workers(count, is_gpu=found > 0, quick=quick, deadline_s=deadline_s)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    now = datetime.now(UTC).replace(microsecond=0, tzinfo=None)
    cluster = rounded(assemble(results, host_bytes=host_bytes, calibrated_at=now.isoformat()))
    if load > cores / 2:
        busy = (
            f"the machine was busy: load {load:.1f} on {cores} cores before anything was measured; figures are too low"
        )
        cluster = replace(cluster, notes=(*cluster.notes, busy))
    return cluster
