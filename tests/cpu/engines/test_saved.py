"""The state of a model in a folder: what was written goes on as if it had stayed, wherever the optimizer's state lies."""

import json
import resource
import signal

import numpy as np
import pytest

from flowrl.engines import saved
from flowrl.errors import EngineError
from flowrl.model import AdamW
from tests.cpu.engines.test_offload_models import assert_equal_states, job_of, trained


@pytest.mark.parametrize(
    ("wrote", "reads", "precision"),
    [("none", "none", "fp32"), ("sopt", "none", "bf16"), ("none", "opt", "bf16"), ("park", "sopt", "fp32")],
)
def test_a_model_goes_on(kit, tmp_path, wrote, reads, precision):
    family = kit.families["llama"]
    first = trained(kit, family, precision=precision, offload=wrote)
    first.write_state(str(tmp_path / "x"))
    assert first.is_parked == (wrote == "park")
    options = {"precision": precision, "offload": reads, "optimizer": AdamW(lr=1e-2, max_grad_norm=0.05)}
    second = kit.open(family(1), "update", "generate", **options)
    second.read_state(str(tmp_path / "x"))
    assert second.version == 2
    assert_equal_states(second.state(), first.state())
    rows = kit.random_rows(3)
    for number in (7, 8):
        first.onload()
        assert np.array_equal(second.logprobs(rows).values, first.logprobs(rows).values)
        first.update(job_of(kit, number))
        second.update(job_of(kit, number))
    assert_equal_states(second.state(), first.state())


def test_a_model_that_nothing_changes_writes_nothing_of_its_weights(kit, tmp_path):
    host = kit.open(kit.families["llama"](), "logprobs")
    host.write_state(str(tmp_path / "x"))
    assert [path.name for path in (tmp_path / "x").iterdir()] == [saved.ABOUT]
    other = kit.open(kit.families["llama"](), "logprobs")
    other.read_state(str(tmp_path / "x"))
    assert other.version == 0
    with pytest.raises(EngineError, match="is of another model 'policy' than this one: parameters have other names"):
        kit.open(kit.families["gpt2"](), "logprobs").read_state(str(tmp_path / "x"))


def test_an_average_in_bf16_goes_on_from_its_fp32_masters(kit, tmp_path):
    family = kit.families["llama"]
    policy = trained(kit, family, precision="bf16")
    average, other = (kit.open(family(1), "source", "logprobs", precision="bf16", name="average") for _ in range(2))
    average.blend(policy, 0.9)
    average.write_state(str(tmp_path / "x"))
    other.read_state(str(tmp_path / "x"))
    for one in (average, other):
        one.blend(policy, 0.9)
    assert other.version == 2
    for name, array in average.state()["weights"].items():
        np.testing.assert_array_equal(other.state()["weights"][name], array)


def test_what_does_not_fit_is_named(kit, tmp_path):
    family = kit.families["llama"]
    folder = tmp_path / "x"
    trained(kit, family).write_state(str(folder))
    with pytest.raises(EngineError, match=r"parameter '.*' of the checkpoint in '.*x' has shape|has no parameter"):
        kit.open(kit.families["gpt2"](), "update").read_state(str(folder))
    frozen = kit.open(family(), "source")
    frozen.version = 1
    frozen.write_state(str(tmp_path / "y"))
    with pytest.raises(
        EngineError, match=r"has no state of the optimizer for parameter '.*', which model 'policy' trains"
    ):
        kit.open(family(), "update").read_state(str(tmp_path / "y"))
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(EngineError, match=r"x' cannot be read: .* It is damaged, or not all of it was copied"):
        kit.open(family(), "update").read_state(str(folder))
    (folder / saved.ABOUT).write_text(json.dumps({"version": 1}))
    with pytest.raises(EngineError, match=r"cannot be read: KeyError"):
        kit.open(family(), "update").read_state(str(folder))
    with pytest.raises(EngineError, match=r"nothing' cannot be read: FileNotFoundError"):
        kit.open(family(), "update").read_state(str(tmp_path / "nothing"))


def test_a_full_disk_is_an_error_that_says_so(kit, tmp_path):
    host = trained(kit, kit.families["llama"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(EngineError, match=r"the state of model 'policy' cannot be written to '.*x'"):
            host.write_state(str(tmp_path / "x"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    host.write_state(str(tmp_path / "y"))
