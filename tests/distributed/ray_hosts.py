"""A Ray cluster of several nodes on this machine, and jobs on it: run in a network of its own, with what is to be done as JSON.

unshare -n sh -c "$NETWORK; exec python tests/distributed/ray_hosts.py JSON"
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ADDRESS = "10.99.0.1"
NETWORK = f"ip link set lo up && ip addr add {ADDRESS}/24 dev lo && ip route add default via {ADDRESS} dev lo"
"""Of the cluster, which has no other way out: Ray asks for the address on the way to the world, and 127.0.0.1 will not do."""


def main(said: dict[str, Any]) -> None:
    import ray
    from ray.cluster_utils import Cluster

    began = time.monotonic()
    options: dict[str, Any] = {"object_store_memory": 80_000_000}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": said["nodes"][0], "include_dashboard": False, **options}
    )
    try:
        for cpus in said["nodes"][1:]:
            cluster.add_node(num_cpus=cpus, **options)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        print("cluster", round(time.monotonic() - began, 1), file=sys.stderr)
        from flowrl.engines.launch import ray_job
        from flowrl.errors import FlowError

        told = []
        for job in said["jobs"]:
            try:
                ray_job.run_job(job["entry"], job["said"], job["nproc"], hosts=job["hosts"])
                told.append("")
            except FlowError as error:
                told.append(f"{type(error).__name__}: {error}")
            print("job", round(time.monotonic() - began, 1), file=sys.stderr)
        from ray.util.placement_group import placement_group_table

        states = sorted({one["state"] for one in placement_group_table().values()})
        Path(said["out"]).write_text(json.dumps({"told": told, "states": states}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    main(json.loads(sys.argv[1]))
