"""The torch engine on a mesh of ranks: FSDP2 and tensor parallelism.

RankMesh.join(layout, name)                     on every process of a job, after init_process_group
open_on_mesh(name, model, uses, mesh, seed=)    -> MeshHost: logprobs, values, score, update, state, as on one device
"""

from flowrl.engines.mesh.guard import Failure, Guard, Patience
from flowrl.engines.mesh.host import MeshHost, open_on_mesh
from flowrl.engines.mesh.plans import FAMILIES, Family
from flowrl.engines.mesh.ranks import RankMesh, local_part
from flowrl.engines.mesh.sharding import Precision, Sharded, shard
from flowrl.engines.mesh.trainer import MeshTrainer

__all__ = [
    "FAMILIES",
    "Failure",
    "Family",
    "Guard",
    "MeshHost",
    "MeshTrainer",
    "Patience",
    "Precision",
    "RankMesh",
    "Sharded",
    "local_part",
    "open_on_mesh",
    "shard",
]
