"""What a placed node would cost: parameters, FLOPs, memory, traffic and time, in closed form.

    shapes       the parameters of a model, each with its name and shape
    configs      shapes read from Hugging Face configs, and those of known models
    flops        work of a forward, a training step
    compute      its time on devices
    collectives  time of communication between ranks
    offload      where training state lies, and what moving it costs
    memory       bytes on a device: training, sampling engine
    generation   prefill, decode steps, a batch of responses of given lengths
    train        time of a training step
    audit        what each parameter takes on a device, and what of it is not really sharded
    text         numbers and tables as people read them

Units are in the names: `_bytes`, `_s`, `_flops`. A formula holds no calibrated constant: those are fields with defaults
(those of `flowrl.mesh`, `MemoryConstants`, `TrainConstants`, `EngineConstants`). Nothing here imports torch.

Symbols: N parameters, L layers, h hidden, a heads, kv key-value heads, d head size, f feed-forward size, V vocabulary,
T tokens, S shards, G devices.
"""
