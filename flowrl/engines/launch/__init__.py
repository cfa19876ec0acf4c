"""How a job of several processes comes to be, and what its ranks tell each other.

Only `meeting`, `torch_edges` and `torch_ranks` know torch.
"""
