"""What this machine has, asked of torch."""

import pytest
import torch

from flowrl.mesh import Cluster


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads a machine without a GPU")
def test_a_machine_without_a_gpu_is_one_cpu() -> None:
    found = Cluster.detect()
    assert (found.num_devices, found.device.name) == (1, "cpu")
    assert 0 < found.device.memory_bytes < found.host.memory_bytes
