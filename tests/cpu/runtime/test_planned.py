"""From a flow to a plan, to a run of it with a tiny model, to what it took: all on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import flowrl as fr
from examples.tiny import CharTokenizer, make_task, tiny_llama, tiny_model
from flowrl.engines.meter import CudaMeter, ProcessMeter, open_meter, resident_bytes
from flowrl.planner.corrected import corrected
from flowrl.planner.measured import compare_run
from flowrl.planner.options import Choices
from flowrl.planner.tasks import StepKind
from flowrl.runtime.rundir import RunDir
from flowrl_operators import advantages, losses, rewards

TOKENS = 64
"""Of a micro-batch: less than a step has, so that there are several."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@fr.operator(writes={"reward": fr.SAMPLE.f32})
def odd_digits(response_ids: fr.TOKEN.i32):
    """A reward that differs between the responses of an untrained model."""
    return np.asarray([np.sum(ids % 2) for ids in response_ids], np.float32)


@fr.flow
def ppo(prompts, policy, ref, critic):
    """Four models' passes; in the flow each takes the table of the one before."""
    rows = odd_digits(fr.rollout(policy, prompts, n=4))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.values(critic, rows)
    rows = advantages.gae(rewards.kl_shaped(rows, coefficient=0.05), gamma=1.0, lam=0.95)
    policy = fr.update(policy, fr.repeat(rows, minibatches=2), loss=losses.ppo_clip(0.2))
    return policy, fr.update(critic, rows, loss=losses.value_clip(0.2))


def models() -> dict[str, fr.Model]:
    """As a user has them: built already, the planner reads their configs."""
    return {"policy": tiny_model(0), "ref": tiny_model(0), "critic": tiny_model(1, head="value")}


def planned(**choices: Any) -> fr.Plan:
    workload = fr.Workload(6, fr.Lengths.fixed(6), fr.Lengths.fixed(6), group_size=4)
    made = Choices(micro_batch_tokens=(TOKENS,), **choices)
    return fr.plan(ppo, models=models(), cluster="cpu", workload=workload, choices=made)


def run(given: dict[str, fr.Model], **options: Any) -> fr.Run:
    rows, _ = make_task(0, num_train=24, num_heldout=1)
    settings = {"steps": 3, "out": None, "progress": "off", "batch": 6, "max_tokens": 6, "reward_workers": 0, **options}
    return fr.run_local(ppo, prompts=rows, **settings, **given)


def bits(run: fr.Run) -> dict[str, bytes]:
    """Every weight and every moment of the optimizers, exactly."""
    found = {}
    for name, host in run.hosts.items():
        state = host.state()
        for key, array in state.get("weights", {}).items():
            found[f"{name}.{key}"] = np.asarray(array).tobytes()
        for key, entry in state.get("optimizer", {}).items():
            found[f"{name}.{key}.m"] = np.asarray(entry["exp_avg"]).tobytes()
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> fr.Run:
    return run(models(), plan=planned(), out=str(tmp_path_factory.mktemp("runs")))


def test_a_planned_run_is_bit_for_bit_the_run_with_its_settings(done):
    plain = models()
    for name, fields in done_settings(done).items():
        plain[name] = replace(plain[name], **fields)
    without = run(plain)
    assert bits(done) == bits(without) and len(bits(done)) > 50
    times = ("time/", "tokens_per_s")
    for one, other in zip(done.metrics, without.metrics, strict=True):
        assert {k: repr(v) for k, v in one.items() if not k.startswith(times)} == {
            k: repr(v) for k, v in other.items() if not k.startswith(times)
        }


def done_settings(run: fr.Run) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = RunDir.open(run.path).info["plan"]["settings"]
    return found


def test_the_plans_settings_reach_the_models(done):
    said = done_settings(done)
    assert said["policy"]["micro_batch_tokens"] == said["critic"]["micro_batch_tokens"] == TOKENS
    assert said["ref"] == {"sample_batch_tokens": TOKENS}
    host = done.hosts["policy"]
    assert host.trainer.micro_batch_tokens == TOKENS and host.device == "cpu"


def test_recomputation_is_done_where_the_plan_has_it():
    plan = planned(recompute=(True,))
    assert all(dict(s.settings)["recompute"] for s in plan.steps if s.node in ("update", "update_2"))
    again = run(models(), plan=plan, steps=1)
    assert again.hosts["policy"].spec.gradient_checkpointing and again.hosts["policy"]._checkpointed
    once = run(models(), plan=planned(recompute=(False,)), steps=1)
    assert not once.hosts["policy"].spec.gradient_checkpointing
    for name in ("update/grad_norm", "update_2/loss", "update_2/grad_norm"):
        assert again.metrics[0][name] == pytest.approx(once.metrics[0][name], rel=1e-3) and once.metrics[0][name] > 1e-2


def test_predicted_is_compared_with_measured(done):
    found = done.compare()
    assert found == compare_run(done.path) and found.iterations == 2 and found.memory == "process"
    computed = [step for step in found.steps if step.kind is StepKind.COMPUTE]
    assert {"rollout", "ref_logprobs", "old_logprobs", "values", "update", "update_2"} <= {s.node for s in computed}
    for step in computed:
        assert step.runs == 2 and step.measured_s > 0 and step.ratio > 0 and step.predicted_s > 0
        assert step.measured_bytes > 50 * 2**20  # torch alone takes more
    assert 0 < sum(s.measured_s for s in computed) <= found.measured_s * 1.5
    text = str(found)
    assert "predicted s" in text and "measured s" in text and "process" in text


def test_the_handover_costs_nothing_where_the_sampler_shares_the_weights(done):
    (handover,) = (s for s in done.plan.steps if s.kind is StepKind.RESHARD)
    events = [e for e in RunDir.open(done.path).events() if e.attributes.get("plan_step") == handover.name]
    assert len(events) == 3
    assert all(e.bytes == 0 and e.attributes["did"] == "the sampler has these weights already" for e in events)


def test_a_sampler_with_weights_of_its_own_is_given_them_at_the_handover():
    """What vLLM does: bytes are counted, and the next sample finds the newest weights there."""
    host = run(models(), steps=0).hosts["policy"]
    loaded = []

    class Apart:
        version = 0

        def load(self, named, version):
            loaded.append((version, sorted(name for name, _ in named)))
            self.version = version

        def close(self): ...

    host._sampler = Apart()
    assert host.publish() == 0 and not loaded
    host.version = 3
    size = sum(p.numel() * p.element_size() for p in host.module.parameters())
    assert host.publish() == size > 0
    assert [version for version, _ in loaded] == [3] and len(loaded[0][1]) == len(list(host.module.parameters()))
    assert host.publish() == 0 and len(loaded) == 1


def test_a_run_corrects_the_cluster_for_the_next_plan(done, tmp_path):
    cluster = done.plan.cluster
    found = corrected(done.compare(), cluster)
    ratios = dict(found.ratios)
    assert set(ratios) == {"train", "forward", "sample"}
    assert found.cluster.efficiency.train == pytest.approx(min(1.0, cluster.efficiency.train / ratios["train"]))
    found.cluster.to_toml(tmp_path / "cluster.toml")
    assert fr.Cluster.from_toml(tmp_path / "cluster.toml") == found.cluster


def test_a_meter_is_of_what_the_models_are_on():
    assert isinstance(open_meter(["cpu", ""]), ProcessMeter) and isinstance(open_meter([]), ProcessMeter)
    assert isinstance(open_meter(["cpu", "cuda:0"]), CudaMeter)
    before = resident_bytes()
    held = torch.ones(2**25)
    meter = ProcessMeter()
    meter.begin()
    assert meter.end() - before > 2**26 and len(held) == 2**25


def test_the_planner_reads_a_built_model_as_it_reads_its_config():
    config = tiny_llama(0).config
    wide = fr.Workload(6, fr.Lengths.fixed(6), fr.Lengths.fixed(6), group_size=4)
    sources = ({"policy": config, "ref": config, "critic": config}, models())
    plans = [fr.plan(ppo, models=source, cluster="cpu", workload=wide) for source in sources]
    assert plans[0] == plans[1] and CharTokenizer().vocab_size == config.vocab_size
