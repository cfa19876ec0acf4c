"""Weights edges: from a trainer's shards straight into an engine's live parameters.

    plan      reshard(tensors, source, target)             boxes: who needs, who holds          flowrl.planner.reshard
    compile   program_for(tensors, source, target)         copies, pieces, buckets; once        slots, buckets, program
    run       Resharder(program, device, ...).run(version) every step, no arithmetic            resharder and below

    pack    |  0  |  1  |  2  |  3  |                      gather and cast into a slot
    wire          |  0  |  1  |  2  |  3  |                the transport
    unpack              |  0  |  1  |  2  |  3  |          scatter into live parameters
    local   |  kept boxes, shard -> parameter  |           never through a bucket

`slots`, `buckets`, `program`, `device`, `sampling` and `explain` do without torch; a program can be made and read anywhere.
"""
