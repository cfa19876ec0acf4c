"""The measured sharding audit on one process: bytes, types, what is trained."""

import torch
from torch import nn

from flowrl.engines.audit import audit_module


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 7))


def test_bytes_after_a_step() -> None:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    before = audit_module(made, optimizer)
    elements = sum(parameter.numel() for parameter in made.parameters())
    assert before.device_bytes == 4 * elements
    made(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    after = audit_module(made, optimizer)
    assert after.device_bytes == 16 * elements  # both moments; the counter of steps is none of it
    assert after.findings == ()
    assert "measured: " in str(after) and not after.is_predicted


def test_one_process_holds_everything_and_nothing_twice() -> None:
    parts = audit_module(model()).parts
    assert {(part.devices, part.copies) for part in parts} == {(1, 1)}
    tied = model()
    tied[1] = tied[0]
    assert len(audit_module(tied).parts) == 2  # what is shared is listed once


def test_a_frozen_module_in_fp32_is_found() -> None:
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    made[0].requires_grad_(False)
    (found,) = audit_module(made).problems
    assert (found.kind, found.modules, found.num_tensors) == ("frozen_fp32", ("*",), 1)
    assert found.wasted_bytes == 2 * 64 * 64
    made[0].bfloat16()
    assert audit_module(made).problems == ()


def test_fp32_among_bf16_is_found() -> None:
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)).bfloat16()
    assert audit_module(made).problems == ()
    made[2].float()
    (found,) = audit_module(made).problems
    assert found.kind == "fp32_leftover" and found.num_tensors == 2


def test_state_of_the_whole_parameter_is_found() -> None:
    """As when the optimizer was made before the parameters were sharded."""
    made = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(made.parameters())
    optimizer.state[made.weight] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(128, 64)}
    (found,) = audit_module(made, optimizer).problems
    assert found.kind == "state_not_sharded" and found.wasted_bytes == 4 * 64 * 64
