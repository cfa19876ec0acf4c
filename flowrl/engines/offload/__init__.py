"""Training state beside the device: parked in host memory, or streamed through the device while the optimizer works.

layout     where the elements of each parameter lie in flat memory, and how that is cut into buckets; no torch
memory     host memory that a device copies from and to at full rate, kept and used again
lanes      streams for copies in, work and copies out, and events between them; on a CPU one thing after the other
park       tensors leave the device and come back, the same objects
state      master weights and moments of AdamW in host memory
store      what a trainer asks of an optimizer: resident, streamed or on the CPU
host_adamw what the next two have in common
streamed   AdamW on the device, its state in host memory
on_cpu     AdamW on the CPU
home       the state of one model: what may leave, and that nobody uses it meanwhile
"""
