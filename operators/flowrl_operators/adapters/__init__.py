"""Adapters: FlowRL's pieces in other systems, and theirs in FlowRL.

    adapters.trl             reward functions, both ways
    adapters.verl            reward functions, batches (DataProto, TensorDict) both ways; advantages inside verl
    adapters.datasets        Hugging Face data sets, both ways
    adapters.torch           operators on plain tensors
    adapters.reasoning_gym   its tasks as data and reward
    adapters.verifiers       environments of verifiers as data, reward and environment

Importing this imports none of those packages; a call that needs one imports it.
"""

from flowrl_operators.adapters import arrays, datasets, padded, reasoning_gym, torch, trl, verifiers, verl

__all__ = ["arrays", "datasets", "padded", "reasoning_gym", "torch", "trl", "verifiers", "verl"]
