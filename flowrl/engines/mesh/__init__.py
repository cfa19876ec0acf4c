"""The torch engine on a mesh of ranks: FSDP2 and tensor parallelism.

    ranks.RankMesh.join(layout, name)               on every process of a job, after init_process_group
    host.open_on_mesh(name, model, uses, mesh, ...) -> MeshHost: logprobs, values, score, update, state, as on one device

    guard       ranks that fail together, waits that say what they wait for
    ranks       a layout as process groups; parts of tensors
    styles      how one module is computed by a tensor-parallel group
    plans       what tensor parallelism cuts, family by family
    vocabulary  log-probabilities from a head that is cut by tokens
    sources     weights in memory or in files, one tensor at a time
    sharding    a module cut for its ranks, under one root
    weights     its parameters by name
    shares      rows for ranks
    passes      as many passes of the backbone on every rank
    trainer     optimizer steps
    host        all of it, behind the protocol of hosts

Each of these imports from those above it only.
"""
