"""What the ranks of a test do where models sample on several ranks: GRPO on a tiny model, with either sampler."""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flowrl as fr
from examples.tiny import CharTokenizer, make_task, tiny_llama
from flowrl.engines.protocol import SampleKey, SampleRequest, SamplingOptions, TokenRows
from flowrl.mesh import Mesh
from flowrl.planner.steps import Plan, Predicted, Step
from flowrl.planner.tasks import Lane, StepKind
from flowrl.runtime.ranks import run_ranks
from flowrl.schema.ragged import Ragged
from flowrl_operators import advantages, losses
from tests.distributed.rank_flows import even_digits, numbers, plan_of

STEPS = 3
MAX_TOKENS = 6
OPTIONS: dict[str, Any] = {
    "steps": STEPS, "batch": 5, "max_tokens": MAX_TOKENS, "progress": "off", "reward_workers": 0, "out": None
}  # fmt: skip
"""Five prompts do not divide by the ranks."""


asked: list[str] = []
"""What an environment was asked in this process."""


@fr.component
class Asks:
    """Answers with a digit. Each response is asked about once, on one rank."""

    def reset(self, row: dict[str, Any]) -> int:
        return 0

    def step(self, state: int, response: str) -> str | None:
        asked.append(response)
        return str(len(response) % 10)


@fr.flow
def grpo(prompts, policy, *, group_size=4, turns=1):
    environment = Asks() if turns > 1 else None
    rows = fr.rollout(policy, prompts, n=group_size, environment=environment, max_turns=turns)
    rows = advantages.group_norm(even_digits(rows))
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))


def model(sampler: str, *, tied: bool = True, device: str = "cpu", **options: Any) -> fr.Model:
    module = tiny_llama(0, hidden_size=128)
    if not tied:
        module.config.tie_word_embeddings = False
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().flip(0) * 2)
    optimizer = fr.AdamW(lr=1e-2, eps=1e-3)
    return fr.Model(
        module, tokenizer=CharTokenizer(), optimizer=optimizer, device=device, micro_batch_tokens=64, sample_batch_tokens=256,
        sampler=sampler, sampler_options=options,
    )  # fmt: skip


def inputs(said: dict[str, Any]) -> dict[str, Any]:
    options = said.get("options", {})
    policy = model(said["sampler"], tied=said.get("tied", True), device=said.get("device", "cpu"), **options)
    return {"prompts": make_task(0, num_train=64, num_heldout=1)[0], "policy": policy}


def placed(graph: fr.Graph, sampling: str, training: str) -> Plan:
    """Everything on the ranks from 0 on; new weights come after each update."""
    meshes = [Mesh(0, fr.Layout.parse(text).size) for text in (sampling, training)]
    where = {"rollout": (meshes[0], sampling), "old_logprobs": (meshes[1], training), "update": (meshes[1], training)}
    handover = Step(
        "gen.weights", "policy", StepKind.RESHARD, meshes[0], (Lane.COMPUTE, Lane.NVLINK), Predicted(0.01),
        source=meshes[1], reads=("policy",),
    )  # fmt: skip
    return plan_of(graph, where, handover)


def sampled(said: dict[str, Any]) -> None:
    """On each rank: what is sampled and learned with each pair of layouts.

    Args:
        said: `folder`; `layouts` [(sampling, training)]; `sampler` and its `options`; `tied`, `turns`, `device`, `wire`.
    """
    rank = int(os.environ["RANK"])
    if said.get("wire") == "nccl":
        torch.cuda.can_device_access_peer = lambda *_: False
    graph = grpo.graph(turns=said.get("turns", 1))
    for sampling, training in said["layouts"]:
        asked.clear()
        plan = placed(graph, sampling, training)
        with run_ranks(graph, plan=plan, timeout_s=120.0, **OPTIONS, **inputs(said)) as run:
            found = {
                "numbers": numbers(run), "asked": len(asked), "weights": {}, "gaps": gaps(run), "rows": {},
                "moved": [event.attributes["did"] for event in run.events if event.what == "reshard"],
            }  # fmt: skip
            policy = run.hosts["policy"]
            found["device"] = policy.device
            if policy.has_main:
                found["weights"] = policy.state()["weights"]
            if rank == 0:
                found["rows"] = columns(run)
            opened = [weakref.ref(host.module) for host in policy.hosts.values()]
        del run, policy
        gc.collect()
        found["left"] = sum(one() is not None for one in opened)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            found["left_bytes"] = torch.cuda.memory_allocated()
        torch.save(found, Path(said["folder"], f"{sampling}-{training}.{rank}.pt"))


def alone(said: dict[str, Any]) -> dict[str, Any]:
    """The same of one process without a plan."""
    asked.clear()
    graph = grpo.graph(turns=said.get("turns", 1))
    with fr.run_local(graph, **OPTIONS, **inputs(said)) as run:
        weights = run.hosts["policy"].state()["weights"]
        return {"numbers": numbers(run), "asked": len(asked), "weights": weights, "rows": columns(run)}


def columns(run: fr.Run) -> dict[str, Any]:
    """Of the last step's samples."""
    rows = run.rows("rollout")
    return {
        "response": list(rows["response"]), "ids": np.concatenate(list(rows["response_ids"])),
        "logprobs": np.concatenate(list(rows["rollout_logprobs"])),
    }  # fmt: skip


def gaps(run: fr.Run) -> list[float]:
    """After the last update: how far what the sampler says of tokens that it draws is from what the weights that came say."""
    shared = run.hosts["policy"]
    desk = shared._desk
    desk.path = "rollout"
    found = []
    for site in desk.places.others("policy"):
        shared.handover(site)
        host = shared.hosts.get(site)
        if host is None:
            continue
        prompts = [[3 + row, 4, 5] for row in range(4)]
        requests = [
            SampleRequest(ids, MAX_TOKENS, SampleKey(9, 0, "gap", str(row), 0)) for row, ids in enumerate(prompts)
        ]
        answers = host.generate(requests, SamplingOptions())
        ids = [Ragged.of(each, np.int32) for each in (prompts, [one.ids for one in answers])]
        own = host.logprobs(TokenRows(*ids, np.ones(4, np.float32))).values
        found.append(float(np.abs(own - np.concatenate([one.logprobs for one in answers])).max()))
        assert host.version == STEPS
    return found


if __name__ == "__main__":
    sampled(json.loads(sys.argv[1]))
