"""Where things can run: devices, clusters, meshes of devices, layouts of weights on a mesh, placements of roles.

Example:

    cluster = Cluster.named("8xA100-80G")
    layout = Layout.parse("d4t2")             # four replicas, each cut over two devices
    placement = Placement.parse("gen:d4t2 | (policy:f8 + ref:f8)")

Nothing here imports torch; `Cluster.detect` does so when it is called.
"""

from __future__ import annotations

from flowrl.mesh.cluster import Cluster
from flowrl.mesh.devices import DEVICES, Device, Efficiency, Host, Overheads
from flowrl.mesh.layout import Coordinate, Layout
from flowrl.mesh.links import Link, Measured
from flowrl.mesh.meshes import Mesh, slices
from flowrl.mesh.placement import Group, Placement, Role

__all__ = [
    "DEVICES", "Cluster", "Coordinate", "Device", "Efficiency", "Group", "Host", "Layout", "Link", "Measured", "Mesh",
    "Overheads", "Placement", "Role", "slices",
]  # fmt: skip
