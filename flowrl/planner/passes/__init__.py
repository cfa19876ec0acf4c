"""From a placement to steps, one pass a file; each takes a draft and gives a new one, and `check` follows each.

calls       a step for each call of a model and each handover of weights, and what is held
weights     the exact bytes of handovers and assignments, the order of ranks, a wait before weights change
operators   a step on the hosts for each operator, and what each node reads
transfers   rows that go from one mesh to another
offload     parked state: where it stays, where it leaves and when it comes back
"""
