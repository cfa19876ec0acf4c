"""What a rank asks of a Ray cluster, and how long is waited for it. Knows nothing of Ray itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flowrl.errors import ConfigError
from flowrl.mesh import Cluster
from flowrl.model import Model
from flowrl.planner.steps import Plan

LOCAL = "local"
"""Address of a cluster of one node that is started for the job, and ended with it."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How a job lies on a Ray cluster.

    Example:
        RayOptions(gpus=1)                        # ranks on GPUs
        RayOptions(cpus=0.5, address="local")     # four ranks on two processors of this host
    """

    cpus: float = 1.0
    """Of each rank, as Ray counts them: it holds nobody to it."""
    gpus: float = 0.0
    """Of each rank: whole ones, or none. It sees those of the other ranks too, its own at the place of its rank."""
    address: str | None = None
    """`HOST:PORT` of a cluster, or `local`; None: $RAY_ADDRESS, else the cluster of this host, else `local`."""
    place_s: float = 300.0
    """Longest wait for nodes that have room for all ranks."""
    start_s: float = 300.0
    """Longest wait for the ranks' processes to start."""
    silent_s: float = 60.0
    """How long a node of the ranks may say nothing until it counts as lost."""

    def __post_init__(self) -> None:
        if self.cpus < 0 or self.gpus < 0 or not self.cpus + self.gpus:
            raise ConfigError(
                f"a rank asks for a part of a CPU or GPU at least; found cpus={self.cpus:g}, gpus={self.gpus:g}"
            )
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigError(
                f"ranks are started from a node of the cluster, not through a client; found {self.address}: start this "
                "command on a node, with that node's address (HOST:PORT), or by `ray job submit`"
            )
        if self.gpus != int(self.gpus):
            raise ConfigError(f"a rank has whole GPUs, or none; found gpus={self.gpus:g}")
        for name in ("place_s", "start_s", "silent_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is in seconds, more than 0; found {getattr(self, name)!r}")


def gpus_of_rank(engine: str, models: Iterable[Model], cluster: Cluster) -> float:
    """GPUs that each rank of a run needs: one, but for a dry run, for models that are all on CPUs, and for a cluster of CPUs."""
    is_on_cpu = engine == "null" or cluster.device.name == "cpu" or all(model.device == "cpu" for model in models)
    return 0.0 if is_on_cpu else 1.0


def hosts_of(plan: Plan, nproc: int) -> tuple[int, ...]:
    """How many ranks are on each host: rank r is device r of the plan, and devices of one of its nodes share a host.

    Example:
        hosts_of(plan_for_16_gpus, 12)          # (8, 4)
    """
    per_node = plan.cluster.devices_per_node
    return tuple(min(per_node, nproc - first) for first in range(0, nproc, per_node))
