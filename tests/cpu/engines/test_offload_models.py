"""Models whose training state lies elsewhere train as those that keep it; plans that park run with the numbers of plans that do
not. The CPU stands for a device of its own here."""

import numpy as np
import pytest
import torch

import flowrl as fr
from examples.tiny import make_task, tiny_model
from flowrl.engines.host_torch import TorchHost
from flowrl.engines.protocol import Parks, SamplingOptions
from flowrl.errors import ConfigError, EngineError, RunError
from flowrl.mesh import Cluster
from flowrl.model import AdamW
from flowrl.planner.steps import Step
from flowrl.planner.tasks import StepKind
from flowrl_operators import advantages, losses
from tests.null.runtime.plans import ONE, compute, move as plain_move, numbers, plan_of


@fr.loss
def reinforce(logprobs, advantage: fr.SAMPLE.f32, segments):
    return -logprobs * segments.spread(advantage)


def job_of(kit, seed=0):
    rows = kit.random_rows(6, seed)
    advantage = np.random.default_rng(seed).normal(size=6).astype(np.float32)
    return kit.job(rows, reinforce(), columns={"advantage": advantage}, minibatches=2)


def trained(kit, family, updates=2, **options):
    """A small limit of the norm: every step is clipped."""
    host = kit.open(family(), "update", "generate", optimizer=AdamW(lr=1e-2, max_grad_norm=0.05), **options)
    for number in range(updates):
        report = host.update(job_of(kit, number))
        assert report.steps == 2 and report.metrics["grad_clipped"].mean == 1
    return host


def assert_equal_states(found, expected):
    assert found["version"] == expected["version"] and found["schedule"] == expected["schedule"]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, array in expected["weights"].items():
        np.testing.assert_array_equal(found["weights"][name], array, err_msg=name)
    assert found["optimizer"].keys() == expected["optimizer"].keys()
    for name, entry in expected["optimizer"].items():
        for key, value in entry.items():
            np.testing.assert_array_equal(found["optimizer"][name][key], value, err_msg=f"{name} {key}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("offload", ["park", "sopt", "opt"])
def test_a_model_trains_alike_wherever_its_optimizer_is(kit, offload, precision):
    family = kit.families["llama"]
    resident = trained(kit, family, precision=precision)
    host = trained(kit, family, precision=precision, offload=offload)
    assert host.is_parked == (offload == "park")
    assert_equal_states(host.state(), resident.state())
    assert host.is_parked == (offload == "park")  # the state was brought, and left again
    rows = kit.random_rows(3)
    assert np.array_equal(host.logprobs(rows).values, resident.logprobs(rows).values)

    other = kit.open(
        family(1), "update", precision=precision, offload=offload, optimizer=AdamW(lr=1e-2, max_grad_norm=0.05)
    )
    other.restore(resident.state())
    other.update(job_of(kit, 7))
    resident.update(job_of(kit, 7))
    assert_equal_states(other.state(), resident.state())


def test_a_blend_reads_and_writes_masters_wherever_they_are(kit):
    family = kit.families["llama"]
    for offload in ("none", "sopt", "opt", "park"):
        policy = trained(kit, family, precision="bf16", offload=offload)
        average = kit.open(family(1), "source", precision="bf16", name="average")
        average.blend(policy, 0.5)
        policy.blend(average, 0.25)
        found = {**policy.state()["weights"], **{f"average {n}": a for n, a in average.state()["weights"].items()}}
        if offload == "none":
            expected = found
        assert all(np.array_equal(array, expected[name]) for name, array in found.items()), offload


def test_a_parked_model_says_so(kit, tmp_path):
    host = kit.open(kit.families["llama"](), "update", "logprobs", optimizer=AdamW(lr=1e-2))
    assert isinstance(host, Parks)
    before = host.state()
    assert host.offload() > 0 and host.is_parked
    for use in (
        lambda: host.logprobs(kit.random_rows(2)),
        lambda: host.update(job_of(kit)),
        lambda: host.module(torch.zeros(1, 1)),
    ):
        with pytest.raises(EngineError, match="'policy' is parked in host memory"):
            use()
    host.save(str(tmp_path / "saved"))
    assert host.is_parked and (tmp_path / "saved" / "model.safetensors").stat().st_size > 4000
    for name, array in host.state()["weights"].items():
        np.testing.assert_array_equal(array, before["weights"][name])
    assert host.is_parked and host.device == "cpu"
    assert host.onload() > 0 and host.offload(writes=False) == 0
    host.onload()
    host.update(job_of(kit))
    assert host.offload(writes=False) > 0  # whatever a plan thinks: it was changed


def test_a_sampler_that_looks_at_the_module_keeps_it(kit):
    host = trained(kit, kit.families["llama"])
    moments = 2 * sum(p.numel() for p in host.module.parameters()) * 4
    assert moments <= host.offload() < moments * 1.1  # and a step counter for each parameter
    assert len(host.generate(kit.requests([[3, 4]], n=2), SamplingOptions())) == 2
    with pytest.raises(EngineError, match="training needs it"):
        host.update(job_of(kit))


# --------------------------------------------------------------------------------------------------------------- plans


def move(kind: StepKind, name: str, node: str, **settings) -> Step:
    step = plain_move(kind, name, node, "parameters")
    return Step(name, node, kind, ONE, step.lanes, step.predicted, reads=step.reads, settings=tuple(settings.items()))


@pytest.fixture
def flow():
    @fr.operator(writes={"reward": fr.SAMPLE.f32})
    def odd_digits(response_ids: fr.TOKEN.i32):
        return np.asarray([np.sum(ids % 2) for ids in response_ids], np.float32)

    @fr.flow
    def grpo(prompts, policy, ref):
        rows = fr.logprobs(ref, odd_digits(fr.rollout(policy, prompts, n=4)), out="ref_logprobs")
        return fr.update(policy, advantages.group_norm(rows), loss=losses.ppo_clip(0.2) + 0.1 * losses.kl("k3"))

    return grpo


def run(flow, steps, **models):
    plan = plan_of(flow, steps, cluster=Cluster.named("1xH100"))
    inputs = {"policy": tiny_model(0), "ref": tiny_model(0), **models}
    return fr.run_local(
        flow, prompts=make_task(0)[0], plan=plan, steps=3, batch=3, max_tokens=4, out=None, progress="off", **inputs
    )


PARKED = (
    "rollout",
    move(StepKind.ONLOAD, "ref.in", "ref_logprobs"),
    "ref_logprobs",
    move(StepKind.OFFLOAD, "ref.out", "ref_logprobs", writes=False),
    move(StepKind.ONLOAD, "policy.in", "update"),
    "update",
    move(StepKind.OFFLOAD, "policy.out", "update", writes=True),
)


def test_a_plan_that_parks_gives_the_same_numbers(flow, monkeypatch):
    expected = run(flow, ["rollout", "ref_logprobs", "update"])
    monkeypatch.setattr(TorchHost, "device", property(lambda host: "elsewhere:0"))
    parked = run(flow, PARKED)
    assert numbers(parked) == numbers(expected)
    for name, host in parked.hosts.items():
        host.onload()
        found, wanted = host.state(), expected.hosts[name].state()
        assert str(found) == str(wanted), name
    moved = {
        (e.step, e.attributes["plan_step"]): (e.bytes, e.attributes["did"])
        for e in parked.events
        if e.what != "compute"
    }
    size = sum(p.numel() * 4 for p in parked.hosts["ref"].module.parameters())
    assert moved[0, "ref.in"] == (0, "nothing to move: it is on the device")
    assert moved[0, "ref.out"][1] == "copied to the host" and moved[0, "ref.out"][0] >= size
    assert moved[1, "ref.in"] == (moved[0, "ref.out"][0], "copied to the device")
    assert moved[1, "ref.out"] == moved[2, "ref.out"] == (0, "nothing copied: what the host has is good")
    for step in (0, 1, 2):  # the sampler looks at the policy's weights: moments leave
        assert 2 * size <= moved[step, "policy.out"][0] < 2.1 * size
    assert moved[2, "policy.in"] == (moved[1, "policy.out"][0], "copied to the device")


def test_a_plan_says_where_the_optimizer_is(flow, monkeypatch):
    expected = run(flow, ["rollout", "ref_logprobs", "update"])
    monkeypatch.setattr(TorchHost, "device", property(lambda host: "elsewhere:0"))
    for offload in ("sopt", "opt"):
        found = run(flow, ["rollout", "ref_logprobs", compute("update", offload=offload)])
        assert (
            type(found.hosts["policy"].trainer.store).__name__ == {"sopt": "StreamedAdamW", "opt": "CpuAdamW"}[offload]
        )
        assert numbers(found) == numbers(expected)
    given = fr.Model(**{**vars(tiny_model(0)), "offload": "opt"})
    found = run(flow, ["rollout", "ref_logprobs", compute("update", offload="none")], policy=given)
    assert type(found.hosts["policy"].trainer.store).__name__ == "ResidentAdamW"


def test_a_plan_that_cannot_be_done_is_refused(flow, monkeypatch):
    run(flow, ["rollout", "ref_logprobs", compute("update", offload="all")])  # all is in the host's memory
    monkeypatch.setattr(TorchHost, "device", property(lambda host: "elsewhere:0"))
    with pytest.raises(
        ConfigError, match=r"'update' of the plan has offload=all, .* to elsewhere:0 .*Offload.STREAM_OPTIMIZER"
    ):
        run(flow, ["rollout", "ref_logprobs", compute("update", offload="all")])
    with pytest.raises(RunError, match=r"'x.out' of the plan moves the state of 'judge', which is neither a model"):
        run(flow, ["rollout", "ref_logprobs", "update", move(StepKind.OFFLOAD, "x.out", "judge")])
    with pytest.raises(EngineError, match="'ref' is parked in host memory, and a forward pass needs it"):
        run(flow, ["rollout", move(StepKind.OFFLOAD, "ref.out", "ref"), "ref_logprobs", "update"])


def test_places_are_checked():
    with pytest.raises(
        ConfigError, match="Model offload is one of none, park, opt, sopt; found 'sop'; did you mean 'sopt'"
    ):
        fr.Model("x", offload="sop")
